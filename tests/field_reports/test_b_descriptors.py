"""Passing descriptors over Unix sockets."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import uvloop

import busync
from busync.fds import OwnedFd
from busync.transport.door import DoorConnection, DoorListener, door_connect
from tests.field_reports.kit import bus, prctl, scaled
from tests.limits.kit import Ticker
from tests.support import patterns
from tests.support.leaks import resources
from tests.support.mutants import Mutant
from tests.support.processes import Cast
from tests.support.roles import PublisherRole, SubscriberRole, soon, wait_until

MUTANTS = {
    "test_b23_a_version_is_one_descriptor_however_many_tensors": Mutant(
        "busync/links.py",
        "self.send_door(session, encode(message), segment.host.fd)",
        "[self.send_door(session, encode(message), segment.host.fd) for _ in range(3)]",
        "the descriptors of a version grow with its tensors",
    ),
    "test_b24_a_descriptor_stays_with_its_message": Mutant(
        "busync/transport/door.py",
        "socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK",
        "socket.SOCK_STREAM | socket.SOCK_NONBLOCK",
        "reads of a stream merge and split what was sent",
    ),
    "test_b24_a_peer_that_sends_single_bytes_is_turned_away": Mutant(
        "busync/links.py",
        'self._core.refuse(peer.session, "protocol", reason[:1000])',
        "pass",
        "a peer that breaks the protocol keeps its session",
    ),
    "test_b25_both_loops_behave_alike": Mutant(
        "busync/session.py",
        "            if self.door.outbox:\n",
        "            time.sleep(0.03)\n            if self.door.outbox:\n",
        "a turn blocks the loop",
    ),
    "test_b26_a_cancelled_fetch_leaves_nothing": Mutant(
        "busync/asking.py",
        "        finally:\n            self._remove(waiter)\n            # An exception",
        "        finally:\n            # An exception",
        "who was cancelled stays in the list of those that wait",
    ),
    "test_b27_credentials_beside_a_descriptor_do_no_harm": Mutant(
        "busync/transport/door.py",
        "for level, kind, payload in control\n",
        "for level, kind, payload in control[:1]\n",
        "only the first control message is looked at",
    ),
    "test_b28_no_right_over_the_publisher_is_needed": Mutant(
        "busync/session.py",
        "        self.door = door_connect(endpoint.door_path)\n",
        "        self.door = door_connect(endpoint.door_path)\n"
        "        os.close(os.open(f'/proc/{self.door.peer.pid}/mem', os.O_RDONLY))\n",
        "a reader takes what it needs out of the publisher's process",
    ),
}
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.mark.parametrize("count", [254, 600, 2000])
def test_b23_a_version_is_one_descriptor_however_many_tensors(count: int) -> None:
    """254, 600 or 2,000 separate storages: one descriptor, a few packets, every value right."""
    source = {f"t{i}": torch.full((3,), float(i)) for i in range(count)}
    sent: list[bool] = []
    send = DoorConnection.send

    def note(door: DoorConnection, data: bytes, fd: OwnedFd | None = None) -> bool:
        sent.append(fd is not None)
        return send(door, data, fd)

    with bus() as (pub, (sub,)):
        with mock.patch.object(DoorConnection, "send", note):
            pub.publish(source)
            snapshot = sub.next(5)
            snapshot.ack()
        assert sum(sent) == 1, "descriptors"
        assert len(sent) <= 4, "packets"  # Want, Segment, Ack, Withdraw
        assert len(snapshot.tensors) == count
        assert all(bool((tensor == int(name[1:])).all()) for name, tensor in snapshot.tensors.items())
        del snapshot


def test_b24_a_descriptor_stays_with_its_message(tmp_path: Path) -> None:
    """Packets of any size, every other with a descriptor, read after random pauses: the tag in the file is its own."""
    rng = random.Random(24)
    total = scaled(1000, 5000)
    listener = DoorListener(str(tmp_path / "door"))
    receiver = door_connect(str(tmp_path / "door"))
    sender = listener.accept()
    assert sender is not None
    before = resources().fds.total()
    with_fd = [rng.random() < 0.5 for _ in range(total)]
    sent = received = 0
    while received < total:
        for _ in range(rng.randrange(40)):
            if sent == total or sender.pending > 20:
                break
            tag = sent.to_bytes(4, "little")
            data = tag + rng.randbytes(rng.choice([0, 1, 100, 5000]))
            if with_fd[sent]:
                with OwnedFd(os.memfd_create("tag")) as fd:
                    os.pwrite(fd.fileno(), tag, 0)
                    sender.send(data, fd)
            else:
                sender.send(data)
            sent += 1
        sender.flush()
        for _ in range(rng.randrange(40)):
            packet = receiver.receive()
            if packet is None:
                break
            assert int.from_bytes(packet.data[:4], "little") == received, "packets were merged or split"
            assert len(packet.fds) == with_fd[received]
            for got in packet.fds:
                assert os.pread(got.fileno(), 4, 0) == packet.data[:4], "the descriptor of another message"
                got.close()
            received += 1
    assert resources().fds.total() == before
    for door in (sender, receiver, listener):
        door.close()


def test_b24_a_peer_that_sends_single_bytes_is_turned_away(runtime_dir: Path) -> None:
    """Byte by byte, or a message in two halves: that session ends, and nobody else notices."""
    with bus() as (pub, (sub,)):
        for pieces in ([b"\x81"] * 20, [b"\x82\xa4", b"type"], [os.urandom(300) for _ in range(3)]):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.settimeout(5)
                peer.connect(str(runtime_dir / "p" / "door"))
                with suppress(BrokenPipeError, ConnectionResetError):
                    for piece in pieces:
                        peer.send(piece)
                        time.sleep(0.001)
                with suppress(ConnectionResetError):
                    while peer.recv(65536):
                        pass
            wait_until(lambda: len(pub.status()["subscribers"]) == 1)
            pub.publish({"w": torch.ones(3)})
            assert sub.next(5).tensors["w"].sum() == 3


@pytest.mark.parametrize("flavour", LOOPS)
def test_b25_both_loops_behave_alike(flavour: str) -> None:
    """Versions with three subscribers on one loop: the same results, and no version holds the loop for 20 ms."""
    versions = scaled(25, 100)
    with asyncio.Runner(loop_factory=LOOPS[flavour]) as runner:
        seen, held = runner.run(_stream(versions))
    assert seen == [(i, version, float(version)) for version in range(1, versions + 1) for i in range(3)]
    assert statistics.median(held) < 0.02


async def _stream(versions: int) -> tuple[list[tuple[int, int, float]], list[float]]:
    seen: list[tuple[int, int, float]] = []
    held: list[float] = []
    async with busync.Publisher("p") as pub:
        subs = [busync.Subscriber("p", name=f"reader-{i}") for i in range(3)]
        for sub in subs:
            await sub.__aenter__()
        for version in range(1, versions + 1):
            with Ticker(asyncio.get_running_loop()) as ticker:
                await asyncio.sleep(0)
                report = await pub.publish({f"t{i}": torch.full((1000,), float(version)) for i in range(20)})
                assert report.version == version
                for i, snapshot in enumerate(await asyncio.gather(*(sub.next(5) for sub in subs))):
                    seen.append((i, snapshot.version, float(snapshot.tensors["t19"][-1])))
                    await snapshot.ack()
                    del snapshot
            held.append(ticker.worst)
        for sub in subs:
            await sub.close()
    return seen, held


@pytest.mark.parametrize("flavour", LOOPS)
def test_b26_a_cancelled_fetch_leaves_nothing(flavour: str) -> None:
    """Fetches cancelled at random moments: no callback, no descriptor, no lease is left, and the next one works."""
    with asyncio.Runner(loop_factory=LOOPS[flavour]) as runner:
        runner.run(_cancel_many(random.Random(26), scaled(120, 500)))


async def _cancel_many(rng: random.Random, rounds: int) -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        version, files = 0, 0
        for round_ in range(rounds):
            if round_ == rounds // 4:
                files = resources().fds.total()
            task: asyncio.Task[Any] = asyncio.create_task(sub.next())
            if round_ % 3 == 0:
                version += 1
                await pub.publish(patterns.state(1, version, {"w": (version % 5 * 1000 + 1,)}))
            await asyncio.sleep(rng.uniform(0, 0.005))
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            del task
        await soon(lambda: pub.status()["subscribers"][0]["leases"] == [], what="the end of every lease")
        assert sub._waiters == [], "a cancelled fetch still waits"
        assert len(sub._attachment._watched) == 3  # the door, the bus, its monitor
        assert len(set(sub._attachment._watched)) == 3
        gc.collect()
        assert resources().fds.total() <= files
        version += 1
        await pub.publish(patterns.state(1, version, patterns.SMALL))
        patterns.check((await sub.next(timeout=5)).tensors, 1, version, patterns.SMALL)


def test_b27_credentials_beside_a_descriptor_do_no_harm() -> None:
    """With credentials passed at both ends, ten versions arrive; the status has every peer's process and user."""
    make = DoorConnection.__init__
    kinds: set[int] = set()

    def with_credentials(door: DoorConnection, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        make(door, sock)

    from busync.transport import door as module

    take = module._take_fds

    def note(control: list[tuple[int, int, bytes]]) -> tuple[OwnedFd, ...]:
        kinds.update(kind for _, kind, _ in control)
        return take(control)

    with (
        mock.patch.object(DoorConnection, "__init__", with_credentials),
        mock.patch.object(module, "_take_fds", note),
        bus(2) as (pub, readers),
    ):
        for version in range(1, 11):
            pub.publish({"w": torch.full((version * 500,), float(version))})
            for reader in readers:
                snapshot = reader.next(5)
                assert snapshot.version == version
                assert bool((snapshot.tensors["w"] == version).all())
            del snapshot
        assert kinds == {socket.SCM_RIGHTS, socket.SCM_CREDENTIALS}
        peers = {s["name"]: (s["pid"], s["uid"]) for s in pub.status()["subscribers"]}
        assert peers == {f"reader-{i}": (os.getpid(), os.geteuid()) for i in range(2)}


class Hardened(PublisherRole):
    """A publisher whose process nobody without special rights can look into."""

    def __init__(self, endpoint: str, options: dict[str, Any]) -> None:
        prctl(4, 0)  # PR_SET_DUMPABLE
        super().__init__(endpoint, options)


class Plain(SubscriberRole):
    """A subscriber without the right to look into other processes, whoever runs it."""

    def __init__(self, flavour: str, endpoint: str, options: dict[str, Any]) -> None:
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.capget(header, data) == 0
        for word in range(3):
            data[word] &= ~(1 << 19)  # CAP_SYS_PTRACE
        assert libc.capset(header, data) == 0
        super().__init__(flavour, endpoint, options)

    def may_look_into(self, pid: int) -> bool:
        try:
            os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))
        except PermissionError:
            return False
        return True


def test_b28_no_right_over_the_publisher_is_needed(cast: Cast) -> None:
    """A publisher that is not dumpable, a reader that may not trace it: versions are shared all the same."""
    learner = cast.begin(Hardened, "policy", {})
    learner.finish()
    reader = cast.begin(Plain, "blocking", "policy", {"connect_timeout": 3.0})
    reader.finish()
    assert not reader.call("may_look_into", learner.pid), "nothing is shown if it may"
    for version in (1, 2, 3):
        learner.call("publish")
        assert reader.call("next")[0] == version
        assert reader.call("keep") > 60_000
        reader.call("drop")
