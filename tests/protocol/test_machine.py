"""The cores under everything that can happen: a hypothesis state machine over PeerNet.

After every step the invariants of ``PeerNet.check`` hold; at the end everything in flight is delivered, and nobody may
wait in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from busync.ids import LeaseId, Version
from busync.options import PublisherOptions
from busync.protocol.ledger import State
from busync.wire import Release, encode
from tests.protocol.harness import PeerNet
from tests.protocol.subscriber_process import SubscriberProcess
from tests.protocol.world import Job

T = TypeVar("T")
PICK = st.integers(0, 15)
SIZES = st.sampled_from([128, 128, 128, 128, 128, 64, 512, 0])
SOMETIMES = st.sampled_from([False, False, True])
RARELY = st.sampled_from([*[False] * 7, True])
LEASE_TIMEOUT = 5.0


def pick(items: Sequence[T], index: int) -> T:
    """One of them."""
    return items[index % len(items)]


class BusMachine(RuleBasedStateMachine):
    """Rules are everything that processes, the kernel and bad luck do."""

    net: PeerNet

    @initialize(
        readers=st.integers(2, 4), max_segments=st.integers(2, 4), skip=st.booleans(), digests=st.booleans(),
        max_held=st.integers(2, 3),
    )  # fmt: skip
    def begin(self, *, readers: int, max_segments: int, skip: bool, digests: bool, max_held: int) -> None:
        options = PublisherOptions(
            max_segments=max_segments, max_held=max_held, lease_timeout=LEASE_TIMEOUT,
            when_full="skip" if skip else "wait",
        )  # fmt: skip
        self.net = PeerNet(options, readers, topics=2, digests=digests)
        for reader in self.net.readers:
            reader.connect()
        self.net.drain()

    def jobs(self, *phases: str) -> list[Job]:
        return [job for job in self.net.publisher.jobs.values() if job.phase in phases]

    def loans(self) -> list[Job]:
        return [job for job in self.jobs("written") if job.state is State.LOANED]

    def fresh(self) -> list[Job]:
        return [job for job in self.jobs("reserved") if job.fresh]

    def topic(self, i: int) -> str:
        return f"topic-{i % 2}"

    def holders(self) -> list[tuple[SubscriberProcess, LeaseId]]:
        return [(reader, lease) for reader in self.net.readers for lease in reader.mappings]

    # The publisher's caller

    @rule(i=PICK, nbytes=SIZES, tensors=st.integers(1, 2), loan=RARELY)
    def publish(self, i: int, nbytes: int, tensors: int, loan: bool) -> None:
        tensors = 1 if nbytes == 64 else tensors
        job = self.net.publisher.reserve(self.topic(i), nbytes, loan=loan, tensors=tensors)
        if job.phase == "reserved":
            self.net.publisher.write(job)
            self.net.check_memory()
            self.net.publisher.commit(job)

    @rule(i=PICK, nbytes=SIZES, readers=st.sets(PICK, min_size=1, max_size=4))
    def publish_to_readers(self, i: int, nbytes: int, readers: set[int]) -> None:
        self.publish(i, nbytes, 1, False)
        for reader in sorted(readers):
            self.adopt(reader)

    @rule(i=PICK, nbytes=SIZES, readers=st.sets(PICK, min_size=1, max_size=4))
    def publish_to_readers_who_let_go(self, i: int, nbytes: int, readers: set[int]) -> None:
        self.publish(i, nbytes, 1, False)
        for reader in sorted(readers):
            self.turn_over(reader)

    @rule(i=PICK, nbytes=SIZES, loan=st.booleans())
    def begin_publish(self, i: int, nbytes: int, loan: bool) -> None:
        self.net.publisher.reserve(self.topic(i), nbytes, loan=loan)

    @precondition(lambda self: bool(self.jobs("reserved")))
    @rule(i=PICK)
    def write(self, i: int) -> None:
        self.net.publisher.write(pick(self.jobs("reserved"), i))

    @precondition(lambda self: bool(self.jobs("written")))
    @rule(i=PICK)
    def commit(self, i: int) -> None:
        job = pick(self.jobs("written"), i)
        assert self.net.publisher.commit(job) is not None

    @precondition(lambda self: bool(self.loans()))
    @rule(i=PICK)
    def commit_while_referenced(self, i: int) -> None:
        job = pick(self.loans(), i)
        assert self.net.publisher.commit(job, referenced=True) is None

    @precondition(lambda self: bool(self.jobs("waiting", "reserved", "written")))
    @rule(i=PICK, referenced=st.booleans())
    def cancel(self, i: int, referenced: bool) -> None:
        self.net.publisher.discard(pick(self.jobs("waiting", "reserved", "written"), i), referenced=referenced)

    @precondition(lambda self: bool(self.jobs("straggling")))
    @rule(i=PICK)
    def straggling_copy_returns(self, i: int) -> None:
        self.net.publisher.straggle(pick(self.jobs("straggling"), i))

    @precondition(lambda self: bool(self.fresh()))
    @rule(i=PICK)
    def allocation_fails(self, i: int) -> None:
        self.net.publisher.allocation_failed(pick(self.fresh(), i))

    @precondition(lambda self: bool(self.net.publisher.borrowed))
    @rule()
    def scribble(self) -> None:
        self.net.publisher.scribble()

    @precondition(lambda self: bool(self.net.publisher.digests))
    @rule(i=PICK)
    def digest_computed(self, i: int) -> None:
        self.net.publisher.finish_digest(*pick(list(self.net.publisher.digests), i))

    @rule(i=PICK, released=st.booleans(), need=st.sampled_from([None, 1, 2]), timeout=st.floats(0.1, 8))
    def wait(self, i: int, released: bool, need: int | None, timeout: float) -> None:
        topic = self.net.publisher.core.topics.get(self.topic(i))
        if topic is not None and topic.version:
            self.net.publisher.wait(topic.name, topic.version, "released" if released else "acked", need, timeout)

    # The subscribers' code

    @rule(i=PICK, again=st.booleans())
    def demand(self, i: int, again: bool) -> None:
        pick(self.net.readers, i).demand(Version(0) if again else None)

    @rule(i=PICK)
    def adopt(self, i: int) -> None:
        reader = pick(self.net.readers, i)
        if reader.link is None:
            reader.connect()
        reader.demand()
        self.net.drain()

    @rule(i=PICK)
    def turn_over(self, i: int) -> None:
        self.adopt(i)
        reader = pick(self.net.readers, i)
        for lease in list(reader.mappings)[:-1]:
            reader.release(lease)
        self.net.drain()

    @rule(i=PICK)
    def withdraw(self, i: int) -> None:
        pick(self.net.readers, i).withdraw()

    @precondition(lambda self: bool(self.holders()))
    @rule(i=PICK)
    def ack(self, i: int) -> None:
        reader, lease = pick(self.holders(), i)
        reader.ack(reader.mappings[lease].version)

    @precondition(lambda self: bool(self.holders()))
    @rule(i=PICK)
    def nack(self, i: int) -> None:
        reader, lease = pick(self.holders(), i)
        reader.core.nack(reader.mappings[lease].version, "apply", "does not fit")
        reader.pump()
        reader.release(lease)

    @precondition(lambda self: bool(self.holders()))
    @rule(i=PICK)
    def release(self, i: int) -> None:
        reader, lease = pick(self.holders(), i)
        reader.release(lease)

    @precondition(lambda self: any(r.orphans for r in self.net.readers))
    @rule(i=PICK)
    def unmap_what_is_left_of_an_old_session(self, i: int) -> None:
        orphans = pick([r.orphans for r in self.net.readers if r.orphans], i)
        orphans.pop(i % len(orphans))

    @precondition(lambda self: any(r.orphans for r in self.net.readers))
    @rule(i=PICK)
    def ack_what_is_left_of_an_old_session(self, i: int) -> None:
        reader = pick([r for r in self.net.readers if r.orphans], i)
        old = pick(reader.orphans, i)
        if reader.link is not None and old.payload[0] == reader.core.incarnation:  # a shell says no more than that
            reader.ack(old.version)

    # The network

    @rule(i=st.integers(0, 63), n=st.integers(1, 6))
    def deliver(self, i: int, n: int) -> None:
        for _ in range(n):
            if waiting := self.net.waiting():
                self.net.deliver(*pick(waiting, i))
                self.net.check()

    @rule()
    def deliver_all(self) -> None:
        self.net.drain()

    @precondition(lambda self: any(link.seen for link in self.net.links))
    @rule(i=PICK, j=st.integers(0, 63))
    def repeat(self, i: int, j: int) -> None:
        self.net.repeat(pick([link for link in self.net.links if link.seen], i), j)

    @precondition(lambda self: any(r.stale for r in self.net.readers))
    @rule(i=PICK, j=PICK)
    def deliver_late(self, i: int, j: int) -> None:
        self.net.deliver_stale(pick([r for r in self.net.readers if r.stale], i), j)

    @precondition(lambda self: any(r.link for r in self.net.readers))
    @rule(i=PICK, really=RARELY)
    def bus_breaks(self, i: int, really: bool) -> None:
        if not really:
            return
        link = pick([r.link for r in self.net.readers if r.link], i)
        link.publisher.end(link)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, LEASE_TIMEOUT, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.net.advance(seconds)

    # Forks and deaths

    @precondition(lambda self: bool(self.holders()))
    @rule(i=PICK, disarm=st.booleans())
    def fork(self, i: int, disarm: bool) -> None:
        pick(self.holders(), i)[0].fork(disarm=disarm)

    @precondition(lambda self: bool(self.net.zombies))
    @rule(i=PICK, really=SOMETIMES)
    def child_or_zombie_exits(self, i: int, really: bool) -> None:
        if really:
            self.net.zombies.pop(i % len(self.net.zombies))

    @precondition(lambda self: bool(self.holders()))
    @rule(i=PICK, killed=st.booleans(), really=SOMETIMES)
    def a_holder_goes(self, i: int, killed: bool, really: bool) -> None:
        if really:
            reader = pick(self.holders(), i)[0]
            self.net.kill(reader) if killed else reader.disconnect()
            self.net.drain()

    @precondition(lambda self: bool(self.holders()))
    @rule(i=PICK, j=PICK, really=RARELY)
    def release_what_another_holds(self, i: int, j: int, really: bool) -> None:
        link = pick(self.net.readers, i).link
        reader, lease = pick(self.holders(), j)
        if really and link is not None and reader.link is not link:
            link.push("door_up", encode(Release(lease=lease)))

    @rule(i=PICK, really=RARELY)
    def kill(self, i: int, really: bool) -> None:
        if really:
            self.net.kill(pick(self.net.readers, i))

    @rule(i=PICK, really=RARELY)
    def disconnect(self, i: int, really: bool) -> None:
        if really:
            pick(self.net.readers, i).disconnect()

    @precondition(lambda self: any(r.link is None for r in self.net.readers))
    @rule(i=PICK)
    def connect(self, i: int) -> None:
        pick([r for r in self.net.readers if r.link is None], i).connect()

    @rule(really=RARELY)
    def restart_publisher(self, really: bool) -> None:
        if really:
            self.net.start_publisher()

    # What holds

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "net"):
            self.net.check()

    def teardown(self) -> None:
        if hasattr(self, "net"):
            self.net.advance(20.0)
            self.net.check()
            waits = self.net.publisher.waits
            assert not waits, f"waits that are not over: {waits}"
            self.net.settle()


def machine_settings(**changes: Any) -> settings:
    """Few enough for every run of the suite; a soak raises them and gives up ``derandomize``."""
    profile: dict[str, Any] = {
        "max_examples": 300, "stateful_step_count": 60, "deadline": None, "derandomize": True, "print_blob": True,
        "suppress_health_check": list(HealthCheck), "database": None,
    }  # fmt: skip
    return settings(**(profile | changes))


TestBus = BusMachine.TestCase
TestBus.settings = machine_settings()
