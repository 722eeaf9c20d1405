"""Which version readers have, who is behind, and what it costs (B62, B64, B70, B71, B72, B73)."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch

import busync
from busync import blocking
from busync.errors import MismatchError, PinnedError
from tests.field_reports.kit import bus, leases, raised, scaled, shared_bytes
from tests.support import patterns
from tests.support.mutants import Mutant
from tests.support.processes import Cast
from tests.support.roles import SubscriberRole, wait_until

SMALL = patterns.SMALL
PUBLISHER = "busync/protocol/publisher.py"
LEDGER = "busync/protocol/ledger.py"

MUTANTS = {
    "test_b62_the_loops_body_runs_once_per_adopted_version": Mutant(
        "busync/asking.py", "return self.adopted if request.enough", "return Version(0) if request.enough",
        "a version is handed out more than once",
    ),
    "test_b64_what_is_held_is_never_changed": (
        Mutant(
            "busync/protocol/guards.py", "return not entry.leases", "return True",
            "a segment is written again while a reader holds it",
        ),
        Mutant(
            "busync/asking.py",
            "raise PinnedError(core.max_held, [str(hold) for hold in session.leases.living()])", "return False",
            "a holder at its limit waits in vain instead of being told",
        ),
    ),
    "test_b70_whoever_comes_late_gets_the_newest_at_once": Mutant(
        PUBLISHER, "        session.want = want\n        self._try_grant(session)", "        session.want = want",
        "a reader waits for the next publish although there is a version",
    ),
    "test_b71_lag_is_visible_and_an_alarm_is_two_lines": (
        Mutant(
            "busync/protocol/status.py", "topic.version - session.acked if topic",
            "topic.version - session.granted if topic",
            "a reader that gets versions and uses none seems well",
        ),
        Mutant(
            "busync/subscriber.py", "                self._handed = None  # asking", "                pass  # asking",
            "asking for the next version acknowledges one that could not be used",
        ),
    ),
    "test_b72_one_copy_whatever_the_number_of_readers": Mutant(
        "busync/links.py", "        if segment.host is not None:\n            message = Segment",
        "        if segment.host is not None:\n"
        "            size = segment.host.nbytes\n"
        "            segment = self.pool.create(SegmentId(segment_id + 1000 * session), size)\n"
        "            message = Segment",
        "every reader gets memory of its own",
    ),
    "test_b73_a_row_pins_one_version_and_a_copy_frees_it": (
        Mutant(
            "busync/protocol/status.py", "sorted(sessions[lease.session].name for lease in e.leases.values())", "[]",
            "nobody sees who pins a version",
        ),
        Mutant(
            LEDGER, "        if entry.state is State.ABANDONED:\n            if not entry.leases:",
            "        if entry.state is State.ABANDONED:\n            if False:",
            "a version that was let go of is never given back",
        ),
    ),
}  # fmt: skip


@pytest.mark.asyncio
async def test_b62_the_loops_body_runs_once_per_adopted_version() -> None:
    """The body of the loop is the hook: once per adopted version, in order, before anything reads it; none is old."""
    async with busync.Publisher("p", max_segments=8) as pub, busync.Subscriber("p", name="a") as sub:
        model = torch.nn.Linear(1, 1, bias=False)
        cache: list[float] = []
        adopted: list[int] = []
        read: list[tuple[float, float]] = []

        async def follow() -> None:
            async for snapshot in sub:
                await snapshot.load_into(model)
                cache[:] = [2 * float(model.weight.detach())]  # derived from the weights, before anyone can read them
                adopted.append(snapshot.version)
                if snapshot.label == "last":
                    return
                await asyncio.sleep(0.003 * (snapshot.version % 2))

        async def use() -> None:
            while True:
                if cache:
                    read.append((float(model.weight.detach()), cache[0]))
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(follow()), asyncio.create_task(use())]
        for version in range(1, 51):
            await pub.publish({"weight": torch.full((1, 1), float(version))}, label="last" if version == 50 else "")
            await asyncio.sleep(0.002 * (version % 3 == 0))
        await asyncio.wait_for(tasks[0], 10)
        tasks[1].cancel()
        with suppress(asyncio.CancelledError):
            await tasks[1]
        assert adopted == sorted(set(adopted))
        assert adopted[-1] == 50
        assert 2 <= len(adopted) < 50  # some were overtaken
        assert all(cached == 2 * weight for weight, cached in read)
        await sub.latest(timeout=1)  # the last one is acknowledged
        assert pub.status()["subscribers"][0]["skipped"] == 50 - len(adopted) - (adopted[0] - 1)


def test_b64_what_is_held_is_never_changed() -> None:
    """A held version stays as it is for as long as it is held, whatever comes; who holds too many is told which."""
    with bus(readers=2, max_segments=2, lease_timeout=0.05) as (pub, (sub, other)):
        pub.publish(patterns.state(1, 1))
        first = dict(sub.next(timeout=5).tensors)
        for version in range(2, 11):
            pub.publish(patterns.state(1, version))
            patterns.check(first, 1, 1)
            assert 1 in leases(pub)
            other.next(timeout=5).load_into(patterns.Module())
        state = next(s for s in pub.status()["subscribers"] if s["name"] == "reader-0")
        assert state["state"] == "overdue"  # the holder of an old version is known
        second = sub.next(timeout=5)
        tensors = second.tensors["body.weight"]
        pub.publish(patterns.state(1, 11))
        error = raised(PinnedError, lambda: sub.next(timeout=5))
        for fact in ("version 1", "version 10", "body.weight"):
            assert fact in str(error)
        del second, tensors
        assert sub.next(timeout=5).version == 11
        patterns.check(first, 1, 1)
        first.clear()
        wait_until(lambda: leases(pub) in ([], [11]), timeout=2, what="the release")


@pytest.mark.asyncio
async def test_b70_whoever_comes_late_gets_the_newest_at_once() -> None:
    """The newest version is given to whoever attaches, by any way of asking; before there is one, when there is."""
    soon = scaled(4.0, 1.0)
    async with busync.Publisher("p", max_segments=3) as pub, busync.Subscriber("p", name="early") as early:
        waiting = asyncio.create_task(early.next(timeout=10))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await pub.publish(patterns.state(2, 1, SMALL))
        snapshot = await asyncio.wait_for(waiting, soon)
        assert snapshot.version == 1
        del snapshot, waiting
        for version in range(2, 8):
            await pub.publish(patterns.state(2, version, SMALL))
        rng = random.Random(70)
        ways: list[Any] = [
            lambda sub: sub.next(timeout=soon), lambda sub: sub.latest(timeout=soon),
            lambda sub: sub.wait_version(7, timeout=soon), lambda sub: anext(sub),
        ]  # fmt: skip
        for prefetch in (False, True):
            for way in ways:
                await asyncio.sleep(rng.uniform(0, 0.02))
                began = time.monotonic()
                async with busync.Subscriber("p", prefetch=prefetch) as late:
                    async with await asyncio.wait_for(way(late), soon) as snapshot:
                        assert snapshot.version == 7
                        patterns.check(snapshot.tensors, 2, 7, SMALL)
                    del snapshot
                assert time.monotonic() - began < soon


class Swallower(SubscriberRole):
    """Its step of adoption is broken, and it does not care."""

    def __init__(self, name: str, module: str) -> None:
        super().__init__("blocking", "p", {"name": name})
        self.module = torch.nn.Linear(5, 7) if module == "broken" else patterns.Module(SMALL)
        self.quiet = 0

    def adopt(self) -> int:
        snapshot = self.sub.next(timeout=10)
        try:
            snapshot.load_into(self.module)
        except MismatchError:
            self.quiet += 1
        snapshot.release()
        return int(snapshot.version)


def test_b71_lag_is_visible_and_an_alarm_is_two_lines(cast: Cast) -> None:
    """A reader that takes versions and uses none falls behind in ``status()``; nobody else does."""
    with blocking.Publisher("p") as pub:
        healthy, broken = (cast.begin(Swallower, name, name) for name in ("healthy", "broken"))
        healthy.finish()
        broken.finish()
        alarms: dict[int, list[str]] = {}
        for version in range(1, 31):
            pub.publish(patterns.state(1, version, SMALL))
            for reader in (healthy, broken):
                assert reader.call("adopt") == version
            # The alarm:
            late = [s["name"] for s in pub.status()["subscribers"] if s["lag"] >= 5]
            if late:
                alarms[version] = late
        assert alarms == {version: ["broken"] for version in range(5, 31)}
        status = {s["name"]: s for s in pub.status()["subscribers"]}
        assert (status["healthy"]["lag"], status["broken"]["lag"]) == (0, 30)
        assert "does not fit" in status["broken"]["reason"]
        assert status["healthy"]["reason"] == ""
        healthy.stop()
        broken.stop()


def test_b72_one_copy_whatever_the_number_of_readers() -> None:
    """The memory of a version, the descriptors in the publisher, and what a publish copies do not grow with readers."""
    size = scaled(4, 64) << 20
    state = {"w": torch.zeros(size, dtype=torch.uint8)}
    memory: list[int] = []
    segments: list[int] = []
    spent: list[float] = []
    for readers in (1, 4, 8):
        with ExitStack() as stack:
            pub = stack.enter_context(blocking.Publisher("p", max_segments=4))
            subs = [stack.enter_context(blocking.Subscriber("p", name=f"reader-{i}")) for i in range(readers)]
            times = []
            for version in range(1, 6):
                before = time.process_time()
                pub.publish(state)
                times.append(time.process_time() - before)
                held = [sub.next(timeout=5).tensors["w"] for sub in subs]  # all in place at the same time
                assert all(int(tensor[-1]) == 0 for tensor in held)
                if version == 5:
                    memory.append(shared_bytes())
                    segments.append(pub.status()["topics"]["default"]["segments"])
                state["w"][-1] = 0
                del held
            spent.append(min(times))
    assert max(memory) - min(memory) < 1 << 20, memory
    assert max(segments) == min(segments) <= 2
    assert spent[2] < 3 * spent[0] + 0.005, spent


def test_b73_a_row_pins_one_version_and_a_copy_frees_it() -> None:
    """A view that is kept for ever pins one old version, by name of its reader; a copy of it pins none."""
    with bus(readers=2, max_segments=2, lease_timeout=0.05) as (pub, (keeper, other)):
        rows: list[torch.Tensor] = []
        began = time.monotonic()
        for version in range(1, 21):
            pub.publish(patterns.state(1, version))
            snapshot = keeper.next(timeout=5)
            if not rows:
                rows.append(snapshot.tensors["body.weight"][17])
            del snapshot
            other.next(timeout=5).load_into(patterns.Module())
        assert time.monotonic() - began < 4  # it is waited for once
        topic = pub.status()["topics"]["default"]
        held = [v for v in topic["versions"] if v["holders"]]
        assert [(v["version"], v["holders"]) for v in held] == [(1, ["reader-0"])]
        assert leases(pub, "reader-0") == [1]
        assert leases(pub, "reader-1") == []
        wanted = patterns.state(1, 1)["body.weight"][17]
        assert torch.equal(rows[0], wanted)
        nbytes = topic["bytes"]
        rows[0] = rows[0].clone()
        wait_until(lambda: leases(pub, "reader-0") == [], timeout=2, what="the release")
        topic = pub.status()["topics"]["default"]
        assert all(not v["holders"] for v in topic["versions"])
        assert topic["bytes"] < nbytes
        assert torch.equal(rows[0], wanted)
        gc.collect()
        assert os.getpid() == pub.status()["subscribers"][0]["pid"]
