"""Publishes that wait, fail, and meet (B48, B49, B50, B51)."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch

import busync
from busync import blocking
from busync.errors import (
    AllocationError,
    BusyncError,
    ExportError,
    MismatchError,
    OptionError,
    PublisherLost,
    WaitTimeout,
)
from busync.handles import Plan
from busync.transport.bus import RouterBus
from tests.field_reports.kit import bus, raised, scaled
from tests.support import patterns
from tests.support.mutants import Mutant
from tests.support.processes import Cast
from tests.support.roles import SubscriberRole

SMALL = patterns.SMALL
LIMIT = scaled(0.25, 0.5)  #: seconds that calls are told to wait at most
MORE = scaled(1.5, 0.5)  #: seconds that they may take beyond it
PUBLISHER = "busync/protocol/publisher.py"

MUTANTS = {
    "test_b48_a_failed_adoption_reaches_the_publisher_with_its_reason": (
        Mutant(
            PUBLISHER, "self._waits.fail(session, message.version, message.text)", "pass",
            "a publish waits for a reader that has said it cannot",
        ),
        Mutant(
            "busync/protocol/waits.py", "wait.fail(session.id, session.reason)", "pass",
            "a wait that begins after the failure does not know of it",
        ),
        Mutant(
            "busync/snapshot.py", 'f"{type(error).__name__}: {error}"', "type(error).__name__",
            "the reason is thrown away",
        ),
    ),
    "test_b49_every_wait_ends_and_says_who_which_what_and_how_long": (
        Mutant(
            "busync/publishing.py", "    if missing:\n", "    if not missing:\n",
            "a wait that was in vain says nothing",
        ),
        Mutant(
            "busync/asking.py", "        return WaitTimeout(f", "        raise TimeoutError(f",
            "a reader's error is bare",
        ),
    ),
    "test_b50_a_failed_update_leaves_nothing_behind": Mutant(
        "busync/publishing.py",
        "            server.core.discard(reserved.reservation, time.monotonic())\n            server.carry_out()\n"
        "            raise\n        version",
        "            raise\n        version",
        "a publish that fails keeps its segment",
    ),
    "test_b50_a_failed_adoption_leaves_the_old_version_in_place": Mutant(
        "busync/handles/load.py", "    if problems:\n        raise", "    if problems and not pairs:\n        raise",
        "what fits is loaded although something does not",
    ),
    "test_b50_a_reader_that_cannot_be_reached_is_no_failure": Mutant(
        "busync/links.py", "except BusyncError as error:  # of this peer alone",
        "except MemoryError as error:  # of this peer alone",
        "what goes wrong with one reader fails the publish",
    ),
    "test_b51_publishes_at_the_same_time_are_queued": Mutant(
        "busync/publishing.py", "    async with server.lock(topic):", "    async with asyncio.Lock():",
        "publishes that overlap overtake each other",
    ),
}  # fmt: skip


class Failing(SubscriberRole):
    """A reader with an apply step that fails on demand."""

    def __init__(self, name: str) -> None:
        super().__init__("blocking", "p", {"name": name})

    def adopt(self) -> int:
        with self.sub.next(timeout=10) as snapshot:
            patterns.check(snapshot.tensors, 1, snapshot.version, SMALL)
            version = int(snapshot.version)
            snapshot.ack()
        return version

    def fail(self, how: str) -> None:
        snapshot = self.sub.next(timeout=10)
        if how == "raises":
            with suppress(ValueError), snapshot:
                raise ValueError("no layer 'head'")
        elif how == "does not fit":
            with suppress(MismatchError):
                snapshot.load_into(torch.nn.Linear(5, 7))
        snapshot.release()


def test_b48_a_failed_adoption_reaches_the_publisher_with_its_reason(cast: Cast) -> None:
    """A reader that fails to adopt a version is in the report with its reason at once, and holds nobody up."""
    with blocking.Publisher("p") as pub:
        a, b, c = (cast.begin(Failing, name) for name in "abc")
        for reader in (a, b, c):
            reader.finish()
        cases = [("raises", "ValueError: no layer 'head'"), ("does not fit", "version 3 does not fit")]
        for how, reason in cases:
            a.start("adopt")
            b.start("adopt")
            c.start("fail", how)
            expected = pub.status()["topics"].get("default", {"version": 0})["version"] + 1
            began = time.monotonic()
            report = pub.publish(patterns.state(1, expected, SMALL), wait="all", timeout=10)
            assert time.monotonic() - began < 5
            version = a.finish()
            assert b.finish() == version == report.version
            c.finish()
            assert sorted(report.acked) == ["a", "b"]
            assert (report.pending, report.gone) == ((), ())
            assert list(report.failed) == ["c"]
            assert reason in report.failed["c"]
            began = time.monotonic()
            with pytest.raises(WaitTimeout) as caught:  # whoever asks later hears it as well, without waiting
                pub.wait(version, timeout=10)
            assert time.monotonic() - began < 5
            assert reason in str(caught.value)
            assert "c (" in str(caught.value)
            for reader in (a, b, c):
                reader.start("adopt")
            report = pub.publish(patterns.state(1, version + 1, SMALL), wait="all", timeout=10)
            assert sorted(report.acked) == ["a", "b", "c"]
            assert report.failed == {}
            assert [reader.finish() for reader in (a, b, c)] == [version + 1] * 3
            pub.wait(version + 1, timeout=10)
        for reader in (a, b, c):
            reader.stop()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does not run."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def says(call: Callable[[], object], kind: type[BusyncError], *facts: str) -> None:
    """Insist that ``call`` raises in time, and that the text has every fact."""
    began = time.monotonic()
    text = str(raised(kind, call))
    took = time.monotonic() - began
    assert took < LIMIT + MORE, f"{text!r} took {took} s"
    for fact in facts:
        assert fact in text, f"{fact!r} is not in {text!r}"


def test_b49_every_wait_ends_and_says_who_which_what_and_how_long(cast: Cast) -> None:
    """Whatever is waited for, in vain, ends in time with a typed error that has who, which version, what, how long."""
    where = os.path.join(os.environ["BUSYNC_RUNTIME_DIR"], "p")
    says(lambda: blocking.Subscriber("p", connect_timeout=LIMIT).__enter__(), PublisherLost, where, f"{LIMIT:g} s")
    with blocking.Publisher("p", lease_timeout=LIMIT, max_segments=2) as pub, blocking.Subscriber("p") as sub:
        says(lambda: sub.next(timeout=LIMIT), WaitTimeout, where, "newer than 0", "'default'", f"{LIMIT:g} s")
        says(lambda: sub.latest(timeout=LIMIT), WaitTimeout, where, "a version", "'default'", f"{LIMIT:g} s")
        reader = cast.subscriber("p", "blocking", name="actor")
        pub.publish(patterns.state(1, 1), label="1")
        says(lambda: sub.wait_version(7, timeout=LIMIT), WaitTimeout, where, "version 7", "'default'", f"{LIMIT:g} s")
        assert reader.call("next")[0] == 1
        reader.call("keep")
        with stopped(reader.pid):  # after the announcement
            began = time.monotonic()
            report = pub.publish(patterns.state(1, 2), label="1", wait="all", timeout=LIMIT)
            assert LIMIT <= time.monotonic() - began < LIMIT + MORE
            assert "actor" in report.pending
            says(
                lambda: pub.wait(2, timeout=LIMIT),
                WaitTimeout, "actor", "version 2", "acked", "'default'", f"{LIMIT:g} s",
            )  # fmt: skip
            says(
                lambda: pub.wait(1, "released", timeout=LIMIT),  # before its release
                WaitTimeout, "actor", "version 1", "released", "'default'", f"{LIMIT:g} s",
            )  # fmt: skip
            began = time.monotonic()
            report = pub.publish(patterns.state(1, 3), label="1")  # a segment that is not given back
            assert LIMIT <= report.waited < time.monotonic() - began < LIMIT + MORE
            assert next(s["state"] for s in pub.status()["subscribers"] if s["name"] == "actor") == "overdue"
        assert reader.call("check") == 1
        reader.stop()


def test_b49_readers_of_a_stopped_publisher_do_not_wait_for_ever(cast: Cast) -> None:
    """A publisher that is stopped answers nobody: its readers' waits end in time, and all is well afterwards."""
    learner = cast.publisher("p")
    where = os.path.join(os.environ["BUSYNC_RUNTIME_DIR"], "p")
    with blocking.Subscriber("p", digests=True) as sub:
        learner.call("publish")
        snapshot = sub.next(timeout=5)
        with stopped(learner.pid):
            says(lambda: sub.next(timeout=LIMIT), WaitTimeout, where, "newer than 1", f"{LIMIT:g} s")
            says(
                lambda: blocking.Subscriber("p", connect_timeout=LIMIT).__enter__(),
                PublisherLost,
                where,
                f"{LIMIT:g} s",
            )
        assert len(snapshot.digest(timeout=5)) == 32
        with stopped(learner.pid):
            assert sub.latest(timeout=LIMIT).version == 1
        learner.call("publish")
        assert sub.next(timeout=5).version == 2
        del snapshot


MUTANTS["test_b49_readers_of_a_stopped_publisher_do_not_wait_for_ever"] = Mutant(
    "busync/subscriber.py", "async with asyncio.timeout(self.options.connect_timeout):",
    "async with asyncio.timeout(None):",
    "a subscriber waits for ever for a publisher that does not answer",
)  # fmt: skip


def fail(*_: object, **__: object) -> Any:
    raise AllocationError(4096, "a test wants it", "run no test")


def _state_then_error() -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(patterns.state(1, 99).items())[:2]
    raise KeyError("the source broke")


def _half_of_the_jobs(plan: Plan, buffer: Any, workers: int, views: Any) -> list[Callable[[], None]]:
    def broken() -> None:
        raise OSError("the copy broke")

    return [*_jobs(plan, buffer, workers, views), broken]


_jobs = Plan.jobs
_LARGE = {"large": torch.zeros(400_000)}  # no free segment fits
_SPARSE = {"w": torch.ones(3), "s": torch.eye(3).to_sparse()}
Stage = tuple[str, object, str, object, type[Exception]]
#: what fails; the source; what is replaced, and by what; what publish raises
STAGES: list[Stage] = [
    ("iterate", _state_then_error, "", None, KeyError),
    ("plan", _SPARSE, "", None, ExportError),
    ("name", {"w" * 2000: torch.ones(3)}, "", None, ExportError),
    ("label", None, "label", "x" * 1000, OptionError),
    ("manifest", None, "busync.server.Server.encode_layout", fail, AllocationError),
    ("reserve", _LARGE, "busync.pool.create_segment", fail, AllocationError),
    ("copy", None, "busync.handles.Plan.jobs", _half_of_the_jobs, OSError),
]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: str(stage[0]))
def test_b50_a_failed_update_leaves_nothing_behind(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a publish fails, the old version is served on, no segment is lost, and the next publish is adopted."""
    name, source, target, replacement, error = stage
    with bus() as (pub, (sub,)):
        last = 0
        for round_ in range(1, 4):
            last = round_
            assert pub.publish(patterns.state(1, round_)).version == round_
            with sub.next(timeout=5) as snapshot:
                patterns.check(snapshot.tensors, 1, round_)
            before = pub.status()["topics"]["default"]
            with monkeypatch.context() as patch:
                label = ""
                if target == "label":
                    label = str(replacement)
                elif target:
                    patch.setattr(target, replacement)
                given: Any = source() if callable(source) else source
                if given is None:  # of another layout, so that it has to be encoded
                    given = {**patterns.state(1, 99), f"extra{round_}": torch.ones(1)}
                raised(error, partial(pub.publish, given, label=label))
            topic = pub.status()["topics"]["default"]
            assert topic["versions"] == before["versions"], f"{name} left something behind"
            assert topic["segments"] <= 4
            assert topic["version"] == round_
            with blocking.Subscriber("p") as other:
                patterns.check(other.latest(timeout=5).tensors, 1, round_)
        assert pub.publish(patterns.state(1, last + 1), wait="none").version == last + 1
        with sub.next(timeout=5) as snapshot:
            patterns.check(snapshot.tensors, 1, last + 1)


def test_b50_a_failed_adoption_leaves_the_old_version_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a reader cannot map or apply a version, its module keeps the old one whole, and the next one comes."""
    with bus() as (pub, (sub,)):
        module = patterns.Module()
        pub.publish(patterns.state(1, 1))
        sub.next(timeout=5).load_into(module)
        old = {name: id(tensor) for name, tensor in module.named_parameters()}

        def unchanged(version: int) -> None:
            patterns.check(module.state_dict(), 1, version)
            assert {name: id(tensor) for name, tensor in module.named_parameters()} == old

        pub.publish(patterns.state(1, 2) | {"body.bias": torch.zeros(7)})  # apply
        raised(MismatchError, lambda: sub.next(timeout=5).load_into(module))
        unchanged(1)
        pub.publish(patterns.state(1, 3))
        for target in ("busync.session.AttachedSegment.readonly", "busync.handles.private.map_private"):  # map
            with monkeypatch.context() as patch:
                patch.setattr(target, fail)
                if target.endswith("readonly"):
                    raised(AllocationError, lambda: sub.latest(timeout=5).load_into(module))
                else:
                    raised(AllocationError, lambda: sub.latest(timeout=5).tensors)
            unchanged(1)
            assert "a test wants it" in pub.status()["subscribers"][0]["reason"]
        sub.latest(timeout=5).load_into(module)  # the same version, once more
        unchanged(3)
        pub.publish(patterns.state(1, 4))
        sub.next(timeout=5).load_into(module)
        unchanged(4)


def test_b50_a_reader_that_cannot_be_reached_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A publish whose announcement fails for one reader is a publish: the others get it, and that one comes again."""
    send = RouterBus.send
    with bus(readers=2) as (pub, subs):
        pub.publish(patterns.state(1, 1, SMALL))
        for sub in subs:
            assert sub.next(timeout=5).version == 1
        broken: list[bytes] = []

        def send_or_fail(router: RouterBus, token: bytes, data: bytes) -> Any:
            if not broken or token in broken:
                broken[:] = [token]
                fail()
            return send(router, token, data)

        with monkeypatch.context() as patch:
            patch.setattr(RouterBus, "send", send_or_fail)
            threads = [threading.Thread(target=sub.next, kwargs={"timeout": 5}) for sub in subs]
            for thread in threads:
                thread.start()
            time.sleep(0.1)  # both wait
            layout = patterns.state(1, 2, SMALL) | {"another": torch.ones(1)}  # or the bus would not be used
            report = pub.publish(layout, wait="all", timeout=0.5)
            assert report.version == 2
            assert len(report.gone) == 1
            for thread in threads:
                thread.join()
        assert pub.publish(patterns.state(1, 3, SMALL)).version == 3
        for sub in subs:
            snapshot = sub.latest(timeout=5)
            patterns.check(snapshot.tensors, 1, 3, SMALL)
        del snapshot
        assert "a test wants it" in caplog.text
        caplog.clear()  # it keeps the error, and that its frames


@pytest.mark.asyncio
async def test_b51_publishes_at_the_same_time_are_queued() -> None:
    """Publishes that overlap become versions in the order of their calls, each whole, from tasks and threads alike."""
    rounds = scaled(8, 60)
    async with busync.Publisher("p", max_segments=4) as pub, busync.Subscriber("p") as sub:
        seen: dict[int, int] = {}

        async def read() -> None:
            async for snapshot in sub:
                tensors = snapshot.tensors
                marks = {int(tensor.view(-1)[at]) for tensor in tensors.values() for at in (0, -1)}
                marks |= {int(tensor.min()) for tensor in tensors.values()}
                assert len(marks) == 1, f"version {snapshot.version} is made of {marks}"
                seen[snapshot.version] = marks.pop()
                if snapshot.label == "last":
                    return

        def whole(mark: int, numel: int) -> dict[str, torch.Tensor]:
            return {f"t{i}": torch.full((numel,), mark, dtype=torch.int32) for i in range(3)}

        reader = asyncio.create_task(read())
        published: dict[int, int] = {}
        for round_ in range(rounds):
            sizes = (600_000, 10, 300_000, 10, 1000)  # the first would be the last without a queue
            states = [whole(100 * round_ + i, numel) for i, numel in enumerate(sizes)]
            reports = await asyncio.gather(*(pub.publish(state) for state in states))
            versions = [report.version or 0 for report in reports]
            assert versions == list(range(versions[0], versions[0] + 5))
            published |= {version: 100 * round_ + i for i, version in enumerate(versions)}

        def from_a_thread(which: int) -> None:
            for i in range(20):
                mark = 100_000 * (which + 1) + i
                state = whole(mark, 10 + 50_000 * (i % 2))
                version = asyncio.run(pub.publish(state)).version
                assert version is not None
                assert version not in published
                published[version] = mark

        await asyncio.gather(*(asyncio.to_thread(from_a_thread, which) for which in range(2)))
        last = await pub.publish(whole(-1, 10), label="last")
        assert last.version == 5 * rounds + 41
        assert sorted(published) == list(range(1, 5 * rounds + 41))
        for which in (1, 2):
            marks = [mark for _, mark in sorted(published.items()) if mark // 100_000 == which]
            assert marks == sorted(marks)  # each thread's own in its order
        await asyncio.wait_for(reader, 10)
        assert seen.pop(last.version) == -1
        assert seen
        assert all(published[version] == mark for version, mark in seen.items())
        reader.result()
