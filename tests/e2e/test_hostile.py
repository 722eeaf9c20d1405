"""Peers that speak the protocol wrongly, user code that raises anything, memory that cannot be had, at every await."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import pickle
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import msgpack
import pytest
import torch
import zmq

import busync
from busync import blocking
from busync.manifest import GroupSpec, Manifest, TensorSpec, make_manifest
from busync.publishing import publish
from busync.wire import (
    WIRE_VERSION,
    Abandon,
    Ack,
    Announce,
    Forget,
    Hello,
    Join,
    ManifestPart,
    Nack,
    Release,
    Segment,
    Want,
    Welcome,
    Withdraw,
    encode,
    manifest_parts,
)
from tests.support import patterns
from tests.support.hostile import RawPublisher, RawSession, RawSubscriber, sealed_file
from tests.support.processes import Actor, Cast
from tests.support.roles import soon, wait_until

T = TypeVar("T")
aio = pytest.mark.asyncio
STATE = patterns.state(1, 1, patterns.SMALL)


# Subscribers that speak wrongly


@pytest.fixture
def learner(cast: Cast) -> Actor:
    return cast.publisher("p", lease_timeout=0.3)


@pytest.fixture
def well(cast: Cast, learner: Actor) -> Iterator[Actor]:
    """An honest subscriber, which must notice nothing; in the end the publisher is as it was."""
    well = cast.subscriber("p", name="well")
    learner.call("publish")
    well.call("next")
    well.call("keep")
    fds = learner.call("fds")
    yield well
    begun = time.monotonic()
    for _ in range(3):
        version = learner.call("publish")["version"]
        well.call("drop")
        assert well.call("next")[0] == version
        well.call("keep")
    assert time.monotonic() - begun < 3
    wait_until(lambda: bool(learner.call("subscribers") == ["well"]), what="the end of the hostile session")
    wait_until(lambda: bool(learner.call("fds") <= fds + 3), what="the end of its descriptors")  # the pool has grown


NONSENSE: dict[str, bytes] = {
    "a zero": b"\0",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "a pickle": pickle.dumps(os.getpid),
    "what msgpack never uses": b"\xc1" * 100,
    "too long": b"x" * 40_000,
    "nested": b"\x91" * 30_000,
    "no type": msgpack.packb({}),
    "an array": msgpack.packb([1]),
    "half a map": b"\x81\xa4type",
    "a downstream message": encode(Forget(incarnation=1, segments=(1,))),
    "no fields": msgpack.packb({"type": "hello"}),
    "a number too large": msgpack.packb({"type": "want", "number": 1 << 63, "have": 0}),
    "a topic that cannot be printed": encode(Hello(wire=WIRE_VERSION, topic="\n", name="")),
    "a name too long in UTF-8": encode(Hello(wire=WIRE_VERSION, topic="t", name="\u00e9" * 150)),
    "another wire version": encode(Hello(wire=1 << 62, topic="t", name="")),
    "want first": encode(Want(number=1, have=0)),
    "release first": encode(Release(lease=1)),
    "abandon first": encode(Abandon(leases=(1,))),
}
VIOLATIONS: dict[str, Callable[[RawSubscriber], object]] = {
    "an ack of the future": lambda raw: raw.say(Ack(version=2)),
    "hello twice": lambda raw: raw.say(Hello(wire=WIRE_VERSION, topic="default", name="")),
    "two wants": lambda raw: [raw.want(9), raw.want(9)],
    "nonsense on the bus": lambda raw: raw.say_bus(b"garbage"),
}


def test_nonsense_ends_the_session_that_says_it(learner: Actor, well: Actor) -> None:
    for what, packet in NONSENSE.items():
        with RawSubscriber("p") as raw:
            raw.say(packet)
            assert raw.was_ended(), f"{what} was accepted"
    for what, violate in VIOLATIONS.items():
        with RawSubscriber("p") as raw:
            violate(raw.join())
            assert raw.was_ended(), f"{what} was accepted"


def test_harmless_words_harm_nobody(learner: Actor, well: Actor) -> None:
    """Leases of others, versions that nobody has, numbers that come again."""
    with RawSubscriber("p") as raw:
        raw.join()
        raw.say(Abandon(leases=tuple(range(1, 200))))
        for lease in range(1, 200):
            raw.say(Release(lease=lease))
        raw.say(Withdraw(number=77))
        raw.say(Nack(version=1 << 60, code="apply", text="\x1b[31m no"))
        raw.say(Want(number=5, have=1 << 62))
        raw.say(Want(number=5, have=0))
        raw.say_bus(encode(Join()))
        raw.say_bus(b"a", b"b", b"c")
        version = learner.call("publish")["version"]
        assert learner.call("status")["subscribers"][0]["leases"] == [1], "somebody else's word ended a lease"
        assert well.call("next")[0] == version
        well.call("keep")
        assert well.call("check") == 2


def test_descriptors_sent_upstream_are_closed_at_once(learner: Actor, well: Actor) -> None:
    reader, writer = os.pipe()
    for count in (1, 2, 9, 200):
        with RawSubscriber("p") as raw:
            raw.hello()
            with suppress(PermissionError):  # Linux 6.16 and later: they are not even received
                raw.say(encode(Want(number=1, have=0)), [reader] * count)
                learner.call("status")
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"somebody still has it")
    os.close(writer)


def test_who_does_not_read_its_bus_is_sent_away(learner: Actor, well: Actor) -> None:
    with RawSubscriber("p") as raw:
        raw.join()
        said = 0
        with suppress(BrokenPipeError, ConnectionResetError):
            while said < 20_000:
                raw.say(Withdraw(number=raw.want()))  # each is granted before it is withdrawn
                said += 1
        assert said < 20_000


def test_who_does_not_read_its_door_is_sent_away(learner: Actor, well: Actor) -> None:
    """It abandons every grant, and so is sent the descriptor of a new segment with the next."""
    with RawSubscriber("p") as raw:
        raw.join()
        fds, granted = learner.call("fds"), 0
        with suppress(BrokenPipeError, ConnectionResetError):
            while granted < 1_000:
                raw.want()
                while not isinstance(message := raw.hear_bus(1.0), Announce):
                    if message is None:
                        raise BrokenPipeError
                granted += 1
                raw.say(Abandon(leases=(message.lease,)))
                learner.call("publish")
                raw.say(Withdraw(number=raw.number))  # so that the next answer takes the bus as well
                if granted % 20 == 0:
                    assert learner.call("fds") < fds + 80
        assert granted < 1_000


@pytest.mark.parametrize("frames", [(b"x",), (b"x",) * 5])
def test_a_flood_on_the_bus_holds_nobody_up(learner: Actor, well: Actor, frames: tuple[bytes, ...]) -> None:
    with RawSubscriber("p") as raw:
        raw.connect_bus(b"\1stranger")
        over = threading.Event()

        def flood() -> None:
            with suppress(zmq.Again):
                while not over.is_set():
                    raw.say_bus(*frames)

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            time.sleep(0.1)
            begun = time.monotonic()
            for _ in range(5):
                learner.call("publish")
                well.call("next")
                well.call("keep")
                well.call("drop")
            assert time.monotonic() - begun < 2.5
        finally:
            over.set()
            thread.join()


def test_connections_that_say_nothing(learner: Actor, well: Actor) -> None:
    path = os.path.join(os.environ["BUSYNC_RUNTIME_DIR"], "p", "door")
    with ExitStack() as stack:
        for _ in range(1500):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            while silent.connect_ex(path) == errno.EAGAIN:
                time.sleep(0.001)
        begun = time.monotonic()
        learner.call("publish")
        well.call("next")
        assert time.monotonic() - begun < 2
        well.call("keep")


def test_the_last_words_of_one_that_left_its_mail_unread(learner: Actor, well: Actor) -> None:
    """Its connection is reset, of which libuv tells once: whatever it said before, and its end, count."""
    with RawSubscriber("p") as raw:
        raw.join()
        raw.want()
        assert isinstance(raw.hear_bus(), ManifestPart)  # and a segment lies at the door
        for _ in range(150):
            raw.say(Withdraw(number=raw.number))
        raw.end_door()
        wait_until(lambda: bool(learner.call("subscribers") == ["well"]), what="the end of the session")


def test_half_open(learner: Actor, well: Actor) -> None:
    with RawSubscriber("p") as raw:
        raw.join()
        raw.end_door()
        wait_until(lambda: bool(learner.call("subscribers") == ["well"]), what="the end of the session")
        raw.say_bus(encode(Join()))
        assert raw.hear_bus(0.1) is None
    with RawSubscriber("p") as raw:
        raw.join()
        raw.end_bus()
        time.sleep(0.05)
        raw.want()  # the answer reaches nobody
        assert raw.was_ended()


def test_a_token_is_good_for_one_connection(learner: Actor, well: Actor) -> None:
    with RawSubscriber("p") as raw, RawSubscriber("p") as thief:
        raw.join()
        thief.connect_bus(raw.welcome.token)
        for _ in range(3):
            thief.say_bus(encode(Join()))
        raw.want()
        assert isinstance(raw.hear_bus(), ManifestPart)
        assert isinstance(raw.hear_bus(), Announce)
        assert thief.hear_bus(0.1) is None
    with RawSubscriber("p") as raw:
        raw.connect_bus(os.urandom(16))
        raw.hello()
        raw.say_bus(encode(Join()))  # under a token that nobody was given
        assert raw.hear_bus(0.1) is None


def test_topics_that_nobody_publishes_leave_room() -> None:
    with blocking.Publisher("p") as pub, ExitStack() as stack:
        for i in range(260):
            stack.enter_context(RawSubscriber("p")).say(Hello(wire=WIRE_VERSION, topic=f"t{i}", name=""))
        wait_until(lambda: len(pub.status()["topics"]) == 255, what="255 topics")
        assert pub.publish(STATE, topic="mine").version == 1


# Publishers that speak wrongly

LAYOUT = make_manifest(4000, (GroupSpec(0, 4000),), (TensorSpec("w", "float32", (1000,), (1,), 0, 0, False, False),))
LARGER = make_manifest(8000, (GroupSpec(0, 8000),), (TensorSpec("w", "float32", (2000,), (1,), 0, 0, False, False),))


def _manifest(raw: RawSession, of: Manifest = LAYOUT, **changes: Any) -> None:
    for part in manifest_parts(of, 77):
        fields = {name: getattr(part, name) for name in part.__struct_fields__}
        raw.say_bus(ManifestPart(**{**fields, **changes}))


def _announce(raw: RawSession, number: int, *, by_door: bool = False, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "incarnation": 77, "number": number, "lease": 1, "version": 1, "layout": LAYOUT.digest, "segment": 1,
        "label": "", "published_at": 1.0, "values": {},
    }  # fmt: skip
    (raw.say if by_door else raw.say_bus)(Announce(**fields | changes))


def _grant(raw: RawSession, **changes: Any) -> None:
    raw.welcome()
    want = raw.hear_want()
    raw.segment(1, 4096)
    _manifest(raw)
    _announce(raw, want.number, **changes)


def _board(make: Callable[[], int | None], **changes: Any) -> Callable[[RawSession], None]:
    def script(raw: RawSession) -> None:
        fd = make()
        try:
            raw.welcome(fd=fd, **changes)
        finally:
            if fd is not None:
                os.close(fd)

    return script


def _segment(make: Callable[[], int]) -> Callable[[RawSession], None]:
    def script(raw: RawSession) -> None:
        raw.welcome()
        raw.hear_want()
        fd = make()
        raw.segment(1, 4096, fd)
        os.close(fd)

    return script


def _no_segment(raw: RawSession) -> None:
    raw.welcome()
    raw.hear_want()
    raw.say(Segment(incarnation=77, segment=1, nbytes=4096))


def _many_descriptors(raw: RawSession) -> None:
    raw.welcome()
    raw.hear_want()
    raw.say(Segment(incarnation=77, segment=1, nbytes=4096), [raw.publisher.board] * 20)


def _says(*packets: bytes) -> Callable[[RawSession], None]:
    def script(raw: RawSession) -> None:
        raw.welcome()
        raw.hear_want()
        for packet in packets:
            raw.say_bus(packet)

    return script


def _overlapping(raw: RawSession) -> None:
    raw.welcome()
    raw.hear_want()
    _manifest(raw, groups=(GroupSpec(0, 4000), GroupSpec(2048, 1000)))


def _contradictory(raw: RawSession) -> None:
    raw.welcome()
    raw.hear_want()
    _manifest(raw, parts=2)
    _manifest(raw, parts=2, part=1, layout=b"x" * 16, groups=(), tensors=())


def _beyond(raw: RawSession) -> None:
    raw.welcome()
    want = raw.hear_want()
    raw.segment(1, 4096)
    _manifest(raw, LARGER)
    _announce(raw, want.number, layout=LARGER.digest)


def _two_incarnations(raw: RawSession) -> None:
    """A smaller segment of the same number, of an incarnation that is not the session's: it counts for nothing."""
    raw.welcome()
    want = raw.hear_want()
    raw.segment(1, 8192)
    raw.segment(1, 4096, incarnation=5)
    _manifest(raw, LARGER)
    time.sleep(0.05)
    _announce(raw, want.number, layout=LARGER.digest)


def _without_layout(raw: RawSession) -> None:
    raw.welcome()
    _announce(raw, raw.hear_want().number)


def _without_layout_by_the_door(raw: RawSession) -> None:
    raw.welcome()
    _announce(raw, raw.hear_want().number, by_door=True)


def _older(raw: RawSession) -> None:
    _grant(raw, version=5)
    _announce(raw, raw.hear_want().number, version=4, lease=2)


def _older_by_the_door(raw: RawSession) -> None:
    _grant(raw, version=5)
    _announce(raw, raw.hear_want().number, version=4, lease=2, by_door=True)


def _one_lease_twice(raw: RawSession) -> None:
    _grant(raw)
    _announce(raw, raw.hear_want().number, version=2)


def _forgets_what_it_announces(raw: RawSession) -> None:
    _grant(raw)
    raw.say(Forget(incarnation=77, segments=(1,)))
    _announce(raw, raw.hear_want().number, version=2, lease=2)


def _welcomes_twice(raw: RawSession) -> None:
    raw.welcome()
    raw.say(Welcome(wire=WIRE_VERSION, incarnation=77, token=b"x" * 16, slot=1, max_held=2), [raw.publisher.board])


def _negative() -> bytes:
    part = msgpack.unpackb(encode(manifest_parts(LAYOUT, 77)[0]))
    part["tensors"][0][5] = -4
    return bytes(msgpack.packb(part))


#: What the publisher does, and what a subscriber gets to know: the shape of the tensor, or a pattern of the text.
WRONGS: dict[str, tuple[Callable[[RawSession], None], int | str]] = {
    "nothing": (_grant, 1000),
    "a board that is a pipe": (_board(lambda: _pipe()), "not a file"),
    "no board": (_board(lambda: None), "without its descriptor"),
    "a board without seals": (_board(lambda: sealed_file(4096, seals=0)), "its seals are 0x0"),
    "a large board": (_board(lambda: sealed_file(8192)), "should have 4096"),
    "another's board": (_board(lambda: sealed_file(4096), incarnation=5), "another incarnation"),
    "a segment without seals": (_segment(lambda: sealed_file(4096, seals=0)), "its seals are 0x0"),
    "a segment of another size": (_segment(lambda: sealed_file(8192)), "should have 4096"),
    "a segment that is a device": (_segment(lambda: os.open("/dev/zero", os.O_RDONLY)), "not a file"),
    "no segment": (_no_segment, "without its descriptor"),
    "twenty descriptors": (_many_descriptors, "did not all arrive"),
    "a layout beyond its segment": (_beyond, "8000 bytes in a segment of 4096"),
    "segments of two incarnations": (_two_incarnations, 2000),
    "groups that overlap": (_overlapping, "overlap"),
    "a manifest that contradicts itself": (_contradictory, "does not follow"),
    "a negative offset": (_says(_negative()), "not a valid message"),
    "no layout": (_without_layout, "never sent"),
    "no layout, by the door": (_without_layout_by_the_door, "never sent"),
    "an older version by the door": (_older_by_the_door, "version 4 after version 5"),
    "an unprintable label": (lambda raw: _grant(raw, label="a\0\x1b[31m"), "printable"),
    "garbage": (_says(b"garbage"), "not a valid message"),
    "eight million brackets": (_says(b"\x91" * 8_000_000), "not a valid message"),
    "two welcomes": (_welcomes_twice, "a second Welcome"),
    "an older version": (_older, "version 4 after version 5"),
    "one lease twice": (_one_lease_twice, "lease 1 for a second version"),
    "a segment that was forgotten": (_forgets_what_it_announces, "not happen"),
}


def _pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


@pytest.mark.parametrize("what", WRONGS)
def test_a_publisher_that_speaks_wrongly(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of it reaches the application, attempts to connect again do not pile up, and the cause is told."""
    script, expected = WRONGS[what]
    said: list[str] = []
    shapes: list[int] = []
    with RawPublisher("p", script) as raw:
        held = []
        try:
            with blocking.Subscriber("p", connect_timeout=0.2) as sub:
                for _ in range(2):
                    with suppress(busync.WaitTimeout):
                        held.append(sub.next(timeout=0.15))
                        if isinstance(expected, int):  # or it is copied, and its lease over with the next Want
                            shapes.append(held[-1].tensors["w"].numel())
                if isinstance(expected, str):
                    sub.next(timeout=0.1)
        except busync.BusyncError as error:
            said.append(str(error))
        held.clear()
        assert raw.sessions < 10
    said += [record.getMessage() for record in caplog.records]
    if isinstance(expected, int):
        assert shapes == [expected], said
    else:
        assert any(expected in text for text in said), f"nobody said {expected!r}: {said}"


# Stopped, and slow


def test_requests_do_not_pile_up_while_the_publisher_is_stopped(cast: Cast) -> None:
    learner = cast.publisher("p")
    with blocking.Subscriber("p") as sub:
        learner.call("publish")
        assert sub.next(timeout=5).version == 1
        attachment = sub._inner._attachment
        session = attachment.session
        assert session is not None
        os.kill(learner.pid, signal.SIGSTOP)
        try:
            for _ in range(800):
                with suppress(busync.WaitTimeout):
                    sub.next(timeout=0.0002)
            assert 0 < session.door.pending < 5
            with mock.patch.object(attachment, "turn", mock.Mock(side_effect=attachment.turn)) as turn:
                with suppress(busync.WaitTimeout):
                    sub.next(timeout=0.2)
                assert turn.call_count < 60, "a timer for each call"
        finally:
            os.kill(learner.pid, signal.SIGCONT)
        learner.start("publish")
        assert sub.next(timeout=10).version == 2
        learner.finish()
        del attachment, session, turn


@aio
async def test_the_first_request_that_finds_no_room_is_sent_later() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(STATE)
        with mock.patch("busync.transport.door.DoorConnection._transmit", return_value=False):
            waiting = asyncio.create_task(sub.next(timeout=5))
            await asyncio.sleep(0.02)
        assert (await waiting).version == 1
        del waiting


@aio
async def test_a_second_waiter_is_told_when_others_hold_everything() -> None:
    async with busync.Publisher("p", max_held=2) as pub, busync.Subscriber("p") as sub:
        await pub.publish(STATE)
        held = [await sub.next(timeout=5)]
        second = asyncio.create_task(sub.wait_version(3))
        await asyncio.sleep(0.02)
        await pub.publish(STATE)
        held.append(await sub.next(timeout=5))
        await pub.publish(STATE)
        with pytest.raises(busync.PinnedError):
            async with asyncio.timeout(5):
                await second
        third = asyncio.create_task(sub.wait_version(4))
        with pytest.raises(busync.PinnedError):
            await third
        held.clear()
        assert (await sub.wait_version(3, timeout=5)).version == 3
        del second, third


@aio
async def test_no_publish_waits_for_a_digest() -> None:
    over = threading.Event()
    with mock.patch("busync.server.content_digest", side_effect=lambda _: over.wait(10) and b"x" * 32):
        async with busync.Publisher("p", copy_threads=1) as pub, busync.Subscriber("p", digests=True) as sub:
            state = {"w": torch.zeros(1_000_000)}
            for _ in range(3):
                begun = time.monotonic()
                await pub.publish(state)
                assert time.monotonic() - begun < 1
                await sub.next(timeout=5)
            over.set()


# User code that raises


class _Raising(Mapping[str, torch.Tensor]):
    def __init__(self, where: str, kind: type[BaseException]) -> None:
        self.where, self.kind = where, kind

    def _at(self, where: str) -> None:
        if where == self.where:
            raise self.kind

    def __getitem__(self, name: str) -> torch.Tensor:
        self._at("getitem")
        return torch.zeros(100_000)

    def __iter__(self) -> Iterator[str]:
        self._at("iter")
        return iter(["a"])

    def __len__(self) -> int:
        self._at("len")
        return 100


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise self


ERRORS = [StopIteration, StopAsyncIteration, KeyError, MemoryError, SystemExit, GeneratorExit]


@aio
@pytest.mark.parametrize("kind", ERRORS)
async def test_user_code_may_raise_anything(kind: type[BaseException]) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise kind

    model = torch.nn.Linear(300, 300)
    async with busync.Publisher("p", max_segments=2) as pub, busync.Subscriber("p") as sub, asyncio.timeout(10):
        for where in ("getitem", "iter", "len"):
            with pytest.raises((kind, RuntimeError)):
                await pub.publish(_Raising(where, kind))
        await pub.publish(model)
        snapshot = await sub.next(timeout=5)
        if issubclass(kind, Exception):  # the others end the caller's own loop, from whatever callback
            with pytest.raises((kind, RuntimeError)):
                await snapshot.load_into(torch.nn.Linear(300, 300), map=fail)
            other = torch.nn.Linear(300, 300)
            with mock.patch.object(other, "state_dict", fail), pytest.raises((kind, RuntimeError)):
                await snapshot.load_into(other)
        with suppress(kind, RuntimeError):
            async with snapshot:
                raise kind
        assert (await pub.publish(model)).version == 2
        await soon(lambda: pub.status()["subscribers"][0]["leases"] == [], what="the end of every lease")


@aio
async def test_a_load_that_fails_keeps_no_lease() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(patterns.state(1, 1))
        gc.disable()
        try:
            with pytest.raises(busync.MismatchError, match="the module has no"):
                await (await sub.next(timeout=5)).load_into(torch.nn.Linear(2, 2))
            await soon(lambda: pub.status()["subscribers"][0]["leases"] == [], what="the end of the lease")
        finally:
            gc.enable()


@aio
async def test_an_error_without_a_text_ends_the_lease_as_well() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(STATE)
        snapshot = await sub.next(timeout=5)
        with suppress(_Unspeakable):
            async with snapshot:
                raise _Unspeakable
        await soon(lambda: pub.status()["subscribers"][0]["leases"] == [], what="the end of every lease")


# Nothing can be had


@aio
@pytest.mark.parametrize("call", ["posix_fallocate", "memfd_create"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EINTR, errno.EMFILE])
async def test_memory_cannot_be_had(call: str, number: int) -> None:
    wanted = busync.FdError if number == errno.EMFILE else busync.AllocationError
    async with busync.Publisher("p", max_segments=2) as pub, busync.Subscriber("p") as sub:
        with mock.patch(f"os.{call}", side_effect=OSError(number, os.strerror(number))):
            for _ in range(3):
                with pytest.raises(wanted):
                    await pub.publish(STATE)
                with pytest.raises(wanted):
                    async with pub.loan(like=STATE):
                        pass
        assert (await pub.publish(STATE)).version == 1
        assert (await sub.next(timeout=5)).version == 1
        await pub.publish(STATE)
        snapshot = await sub.next(timeout=5)
        with mock.patch("busync.handles.memory.map_fd", side_effect=OSError(errno.ENOMEM, "no memory")):
            with pytest.raises(busync.AllocationError):
                _ = snapshot.tensors
            with pytest.raises(busync.AllocationError):
                await snapshot.load_into(patterns.Module(patterns.SMALL))
        assert [v["state"] for v in pub.status()["topics"]["default"]["versions"]] == ["PUBLISHED"]


@aio
async def test_the_directory_vanishes(runtime_dir: Path) -> None:
    """Sessions go on; newcomers find nobody; a second publisher may come, and the first leaves it alone."""
    async with busync.Publisher("p") as first, busync.Subscriber("p") as sub:
        shutil.rmtree(runtime_dir / "p")
        await first.publish(STATE)
        assert (await sub.next(timeout=5)).version == 1
        with pytest.raises(busync.PublisherLost):
            async with busync.Subscriber("p", connect_timeout=0.1):
                pass
        async with busync.Publisher("p") as second:
            await first.close()
            await second.publish(STATE, label="second")
            async with busync.Subscriber("p", connect_timeout=5) as other:
                assert (await other.next(timeout=5)).label == "second"
            assert (await sub.next(timeout=5)).label == "second"


# Cancelled at every await


class _CancelAt:
    """Awaits a coroutine and cancels the task at its ``n``-th suspension."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], n: int) -> None:
        self.coroutine = coroutine
        self.left = n

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self.coroutine.__await__()
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                waits_for = inner.send(value) if error is None else inner.throw(error)
            except StopIteration as end:
                return end.value
            self.left -= 1
            if self.left < 0:
                task = asyncio.current_task()
                assert task is not None
                self.left = 1 << 60
                task.cancel()
            value = error = None
            try:
                value = yield waits_for
            except BaseException as thrown:
                error = thrown


async def _cancelled_at_every_await(make: Callable[[], Coroutine[Any, Any, Any]], least: int) -> None:
    """Run a coroutine with a cancellation at its first await, its second, and so on, until it gets through."""
    for n in range(100):

        async def run(n: int = n) -> None:
            await _CancelAt(make(), n)

        task = asyncio.create_task(run())
        await asyncio.wait([task], timeout=10)
        assert task.done(), f"stuck after a cancellation at await {n}"
        if not task.cancelled():
            task.result()
            assert n >= least, f"only {n} awaits"
            return
    raise AssertionError("it never got through")


@aio
async def test_the_callers_awaits_cancelled_one_by_one() -> None:
    async def session() -> None:
        async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
            await pub.publish(patterns.state(1, 1))
            async with pub.loan(like=STATE) as loan:
                loan.tensors["weight"].zero_()
                await loan.publish()
            snapshot = await sub.next(timeout=5)
            await snapshot.load_into(patterns.Module(patterns.SMALL))
            await pub.publish(patterns.state(1, 2))
            await (await sub.next(timeout=5)).load_into(patterns.Module())
            await pub.wait(2, "acked", timeout=5)

    await _cancelled_at_every_await(session, 8)


@aio
async def test_the_servers_awaits_cancelled_one_by_one() -> None:
    """publish() on the publisher's own thread: nothing is left, no number is burnt."""
    state = patterns.state(3, 1)
    for n in range(30):
        async with busync.Publisher("p", max_segments=2) as pub:

            async def cancelled(*args: Any, n: int = n) -> Any:
                return await _CancelAt(publish(*args), n)

            done = True
            with mock.patch("busync.publisher.publish", cancelled):
                try:
                    await pub.publish(state)
                except busync.ClosedError:
                    done = False
            versions = pub.status()["topics"]["default"]["versions"] if done or pub.status()["topics"] else []
            assert [v["state"] for v in versions] in ([], ["PUBLISHED"])
            async with asyncio.timeout(5):
                report = await pub.publish(state)
            assert report.version == len(versions) + 1
            if done:
                assert n >= 2
                return
    raise AssertionError("it never got through")
