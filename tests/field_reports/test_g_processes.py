"""Processes: death of a reader, start methods, and loops that stay responsive (B103, B104, B105)."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop

import busync
from busync import blocking
from busync.errors import ForkedError
from busync.handles import LoadPlan, Plan
from tests.limits.kit import model_of, segment_bytes
from tests.support import patterns
from tests.support.mutants import Mutant
from tests.support.processes import Cast
from tests.support.roles import Role, wait_until

LONG = bool(os.environ.get("BUSYNC_LONG"))
SMALL = patterns.SMALL
SOURCE = patterns.state(2, 1, SMALL)

MUTANTS = {
    "test_b103_the_death_of_a_reader_releases_what_it_held": (
        Mutant(
            "busync/links.py", "        except EOFError:\n            self._lose(peer)\n",
            "        except EOFError:\n            self._doors.discard(peer.door)\n",
            "the end of a connection ends nothing but the connection",
        ),
        Mutant(
            "busync/protocol/publisher.py", "self._waits.lose(session)", "pass",
            "whoever waits for all waits for the dead",
        ),
    ),
    "test_b104_any_start_method_gives_the_same": (
        Mutant(
            "busync/forks.py", "    if _pid != pid:\n", "    if False:\n",
            "a forked child uses the objects of its parent",
        ),
        Mutant(
            "busync/subscriber.py", 'f"pid-{os.getpid()}"', 'f"pid-{os.getppid()}"',
            "a subscriber takes for itself what is its parent's",
        ),
    ),
    "test_b104_nothing_of_the_bus_can_be_pickled": (
        Mutant(
            "busync/publisher.py", "    def __reduce__(self) -> Any:\n", "    def refuse_pickling(self) -> Any:\n",
            "a publisher is pickled, and fails, or does not, in another process",
        ),
        Mutant(
            "busync/handles/build.py", "    def __reduce__(self) -> Any:\n", "    def refuse_pickling(self) -> Any:\n",
            "the tensors of a snapshot are pickled without a word on how to pass them",
        ),
    ),
    "test_b105_a_large_publish_leaves_every_loop_responsive": Mutant(
        "busync/publishing.py", "if planned.manifest.nbytes <= SMALL_BYTES and", "if planned.manifest.nbytes >= 0 and",
        "large copies run on the publisher's loop",
    ),
    "test_b105_a_publish_cancelled_half_way_leaves_nothing": (
        Mutant(
            "busync/publishing.py",
            "        except BaseException:\n            server.core.discard(reserved.reservation, time.monotonic())\n"
            "            server.carry_out()\n            raise\n        version",
            "        except ValueError:\n            raise\n        version",
            "a cancelled publish keeps its segment",
        ),
        Mutant(
            "busync/publishing.py", "        future.result()\n    if cancelled:\n",
            "        future.result()\n    if False:\n",
            "a publish that was cancelled publishes all the same",
        ),
    ),
    "test_b105_a_large_load_leaves_the_loop_responsive": Mutant(
        "busync/snapshot.py", "if self.nbytes < INLINE_LOAD_BYTES and", "if self.nbytes >= 0 and",
        "large loads run on the reader's loop",
    ),
}  # fmt: skip


# B103: readers die


@pytest.mark.parametrize("moment", ["before the fetch", "after the fetch", "holding 3 versions"])
def test_b103_the_death_of_a_reader_releases_what_it_held(cast: Cast, moment: str) -> None:
    """A reader that is killed is gone within 2 s with all that it held, and whoever waits for all is told."""
    with blocking.Publisher("policy", max_segments=6, max_held=4, lease_timeout=30) as pub:
        well = cast.subscriber("policy", "uvloop", name="well")
        victim = cast.subscriber("policy", name="victim")
        for version in range(1, 4):
            pub.publish(patterns.state(1, version), label="1")
            if moment == "holding 3 versions" or (moment == "after the fetch" and version == 3):
                victim.call("next")
                victim.call("keep")
        if moment == "before the fetch":
            os.kill(victim.pid, signal.SIGSTOP)
        reports: list[Any] = []
        waiting = threading.Thread(
            target=lambda: reports.append(pub.publish(patterns.state(1, 4), label="1", wait="all", timeout=20))
        )
        waiting.start()
        assert well.call("wait_version", 4)[0] == 4
        well.call("ack")
        begun = time.monotonic()
        victim.kill()
        waiting.join(20)
        assert time.monotonic() - begun < 2
        (report,) = reports
        assert (report.acked, report.gone, report.pending) == (("well",), ("victim",), ())
        well.call("release")
        pub.publish(patterns.state(1, 5), label="1")
        status = pub.status()
        assert [s["name"] for s in status["subscribers"]] == ["well"]
        states = [v["state"] for v in status["topics"]["default"]["versions"]]
        assert states == ["PUBLISHED"]
        wait_until(lambda: segment_bytes([os.getpid(), well.pid]) <= status["topics"]["default"]["bytes"] + (1 << 20))
        assert well.call("next")[0] == 5


# B104: start methods


def adopt(endpoint: str, runtime: str, pipe: Connection[Any, Any], inherited: list[Any]) -> None:
    """The child: reads the parent's version, and publishes one of its own."""
    os.environ["BUSYNC_RUNTIME_DIR"] = runtime
    try:
        for call in inherited:
            with suppress(ForkedError):
                call()
                raise AssertionError("the child could use its parent's objects")
        with blocking.Subscriber(endpoint) as sub, blocking.Publisher(f"{endpoint}-child") as pub:
            snapshot = sub.next(timeout=20)
            patterns.check(snapshot.tensors, 1, snapshot.version)
            module = patterns.Module()
            snapshot.load_into(module)
            snapshot.ack()
            pub.publish(module)
            with blocking.Subscriber(f"{endpoint}-child") as own:
                patterns.check(own.next(timeout=5).tensors, 1, snapshot.version)
            pipe.send((snapshot.version, snapshot.incarnation, sub._inner.name == f"pid-{os.getpid()}"))
    except BaseException as error:
        pipe.send(repr(error))
        raise


def test_b104_any_start_method_gives_the_same(context: ForkServerContext, runtime_dir: Any) -> None:
    """Children started by fork, spawn and forkserver all get the same by the endpoint's name."""
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        pub.publish(patterns.state(1, 1))
        held = sub.next(timeout=5)
        for method in ("spawn", "forkserver", "fork"):
            start: Any = context if method == "forkserver" else multiprocessing.get_context(method)
            ours, theirs = start.Pipe()
            used: list[Callable[[], object]] = []
            if method == "fork":
                used = [lambda: sub.next(0.1), pub.status, lambda: held.tensors, lambda: pub.publish(SOURCE)]
            process: Any = start.Process(target=adopt, args=("p", str(runtime_dir), theirs, used))
            process.start()
            theirs.close()
            assert ours.poll(40), f"the child of {method} said nothing"
            assert ours.recv() == (1, pub.incarnation, True), method
            process.join(20)
            assert process.exitcode == 0, method
            process.close()
            ours.close()
        patterns.check(held.tensors, 1, 1)
        pub.publish(patterns.state(1, 2))
        assert sub.next(timeout=5).version == 2


def test_b104_nothing_of_the_bus_can_be_pickled() -> None:
    """Objects of the bus refuse to be pickled or copied, and say what to pass instead; what is data does not."""
    with (
        blocking.Publisher("p") as pub,
        blocking.Subscriber("p") as sub,
        pub.loan(like={"w": ("float32", (3,))}, topic="t") as loan,
    ):
        report = pub.publish(patterns.state(1, 1, SMALL))
        snapshot = sub.next(timeout=5)
        things: list[Any] = [
            pub, sub, snapshot, snapshot.tensors, loan, loan.tensors, busync.Publisher("q"), busync.Subscriber("q"),
            sub._inner, {"bus": [pub]},
        ]  # fmt: skip
        for thing in things:
            for attempt in (pickle.dumps, ForkingPickler.dumps, copy.deepcopy):
                with pytest.raises(busync.UsageError, match=r"cannot be pickled.*(pass|open|dict)"):
                    attempt(thing)
        assert pickle.loads(pickle.dumps(report)) == report
        for name, tensor in copy.deepcopy(dict(snapshot.tensors)).items():
            assert torch.equal(tensor, snapshot.tensors[name])


# B105: blocked loops

LIMIT = 0.1


def waits_for_cpu() -> dict[str, float]:
    """Seconds that each thread of this process has waited for a CPU since it began."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found[thread] = int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    return found


class Gaps:
    """How late a timer of 10 ms was at most, not counting how long a thread of this process waited for a CPU."""

    def __init__(self) -> None:
        self.worst = 0.0

    async def run(self) -> None:
        while True:
            begun, waited = time.monotonic(), waits_for_cpu()
            await asyncio.sleep(0.01)
            late = time.monotonic() - begun - 0.01
            if late > LIMIT:
                late -= max(now - waited.get(thread, 0.0) for thread, now in waits_for_cpu().items())
            self.worst = max(self.worst, late)


def slowly(kind: type, name: str, seconds: float) -> Callable[[], None]:
    """Have a copy take longer by ``seconds``, in which it gives up the GIL; the result puts it right again."""
    original = getattr(kind, name)

    def jobs(self: Plan, *arguments: Any) -> list[Callable[[], None]]:
        def late(job: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                time.sleep(seconds)
                job()

            return run

        return [late(job) for job in original(self, *arguments)]

    def run(self: LoadPlan, *arguments: Any) -> None:
        time.sleep(seconds)
        original(self, *arguments)

    setattr(kind, name, jobs if name == "jobs" else run)
    return lambda: setattr(kind, name, original)


class Large(Role):
    """A publisher of large versions, with a ticker on its own loop and on the publisher's."""

    def __init__(self, nbytes: int, delay: float) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.pub = busync.Publisher("policy", max_segments=3)
        self.runner.run(self.pub.__aenter__())
        self.state = {n: torch.ones(t.shape) for n, t in model_of(nbytes).state_dict().items()}
        self.restore = slowly(Plan, "jobs", delay) if delay else lambda: None

    def stop(self) -> None:
        self.restore()
        self.runner.run(self.pub.close())
        self.runner.close()
        self.state.clear()
        del self.pub, self.runner

    def publish(self, times: int) -> tuple[float, float]:
        """The worst gaps on the own loop, and on the publisher's."""

        async def publish() -> tuple[float, float]:
            server = self.pub._server
            assert server is not None
            mine, theirs = Gaps(), Gaps()
            tickers = [asyncio.create_task(mine.run()), asyncio.create_task(server.call(theirs.run()).wait())]
            await asyncio.sleep(0.02)
            for _ in range(times):
                await self.pub.publish(self.state)
            await asyncio.sleep(0.05)  # until late timers have been noticed
            for ticker in tickers:
                ticker.cancel()
                with suppress(asyncio.CancelledError):
                    await ticker
            assert min(mine.worst, theirs.worst) > 0, "a ticker did not tick"
            return mine.worst, theirs.worst

        return self.runner.run(publish())

    def cancel_half_way(self, times: int) -> list[dict[str, Any]]:
        """Cancel publishes while they copy; what the publisher has to show afterwards, each time."""

        async def cancel() -> dict[str, Any]:
            task = asyncio.create_task(self.pub.publish(self.state))
            await asyncio.sleep(0.04)
            assert not task.done(), "the copy was too fast to be cancelled"
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
                raise AssertionError("the cancellation was swallowed")
            topic: dict[str, Any] = self.pub.status()["topics"]["default"]
            return topic

        return [self.runner.run(cancel()) for _ in range(times)]


class LargeReader(Role):
    """A reader of large versions, with a ticker on its loop."""

    def __init__(self, flavour: str, nbytes: int, delay: float) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop if flavour == "uvloop" else None)
        self.sub = busync.Subscriber("policy")
        self.runner.run(self.sub.__aenter__())
        self.nbytes = nbytes
        self.restore = slowly(LoadPlan, "run", delay) if delay else lambda: None

    def stop(self) -> None:
        self.restore()
        self.runner.run(self.sub.close())
        self.runner.close()
        del self.sub, self.runner

    def load(self) -> float:
        """Adopt a version in place, then copy it into a module: the worst gap."""

        async def load() -> float:
            gaps = Gaps()
            module = model_of(self.nbytes).to_empty(device="cpu")
            ticker = asyncio.create_task(gaps.run())
            await asyncio.sleep(0.02)
            snapshot = await self.sub.next(timeout=20)
            assert len(snapshot.tensors) == len(module.state_dict())
            await snapshot.load_into(module)
            await asyncio.sleep(0.05)  # until a late timer has been noticed
            ticker.cancel()
            with suppress(asyncio.CancelledError):
                await ticker
            assert all(bool((p[::97] == 1).all()) for p in module.parameters())
            return gaps.worst

        return self.runner.run(load())


NBYTES, DELAY = (512 << 20, 0.0) if LONG else (16 << 20, 0.5)


def test_b105_a_large_publish_leaves_every_loop_responsive(cast: Cast) -> None:
    """While a large version is copied, neither the caller's loop nor the publisher's is held for 100 ms."""
    learner = cast.begin(Large, NBYTES, DELAY)
    learner.finish(60)
    mine, theirs = learner.call("publish", 1, timeout=60)
    assert mine < LIMIT
    assert theirs < LIMIT


def test_b105_a_publish_cancelled_half_way_leaves_nothing(cast: Cast) -> None:
    """A publish that is cancelled while it copies makes no version, burns no number and keeps no memory."""
    learner = cast.begin(Large, NBYTES, DELAY)
    learner.finish(60)
    learner.call("publish", 1, timeout=60)
    for topic in learner.call("cancel_half_way", 3, timeout=60):
        assert topic["version"] == 1
        assert [v["state"] for v in topic["versions"]] == ["PUBLISHED"]
        assert topic["segments"] <= 2
    learner.call("publish", 1, timeout=60)
    reader = cast.begin(LargeReader, "asyncio", NBYTES, 0.0)
    reader.finish()
    reader.call("load", timeout=60)
    assert learner.call("mappings") <= 3  # the board, and two segments


@pytest.mark.parametrize("flavour", ["asyncio", "uvloop"])
def test_b105_a_large_load_leaves_the_loop_responsive(cast: Cast, flavour: str, request: pytest.FixtureRequest) -> None:
    """Adopting a large version in place, and copying it into a module, hold the reader's loop for less than 100 ms."""
    if LONG:  # at its end the publisher here gives back gigabytes in the last callback of its own loop
        request.node.add_marker(pytest.mark.blocks_loop)
    with blocking.Publisher("policy") as pub:
        reader = cast.begin(LargeReader, flavour, NBYTES, DELAY)
        reader.finish()
        pub.publish({n: torch.ones(t.shape) for n, t in model_of(NBYTES).state_dict().items()})
        assert reader.call("load", timeout=60) < LIMIT
        reader.stop()
