"""From adopted to released, and the ends of processes in between (B34, B35, B36, B39, B47)."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

import busync
from busync import blocking
from busync.errors import ForkedError, OptionError, PublisherLost, WaitTimeout
from busync.transport.door import DoorConnection
from busync.wire import Release, decode_door_up
from tests.field_reports.kit import bus, leases, scaled
from tests.forking import check_in_child
from tests.support import patterns
from tests.support.kernel import keeps
from tests.support.mutants import Mutant
from tests.support.processes import Actor, Cast
from tests.support.roles import SubscriberRole, wait_until

SMALL = patterns.SMALL

MUTANTS = {
    "test_b34_when_release_arrives_nothing_of_the_version_can_be_read": (
        Mutant(
            "busync/handles/private.py", "            unmap(mapping)", "            pass",
            "Release is sent before the mapping is gone",
        ),
        Mutant(
            "busync/handles/private.py", "if not self._pagemap.untouched(address_of(mapping), self.nbytes):",
            "if False:",
            "a mapping that was written to is kept, and shows the old content for ever",
        ),
        Mutant(
            "busync/handles/private.py", "mapping.madvise(mmap.MADV_DONTFORK)  #", "pass  #",
            "children inherit what is kept, and can read it while it is written",
        ),
    ),
    "test_b34_what_a_load_keeps_is_one_read_only_mapping_until_forget": Mutant(
        "busync/session.py", "self.segments.pop(segment).close()", "self.segments[segment].close()",
        "descriptors and mappings of segments that have left the pool are kept",
    ),
    "test_b34_finalizers_in_a_cycle_run_before_its_release": Mutant(
        "busync/holds.py", "class _Word(Struct, eq=False, gc=False):", "class _Word(Struct, eq=False):",
        "the garbage collector ends a lease before the finalizers that still use it",
    ),
    "test_b35_the_source_may_go_as_soon_as_publish_returns": Mutant(
        "busync/publishing.py", "        for job in jobs:\n            job()\n        return\n",
        "        server.loop.call_later(0.05, lambda: [job() for job in jobs])\n        return\n",
        "publish returns before it has copied",
    ),
    "test_b36_a_close_waits_for_releases_and_says_who_still_held": (
        Mutant(
            "busync/publishing.py", "(held := server.core.held()) and time.monotonic() < deadline_at:",
            "(held := server.core.held()) and False:",
            "close does not wait for releases",
        ),
        Mutant(
            "busync/protocol/publisher.py", "            if e.leases\n        ]",
            "            if not e.leases\n        ]",
            "close does not say who still held a version",
        ),
    ),
    "test_b36_readers_of_a_killed_publisher_are_told_and_read_on": Mutant(
        "busync/session.py", "raise SessionEnded(\"the publisher closed the connection\") from None", "return",
        "a reader does not notice that its publisher has died",
    ),
    "test_b39_a_relay_copies": Mutant(
        "busync/publishing.py", "        layout = await _layout(server, planned.manifest)\n",
        "        layout = await _layout(server, planned.manifest)\n"
        "        vars(server).setdefault('kept', []).append(planned)\n",
        "a publisher keeps its sources, so a relay holds every version of the other bus",
    ),
    "test_b47_every_call_in_a_forked_child_is_refused": (
        Mutant(
            "busync/server.py", "    forks.ensure_same_process(server.pid, what)\n    return", "    return",
            "a child waits for a thread that it does not have",
        ),
        Mutant(
            "busync/snapshot.py", "        forks.ensure_same_process(self._pid, \"snapshot\")\n        if self._hold",
            "        if self._hold",
            "a child uses a lease that its parent ends",
        ),
        Mutant(
            "busync/publisher.py", "return server if server is not None and os.getpid() == server.pid else None",
            "return server",
            "a child's close waits for the thread of its parent",
        ),
    ),
}  # fmt: skip


def private_mappings(pid: int) -> list[str]:
    """The copy-on-write mappings of segments in a process."""
    with open(f"/proc/{pid}/maps") as maps:
        return [line for line in maps if "/memfd:busync-" in line and "rw-p" in line]


def readable_mappings(pid: int) -> list[str]:
    """Those that something may read: all but what is kept, which no child gets, and which has no page of its own."""
    found: list[str] = []
    with open(f"/proc/{pid}/smaps") as lines:
        mapping, own = "", False
        for line in lines:
            if "/memfd:busync-" in line:
                mapping = line if "rw-p" in line else ""
            elif mapping and line.startswith("Anonymous:"):
                own = line.split()[1] != "0"
            elif mapping and line.startswith("VmFlags:"):
                if own or "dc" not in line.split():
                    found.append(mapping)
                mapping = ""
    return found


def mapped_segments(pid: int) -> list[str]:
    """The inodes of all segments that a process maps."""
    with open(f"/proc/{pid}/maps") as maps:
        return sorted({line.split()[4] for line in maps if "/memfd:busync-" in line and "board" not in line})


def cast_to_any(value: object) -> Any:
    """What may be patched."""
    return value


MAPPED = {**SMALL, "rest": (20_000,)}  #: too much to be copied


class Releaser(SubscriberRole):
    """Lets go of versions in many ways, without a garbage collector, and looks at its memory before each Release."""

    def __init__(self, endpoint: str, options: dict[str, Any]) -> None:
        super().__init__("blocking", endpoint, options)
        gc.disable()
        self._door = cast_to_any(DoorConnection)
        self._send: Any = DoorConnection.send
        self._readable: list[str] = []
        send = self._send

        def look_and_send(door: DoorConnection, data: bytes, fd: Any = None) -> bool:
            if isinstance(decode_door_up(data), Release):
                self._readable += readable_mappings(os.getpid())
            return bool(send(door, data, fd))

        self._door.send = look_and_send

    def readable(self) -> list[str]:
        """What could still be read when a Release was about to be sent."""
        return self._readable

    def stop(self) -> None:
        self._door.send = self._send
        gc.enable()
        super().stop()

    def use_and_let_go(self, how: str) -> None:
        snapshot = self.sub.next(timeout=10)
        seed, version = int(snapshot.label), snapshot.version
        patterns.check(snapshot.tensors, seed, version, MAPPED)
        assert readable_mappings(os.getpid()), "nothing is mapped"
        weight = snapshot.tensors["weight"]
        if how == "the snapshot last":
            del weight
            snapshot.release()
        elif how == "a tensor last":
            snapshot.release()
            del snapshot, weight
        elif how == "a view last":
            snapshot.release()
            row = weight.t()[1:3]
            del snapshot, weight
            row.add_(1)
            del row
        elif how == "a numpy view last":
            snapshot.release()
            array = weight.numpy()[::2]
            del snapshot, weight
            assert array.shape == (4, 5)
            del array
        elif how == "a parameter last":
            snapshot.release()
            module = torch.nn.Linear(5, 7)
            module.weight = torch.nn.Parameter(weight)
            del snapshot, weight
            module(torch.ones(5)).sum().backward()
            del module
        elif how == "two mappings":
            again = self.sub.latest(timeout=10)
            other = again.tensors["bias"]
            assert len(readable_mappings(os.getpid())) == 2
            snapshot.release()
            again.release()
            del snapshot, again, weight
            assert readable_mappings(os.getpid()), "one was let go of with the other"
            del other
        elif how == "another thread":
            snapshot.release()
            box = [weight]
            del snapshot, weight
            thread = threading.Thread(target=box.clear)
            thread.start()
            thread.join()
        elif how == "a cycle":
            snapshot.release()
            weight.me = weight
            del snapshot, weight
            gc.collect()
        else:
            raise AssertionError(how)


WAYS = (
    "the snapshot last", "a tensor last", "a view last", "a numpy view last", "a parameter last", "two mappings",
    "another thread", "a cycle",
)  # fmt: skip


def test_b34_when_release_arrives_nothing_of_the_version_can_be_read(cast: Cast) -> None:
    """At the instant at which the publisher receives Release, the reader's mapping is gone, or is kept for the next
    version: all of its pages are the segment's own, no tensor refers to it, and no child gets it.
    """
    reader: Actor | None = None
    found: list[list[str]] = []
    kept: list[int] = []
    with blocking.Publisher("p") as pub:
        assert pub._server is not None
        core: Any = pub._server.core
        receive = core.receive

        def look_and_receive(session: Any, message: Any, now: float) -> None:
            if isinstance(message, Release) and reader is not None:
                found.append(readable_mappings(reader.pid))
                kept.append(len(private_mappings(reader.pid)))
            receive(session, message, now)

        core.receive = look_and_receive
        reader = cast.begin(Releaser, "p", {"name": "actor"})
        reader.finish()
        trials = 200
        for version in range(1, trials + 1):
            pub.publish(patterns.state(1, version, MAPPED), label="1")
            reader.call("use_and_let_go", WAYS[version % len(WAYS)])
            pub.wait(version, "released", timeout=5)
        pub.publish({"none": torch.empty(0, 3)})  # a version without a byte is released as well
        reader.call("next")
        reader.call("release")
        pub.wait(trials + 1, "released", timeout=5)
        del core.receive
        assert reader.call("readable") == []
        reader.stop()
    assert len(found) == trials + 1
    assert max(kept) > 0 or not keeps(), "nothing was kept"
    assert [number for number, maps in enumerate(found, 1) if maps] == []


def test_b34_what_a_load_keeps_is_one_read_only_mapping_until_forget(cast: Cast) -> None:
    """A load maps nothing of its own: it reads through the segment's one read-only mapping, which goes with Forget."""
    with blocking.Publisher("p", max_segments=2) as pub:
        reader = cast.subscriber("p", "blocking", name="actor")
        for version in range(1, 6):
            pub.publish(patterns.state(1, version), label="1")
            assert reader.call("next")[0] == version
            reader.call("load")
            pub.wait(version, "released", timeout=5)
            assert private_mappings(reader.pid) == []
        old = mapped_segments(reader.pid)
        assert 1 <= len(old) <= 2
        for _ in range(2):  # both segments are too small now, and leave the pool
            pub.publish({"large": torch.zeros(1 << 20)})
            pub.publish({"large": torch.zeros(1 << 20)})

        def forgotten() -> bool:
            reader.call("connected")
            return not set(old) & set(mapped_segments(reader.pid))

        wait_until(forgotten, timeout=2, what="the end of the old mappings")
        reader.stop()


def test_b34_finalizers_in_a_cycle_run_before_its_release() -> None:
    """What hangs on a cycle is released when the cycle is taken apart, and not while its finalizers may still read."""
    with bus() as (pub, (sub,)):
        seen: list[tuple[list[int], float]] = []

        class Agent:
            def __init__(self, snapshot: blocking.Snapshot) -> None:
                self.snapshot = snapshot
                self.me = self

            def __del__(self) -> None:
                time.sleep(0.02)  # a Release would have arrived by now
                seen.append((leases(pub), float(self.snapshot.tensors["w"].sum())))

        for version in range(1, 4):
            pub.publish({"w": torch.full((5,), float(version))})
            Agent(sub.next(timeout=5))
            gc.collect()
            pub.wait(version, "released", timeout=5)
        assert seen == [([1], 5.0), ([2], 10.0), ([3], 15.0)]


def test_b35_the_source_may_go_as_soon_as_publish_returns() -> None:
    """Once publish has returned, whatever becomes of the source, readers that come later get what was published."""

    def delete(state: dict[str, torch.Tensor]) -> None:
        state.clear()
        gc.collect()

    def overwrite(state: dict[str, torch.Tensor]) -> None:
        for tensor in state.values():
            tensor.fill_(-1)

    def shrink(state: dict[str, torch.Tensor]) -> None:
        for tensor in state.values():
            tensor.untyped_storage().resize_(0)

    def reuse(state: dict[str, torch.Tensor]) -> None:
        shapes = {name: tensor.shape for name, tensor in state.items()}
        state.clear()
        state.update({name: torch.full(shape, -2.0) for name, shape in shapes.items()})

    endings: list[Callable[[dict[str, torch.Tensor]], None]] = [delete, overwrite, shrink, reuse]
    with blocking.Publisher("p") as pub:
        version = 0
        for shapes in (SMALL, patterns.SHAPES):
            for end in endings:
                version += 1
                state = patterns.state(1, version, shapes)
                pub.publish(state)
                end(state)
                time.sleep(scaled(0.1, 2.0))
                with blocking.Subscriber("p") as late:
                    snapshot = late.latest(timeout=5)
                    assert snapshot.version == version
                    patterns.check(snapshot.tensors, 1, version, shapes)
                    del snapshot
        with pub.loan(like={"w": ("float32", (1000,))}) as loan:
            loan.tensors["w"].fill_(3)
            loan.publish()
        gc.collect()
        with blocking.Subscriber("p") as late:
            assert float(late.latest(timeout=5).tensors["w"].sum()) == 3000


def test_b36_a_close_waits_for_releases_and_says_who_still_held(cast: Cast) -> None:
    """A close waits for readers at most as long as it was told, and names those that still held a version."""
    holder, leaver = (cast.begin("SubscriberRole", "blocking", "p", {"name": name}) for name in ("holder", "leaver"))
    new = {holder, leaver}
    with suppress(OptionError):
        blocking.Publisher("p").close(-1.0)
        raise AssertionError("a negative grace was taken")

    def run(grace: float, release: Callable[[], None]) -> tuple[tuple[str, ...], float]:
        with blocking.Publisher("p") as pub:
            for reader in (holder, leaver):
                if reader in new:
                    new.remove(reader)
                    reader.finish()
                wait_until(lambda reader=reader: bool(reader.call("connected")), what="the session")  # type: ignore[misc]
            pub.publish(patterns.state(3, 1), label="3")
            for reader in (holder, leaver):
                reader.call("next")
                reader.call("keep")
                reader.call("ack")
            timer = threading.Timer(0.1, release)
            timer.start()
            began = time.monotonic()
            held = pub.close(grace)
            took = time.monotonic() - began
            timer.join()
        assert pub.close(grace) == ()
        return held, took

    def drop(*readers: Actor) -> Callable[[], None]:
        def all_of_them() -> None:
            for reader in readers:
                reader.call("drop", newest=True)

        return all_of_them

    held, took = run(0.0, lambda: None)
    assert held == ("holder", "leaver")
    assert took < 2
    drop(leaver)()
    held, took = run(0.4, drop(leaver))
    assert held == ("holder",)
    assert 0.4 <= took < 2
    drop(holder)()
    held, took = run(10.0, drop(holder, leaver))
    assert held == ()
    assert 0.05 < took < 5
    held, took = run(0.3, drop(leaver))
    assert holder.call("check") == 1  # its version outlives the publisher


@pytest.mark.asyncio
async def test_b36_a_close_of_an_async_publisher_with_grace() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="actor") as sub:
        await pub.publish(patterns.state(1, 1, SMALL))
        tensors = (await sub.next(timeout=5)).tensors
        began = time.monotonic()
        assert await pub.close(grace=0.1) == ("actor",)
        assert 0.1 <= time.monotonic() - began < 2
        with pytest.raises(busync.ClosedError):
            await pub.publish({"w": torch.ones(1)})
        patterns.check(tensors, 1, 1, SMALL)


MUTANTS["test_b36_a_close_of_an_async_publisher_with_grace"] = Mutant(
    "busync/publisher.py", "            return await server.call(drain(server, grace)).wait()\n",
    "            return await server.call(drain(server, 0.0)).wait()\n",
    "an async publisher does not wait for releases",
)  # fmt: skip


def test_b36_readers_of_a_killed_publisher_are_told_and_read_on(cast: Cast) -> None:
    """The end of a publisher is known at once to readers, who keep what they hold, element by element."""
    learner = cast.publisher("p")
    reader = cast.subscriber("p", "asyncio", name="actor")
    for version in range(1, 4):
        learner.call("publish")
        assert reader.call("next")[0] == version
        reader.call("keep")
        reader.call("drop")
    learner.kill()
    wait_until(lambda: not reader.call("connected"), timeout=5, what="the loss was noticed")
    with pytest.raises(WaitTimeout) as caught:
        reader.call("next", 0.2)
    assert "no publisher at" in str(caught.value)
    assert reader.call("check") == 1
    with blocking.Publisher("p") as pub:  # its segments have the same names and numbers
        wait_until(lambda: bool(reader.call("connected")), what="the reconnection")
        for version in range(1, 4):
            pub.publish(patterns.state(9, version), label="9")
            assert reader.call("next")[0] == version
        assert reader.call("check") == 1
    with pytest.raises(PublisherLost), blocking.Subscriber("p", connect_timeout=0.1):
        pass


def test_b39_a_relay_copies(cast: Cast) -> None:
    """What was received can be published on another bus: it is copied there, and neither needs the first bus."""
    reader = cast.begin("SubscriberRole", "asyncio", "b", {"name": "actor", "connect_timeout": 10.0})
    with blocking.Publisher("b") as b:
        reader.finish()
        with blocking.Publisher("a") as a, blocking.Subscriber("a", name="relay") as relay:
            for version in range(1, 6):
                a.publish(patterns.state(4, version), label="4", wait="none")
                snapshot = relay.next(timeout=5)
                report = b.publish(snapshot.tensors, label=snapshot.label)
                assert report.version == version
                del snapshot
                assert reader.call("next")[0] == version
                reader.call("keep")
                reader.call("drop")
            a.wait(5, "released", timeout=5)  # the copy on b holds nothing of a
            assert leases(a, "relay") == []
        assert reader.call("check") == 1
        assert b.status()["topics"]["default"]["bytes"] > 250_000  # memory of its own
        b.publish(patterns.state(4, 6), label="4")
        assert reader.call("next")[0] == 6
        reader.call("keep")
        with blocking.Subscriber("b") as late:
            snapshot = late.latest(timeout=5)
            patterns.check(snapshot.tensors, 4, 6)
            del snapshot
        reader.stop()


#: What a child may do with what it inherited: look at what says nothing, and let go.
HARMLESS = {
    "Publisher": {"close", "options", "endpoint"},
    "Subscriber": {"close", "version", "adopted", "lag", "connected", "incarnation", "handle", "session_ended",
                   "acknowledge", "fail", "run", "wait_digest", "ensure_here", "after_fork_in_child", "before_fork"},
    "Snapshot": {"release"},
    "Loan": {"tensors"},
}  # fmt: skip


def _calls(thing: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every public method and property of an object, as something to call."""
    arguments: dict[str, tuple[Any, ...]] = {
        "publish": ({"w": torch.ones(1)},), "loan": ({"w": torch.ones(1)},), "wait": (1,), "wait_version": (1,),
        "load_into": (torch.nn.Linear(1, 1),), "wait_digest": (1, 0.1),
    }  # fmt: skip
    for name, member in inspect.getmembers(type(thing)):
        if name.startswith("_") or name in HARMLESS[type(thing).__name__]:
            continue

        def call(name: str = name, member: Any = member) -> object:
            if isinstance(member, property):
                return getattr(thing, name)
            given = () if name == "publish" and type(thing).__name__ == "Loan" else arguments.get(name, ())
            made = getattr(thing, name)(*given)
            if type(made).__name__ == "Loan":
                made = made.__aenter__() if hasattr(made, "__aenter__") else made.__enter__()
            return made.send(None) if inspect.iscoroutine(made) else made

        yield name, call


def _child(things: list[Any]) -> Callable[[], None]:
    def use() -> None:
        signal.alarm(5)  # nothing may wait for a thread or a loop that is not here
        refused = 0
        for thing in things:
            for name, call in _calls(thing):
                try:
                    call()
                except ForkedError:
                    refused += 1
                else:
                    raise AssertionError(f"{type(thing).__module__}.{type(thing).__name__}.{name} works in a child")
            for name in HARMLESS[type(thing).__name__] & {"version", "lag", "connected", "adopted"}:
                getattr(thing, name)
        assert refused >= 12, f"only {refused} calls were tried"
        for thing in things:
            close = getattr(thing, "close", None)
            if close is not None:
                made = close()
                if inspect.iscoroutine(made):
                    with suppress(StopIteration):
                        made.send(None)
        things.clear()
        gc.collect()

    return use


@contextmanager
def _files_stay() -> Iterator[None]:
    directory = os.path.join(os.environ["BUSYNC_RUNTIME_DIR"], "p")
    before = {name: os.lstat(os.path.join(directory, name)).st_ino for name in os.listdir(directory)}
    yield
    assert {name: os.lstat(os.path.join(directory, name)).st_ino for name in os.listdir(directory)} == before


def test_b47_every_call_in_a_forked_child_is_refused() -> None:
    """Every public call in a forked child raises ForkedError at once, and disturbs nothing of the parent's."""
    with blocking.Publisher("p", max_segments=3) as pub, blocking.Subscriber("p", name="reader-0") as sub:
        pub.publish(patterns.state(1, 1, SMALL))
        snapshot = sub.next(timeout=5)
        tensors = dict(snapshot.tensors)
        with _files_stay():
            check_in_child(_child([pub, sub, snapshot]))
        for version in range(2, 6):
            pub.publish(patterns.state(1, version, SMALL), wait="none")
            assert sub.next(timeout=5).version == version
        patterns.check(tensors, 1, 1, SMALL)
        with blocking.Subscriber("p") as late:
            assert late.latest(timeout=5).version == 5


@pytest.mark.blocks_loop
@pytest.mark.asyncio
async def test_b47_every_call_of_asyncio_code_in_a_forked_child_is_refused() -> None:
    async with busync.Publisher("p", max_segments=3) as pub, busync.Subscriber("p", name="reader-0") as sub:
        await pub.publish(patterns.state(1, 1, SMALL))
        snapshot = await sub.next(timeout=5)
        tensors = dict(snapshot.tensors)
        with _files_stay():
            check_in_child(_child([pub, sub, snapshot]))
        for version in range(2, 6):
            await pub.publish(patterns.state(1, version, SMALL))
            assert (await sub.next(timeout=5)).version == version
        patterns.check(tensors, 1, 1, SMALL)


MUTANTS["test_b47_every_call_of_asyncio_code_in_a_forked_child_is_refused"] = Mutant(
    "busync/asking.py",
    "        forks.ensure_same_process(self._pid, \"subscriber\")\n        self.ensure_here()",
    "        self.ensure_here()",
    "a child uses its parent's session",
)  # fmt: skip
