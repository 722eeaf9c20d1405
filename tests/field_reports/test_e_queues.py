"""Queues, floods and slow readers (B84, B85, B87, B92, B93)."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import uvloop
import zmq

import busync
from busync import blocking
from busync.links import Links
from busync.transport.bus import DealerBus
from busync.wire import Ack, Join, Joined, encode
from tests.limits.kit import private_bytes
from tests.support import patterns
from tests.support.mutants import Mutant
from tests.support.processes import Cast
from tests.support.roles import PublisherRole, soon

LONG = bool(os.environ.get("BUSYNC_LONG"))
SMALL = patterns.SMALL
MB = 1 << 20
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
Loop = Callable[[], asyncio.AbstractEventLoop]
on_both_loops = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)

MUTANTS = {
    "test_b84_a_slow_reader_costs_constant_memory_and_lands_on_the_newest": (
        Mutant(
            "busync/protocol/publisher.py",
            "session.leases[lease.id] = self._leases[lease.id] = lease\n        session.want = None\n",
            "session.leases[lease.id] = self._leases[lease.id] = lease\n",
            "a reader is sent every version, though it asked once",
        ),
        Mutant(
            "busync/protocol/publisher.py", "session.skipped += entry.version - session.granted - 1",
            "pass", "nobody can see what a slow reader missed",
        ),
    ),
    "test_b85_nothing_is_lost_to_a_reader_that_was_told_it_is_attached": Mutant(
        "busync/protocol/subscriber.py", "self.greeted, self.max_held = True, message.max_held",
        "self.greeted, self.max_held = True, message.max_held\n"
        "                self.attached = True\n"
        "                self._effects.append(fx.Attached(Incarnation(message.incarnation)))",
        "a reader is told that it is attached before the publisher counts it",
    ),
    "test_b87_heartbeats_are_off_and_a_full_queue_ends_one_session_only": (
        Mutant(
            "busync/transport/bus.py", "            sock.setsockopt(zmq.LINGER, 0)\n",
            "            sock.setsockopt(zmq.LINGER, 0)\n            sock.setsockopt(zmq.HEARTBEAT_IVL, 500)\n",
            "liveness rests on ZeroMQ's heartbeats",
        ),
        Mutant(
            "busync/links.py", "        if sent is not Sent.SENT:\n", "        if sent is Sent.GONE:\n",
            "what finds a full queue is dropped, and the session lives on without it",
        ),
    ),
    "test_b92_nothing_stalls_under_a_flood": Mutant(
        "busync/links.py", "if not self._bus_due and self.bus.has_input():", "if False:",
        "a send takes the signal of a Join, which then lies there unseen",
    ),
    "test_b93_a_long_timeout_keeps_nothing_alive": Mutant(
        "busync/asking.py", "                snapshot = await future\n",
        "                self._attachment.loop.call_later(timeout or 0.0, future.done)\n"
        "                snapshot = await future\n",
        "the timer of a call keeps its result until it expires",
    ),
}  # fmt: skip


# B84: a slow reader


class Announcer(PublisherRole):
    """Publishes versions that cost 4 KiB each to announce."""

    def announce(self, count: int) -> int:
        tensor = torch.zeros(8)
        for _ in range(count):
            self.version = self.pub.publish({"w": tensor, "note": os.urandom(4096)}, label="0").version or 0
        gc.collect()
        return private_bytes(os.getpid())


def test_b84_a_slow_reader_costs_constant_memory_and_lands_on_the_newest(cast: Cast) -> None:
    """Announcements are not queued: a stopped reader gets the newest when it goes on, and what it missed is counted."""
    count = 5000 if LONG else 1500
    learner = cast.begin(Announcer, "policy", {"lease_timeout": 0.2})
    learner.finish()
    slow = cast.subscriber("policy", name="slow")
    quick = [cast.subscriber("policy", flavour, name=flavour) for flavour in ("asyncio", "uvloop")]
    before = learner.call("announce", 200)
    assert slow.call("next")[0] == 200
    slow.start("next")
    time.sleep(0.1)
    os.kill(slow.pid, signal.SIGSTOP)
    try:
        for reader in quick:
            reader.start("wait_version", 200 + count, timeout=60)
        after = learner.call("announce", count, timeout=60)
        assert [reader.finish()[0] for reader in quick] == [200 + count] * 2
    finally:
        os.kill(slow.pid, signal.SIGCONT)
    assert after - before < 8 * MB
    begun = time.monotonic()
    slow.finish()  # what was on its way
    slow.call("release")
    if slow.call("state")["adopted"] < 200 + count:
        assert slow.call("next")[0] == 200 + count
    assert time.monotonic() - begun < 1
    skipped = {s["name"]: s["skipped"] for s in learner.call("status")["subscribers"]}
    assert skipped["slow"] >= count - 2


# B85: the first message


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@on_both_loops
def test_b85_nothing_is_lost_to_a_reader_that_was_told_it_is_attached(
    loop: Loop, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that is published the moment that a reader is attached is adopted by it, and waits for its ack.

    ``late``: the publisher gets to its bus a little later than it could, as on a machine with other work.
    """
    at_once = Links._bus_ready
    due: list[bool] = []

    def bus_ready(links: Links) -> None:
        def turn() -> None:
            due.clear()
            at_once(links)

        if not due:
            due.append(True)
            links._loop.call_later(0.01, turn)

    if late:
        monkeypatch.setattr(Links, "_bus_ready", bus_ready)

    async def run() -> None:
        async with busync.Publisher("p") as pub:
            for round_ in range(1, 11 if late else 201 if LONG else 101):
                async with busync.Subscriber("p", name="r", topic=f"t{round_ % 3}") as sub:
                    publish = asyncio.create_task(
                        pub.publish(patterns.state(1, round_, SMALL), topic=f"t{round_ % 3}", wait="all", timeout=5)
                    )
                    snapshot = await sub.wait_version((round_ + 2) // 3, timeout=1)
                    await snapshot.ack()
                    assert (await publish).acked == ("r",), f"round {round_}"
                    patterns.check(snapshot.tensors, 1, round_, SMALL)
                    del snapshot, publish

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


# B87: heartbeats and full queues


def test_b87_heartbeats_are_off_and_a_full_queue_ends_one_session_only(cast: Cast) -> None:
    """No socket has ZeroMQ's heartbeats. A full queue ends its session; nobody aborts, and the reader comes back."""
    with blocking.Publisher("policy", lease_timeout=0.2) as pub:
        slow, well = cast.subscriber("policy", name="slow"), cast.subscriber("policy", "uvloop", name="well")
        server = pub._server
        assert server is not None

        async def heartbeat() -> list[int]:
            assert server.links is not None
            return [server.links.bus._get(option) for option in (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT)]

        async def fill() -> int:
            session = next(s.id for s in server.core.sessions.values() if s.name == "slow")
            sent, links = 0, server.links
            assert links is not None
            while session in links.peers and sent < 100_000:
                links.send_bus(session, encode(Joined(incarnation=server.core.incarnation)))
                sent += 1
            return sent

        assert server.call(heartbeat()).block() == [0, -1]
        slow.start("next", timeout=60)
        time.sleep(0.1)
        os.kill(slow.pid, signal.SIGSTOP)
        try:
            assert 4096 <= server.call(fill()).block() < 100_000
            for version in range(1, 4):
                assert pub.publish(patterns.state(1, version), label="1", wait=0).pending == ("well",)
                assert well.call("next")[0] == version
                well.call("release")
            assert [s["name"] for s in pub.status()["subscribers"]] == ["well"]
            time.sleep(15 if LONG else 0.2)
        finally:
            os.kill(slow.pid, signal.SIGCONT)
        assert slow.finish()[0] == 3
        pub.publish(patterns.state(1, 4), label="1")
        for reader in (slow, well):
            assert reader.call("next")[0] == 4
            assert reader.call("keep") > 60_000


# B92: wake-ups under a flood


@on_both_loops
def test_b92_nothing_stalls_under_a_flood(loop: Loop) -> None:
    """Readers that flood the publisher while it sends, and newcomers in the middle of it, are all served."""
    acks, versions = (5000, 400) if LONG else (1000, 100)
    over = False

    async def read() -> int:
        async with busync.Subscriber("p") as sub:
            version = 0
            while version < versions:
                snapshot = await sub.next(timeout=30)
                assert snapshot.version > version
                version = snapshot.version
                session = sub._session
                assert session is not None
                for _ in range(acks * version // versions - acks * (version - 1) // versions):
                    session.door.send(encode(Ack(version=version)))
                del snapshot
            await asyncio.sleep(0)
            return version

    async def come_and_go() -> int:
        rounds = 0
        while not over:
            async with busync.Subscriber("p", connect_timeout=2) as sub:
                assert (await sub.latest(timeout=2)).version > 0
                rounds += 1
        return rounds

    async def hold() -> None:
        time.sleep(0.05)  # noqa: ASYNC251  # while the flood comes in

    async def run() -> None:
        nonlocal over
        async with busync.Publisher("p", lease_timeout=0.5) as pub:
            await pub.publish(patterns.state(1, 1, SMALL))
            readers = [asyncio.create_task(read()) for _ in range(8)]
            newcomers = asyncio.create_task(come_and_go())
            stranger = DealerBus(pub.endpoint.bus_path, b"s" * 16, 1000)
            begun = time.monotonic()
            for version in range(2, versions + 1):
                await pub.publish(patterns.state(1, version, SMALL))
                await asyncio.sleep(0)
            assert await asyncio.gather(*readers) == [versions] * 8
            over = True
            assert await newcomers > 3
            assert time.monotonic() - begun < 30
            # More at once than one turn takes, and nothing comes after it.
            assert pub._server is not None
            held = asyncio.create_task(pub._server.call(hold()).wait())
            await asyncio.sleep(0.01)
            for _ in range(500):
                assert stranger.send(encode(Join()))
            await held
            await soon(lambda: pub.status()["counters"].get("strangers on the bus") == 500, what="the end of the flood")
            stranger.close()
            await soon(lambda: pub.status()["subscribers"] == [])
            readers.clear()
            del held
            del newcomers

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


# B93: long timeouts


@on_both_loops
def test_b93_a_long_timeout_keeps_nothing_alive(loop: Loop) -> None:
    """However long the timeouts of calls are, memory is flat on both sides."""
    count, nbytes = (20_000, 16_384) if LONG else (300, 131_072)

    async def rounds(pub: busync.Publisher, sub: busync.Subscriber, number: int) -> int:
        tensor = torch.zeros(4)
        for _ in range(number):
            publish = asyncio.create_task(
                pub.publish({"w": tensor, "note": os.urandom(nbytes)}, wait="all", timeout=600)
            )
            snapshot = await sub.next(timeout=600)
            await snapshot.ack()
            await publish
            del snapshot
        gc.collect()
        return private_bytes(os.getpid())

    async def run() -> None:
        async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
            before = await rounds(pub, sub, 50)
            assert await rounds(pub, sub, count) - before < 16 * MB

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())
