"""A publisher that improvises: copies, loans, several topics, waits; and tells what must be true afterwards."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import busync
from busync import blocking
from busync.errors import AllocationError, BusyncError, FdError, LoanInUse, PoolExhausted, WaitTimeout
from tests.faults import pattern
from tests.faults.child import STARVED, Child, only_forked
from tests.faults.page import Slot

LATE = 2.0  #: seconds beyond lease_timeout that a publish may take; machines are busy
RESERVES = (
    ("posix_fallocate", errno.ENOMEM), ("posix_fallocate", errno.ENOSPC), ("memfd_create", errno.EMFILE),
    ("memfd_create", errno.ENFILE), ("memfd_create", errno.ENOMEM),
)  # fmt: skip


class Writer(Child):
    """One publisher; ``versions`` says what each topic has."""

    pub: Any

    def open(self) -> None:
        self.versions = dict.fromkeys(self.part.topics, 0)
        if self.runner is None:
            self.pub = blocking.Publisher(self.part.endpoint, **self.part.options)
            self.pub.__enter__()
        else:
            self.pub = busync.Publisher(self.part.endpoint, **self.part.options)
            self.run(self.pub.__aenter__())
        self.page.add(Slot.OPENED)

    def close(self) -> None:
        if self.rng.random() < 0.3:  # while others still publish and wait
            self.work()
        self.run(self.pub.close())
        for thread in threading.enumerate():
            if thread.name == "work":
                thread.join(5)
                assert not thread.is_alive(), "a publish survived its publisher"
        del self.pub

    def improvise(self) -> tuple[str, Callable[[], object]]:
        topic, dice = self.rng.choice(self.part.topics), self.rng.random()
        if dice < 0.6:
            return "publish", lambda: self.publish(topic)
        if dice < 0.7:
            return "publish all", self.publish_all
        if dice < 0.85:
            return "loan", lambda: self.lend(topic)
        if dice < 0.9:
            return "wait", lambda: self.wait(topic)
        if dice < 0.95:
            return "status", self.status
        delay = self.rng.uniform(0, 0.01)
        return "publish", lambda: time.sleep(delay)

    def obey(self, do: str, command: dict[str, Any]) -> Any:
        match do:
            case "reserve":
                return self.op("reserve", self.reserve)
            case "cancel":
                return self.op("cancel" if self.runner else "interrupt", self.cancel)
            case "final":
                return self.op("final", self.final)
        raise AssertionError(f"unknown command {do}")

    # Operations

    def _source(self, topic: str, layout: int) -> dict[str, Any]:
        return pattern.state(self.pub.incarnation, topic, self.versions[topic] + 1, layout)

    def _label(self, topic: str, layout: int) -> str:
        return pattern.label_of(self.pub.incarnation, topic, self.versions[topic] + 1, layout)

    def publish(self, topic: str, layout: int | None = None) -> None:
        layout = self.rng.choice([0, 0, 0, 1, 1, 2]) if layout is None else layout
        wait: Any = self.rng.choice(["none", "none", "none", "none", "all", 1])
        timeout = self.rng.choice([0.0, 0.02, 0.2])
        state = self._source(topic, layout)
        label = self._label(topic, layout)
        with self._timed(waits=wait != "none"):
            report = self.run(self.pub.publish(state, topic=topic, label=label, wait=wait, timeout=timeout))
        for tensor in state.values():
            tensor.fill_(-2)  # nobody may notice
        self._published(topic, report)

    def _published(self, topic: str, report: Any) -> None:
        if report.version is None:
            assert self.part.options["when_full"] == "skip", "skipped, and nobody allowed it"
            return
        self.versions[topic] += 1
        assert report.version == self.versions[topic], f"version {report.version} after {self.versions[topic] - 1}"
        self.page.add(Slot.PUBLISHED)
        self.page.most(Slot.SLOWEST_WAIT, int(report.waited * 1e9))

    @contextmanager
    def _timed(self, *, waits: bool) -> Iterator[None]:
        stops, begun = self.page[Slot.STOPS], time.monotonic_ns()
        yield
        took = time.monotonic_ns() - begun
        if waits or stops != self.page[Slot.STOPS]:
            return
        over = took - int(self.part.options["lease_timeout"] * 1e9)
        self.page.most(Slot.SLOWEST_PUBLISH, took)
        self.page.most(Slot.OVER_LEASE, over)
        assert over < LATE * 1e9, f"a publish took {took / 1e9:.3f} s"

    def publish_all(self) -> None:
        """All topics at once, where the flavour can."""
        if self.runner is None:
            for topic in self.part.topics:
                self.publish(topic)
            return
        states = {topic: self._source(topic, 1) for topic in self.part.topics}

        async def publish() -> list[Any]:
            calls = (self.pub.publish(s, topic=t, label=self._label(t, 1)) for t, s in states.items())
            return await asyncio.gather(*calls)

        with self._timed(waits=False):
            reports = self.runner.run(publish())
        for topic, report in zip(states, reports, strict=True):
            self._published(topic, report)

    def lend(self, topic: str) -> None:
        """A loan: published, given back, or given back while a tensor of it lives."""
        layout, end = self.rng.choice([0, 1, 2]), self.rng.choice(["publish", "publish", "drop", "keep", "in use"])
        incarnation, version = self.pub.incarnation, self.versions[topic] + 1
        loan = self.pub.loan(like=pattern.state(0, topic, 0, layout), topic=topic)
        try:
            self.run(loan.__enter__() if self.runner is None else loan.__aenter__())
        except PoolExhausted:
            assert self.part.options["when_full"] == "skip", "no loan, and nobody allowed it"
            return
        kept = None
        try:
            pattern.write(loan.tensors, incarnation, topic, version, layout)
            if end in ("keep", "in use"):
                kept = next(iter(loan.tensors.values()))
            if end == "in use":
                try:
                    self.run(loan.publish())
                    raise AssertionError("published while a tensor of the loan was in use")
                except LoanInUse:
                    kept = None
            if end in ("publish", "in use"):
                report = self.run(loan.publish(label=pattern.label_of(incarnation, topic, version, layout)))
                self._published(topic, report)
        finally:
            over = (None, None, None)
            self.run(loan.__exit__(*over) if self.runner is None else loan.__aexit__(*over))
        if kept is not None:
            kept.fill_(-3)  # the memory is nobody else's any more
        assert self._version(topic) == self.versions[topic]

    def wait(self, topic: str) -> None:
        if self.versions[topic]:
            what = self.rng.choice(["acked", "released"])
            with suppress(WaitTimeout):
                self.run(self.pub.wait(self.versions[topic], what, timeout=0.02, topic=topic))

    def status(self) -> None:
        """The books: versions as counted here, memory within its bound."""
        topics = self.pub.status()["topics"]
        for topic, version in self.versions.items():
            if topic not in topics:
                assert not version, f"topic {topic} is gone"
                continue
            assert topics[topic]["version"] == version, f"{topics[topic]} and not version {version}"
            assert topics[topic]["segments"] <= self.part.options["max_segments"], topics[topic]

    def _version(self, topic: str) -> int:
        topics = self.pub.status()["topics"]
        return int(topics[topic]["version"]) if topic in topics else 0

    def final(self) -> dict[str, Any]:
        """The last version of every topic; who did not get it."""
        missing = {}
        for topic in self.part.topics:
            layout = self.rng.choice([0, 1, 2])
            stop_at = time.monotonic() + 5
            while True:  # "skip" may find the pool full for as long as readers hold what they have
                before = self.versions[topic]
                report = self.run(
                    self.pub.publish(
                        self._source(topic, layout), topic=topic, label=self._label(topic, layout), wait="all",
                        timeout=8,
                    )
                )  # fmt: skip
                self._published(topic, report)
                if self.versions[topic] > before:
                    break
                assert time.monotonic() < stop_at, "every publish is skipped"
                time.sleep(0.01)
            if report.pending or report.failed or report.gone:
                missing[topic] = [*report.pending, *report.failed, *report.gone]
            self.run(self.pub.wait(self.versions[topic], "acked", timeout=5, topic=topic))
        self.status()
        return {"versions": self.versions, "incarnation": self.pub.incarnation, "missing": missing}

    # Faults

    def before_starving(self) -> bool:
        """libzmq ends the process when it accepts a connection and has no descriptor for it, so wait for those that
        the door has let in already. It lets nobody in any more."""
        stop_at = time.monotonic() + 0.5
        while any(s["state"] == "joining" for s in self.pub.status()["subscribers"]):
            if time.monotonic() > stop_at:
                return False
            time.sleep(0.002)
        time.sleep(0.02)  # and for one that has gone away since, and whose connection is not accepted yet
        return True

    def starving(self) -> None:
        for _ in range(self.rng.choice([1, 2, 4])):
            topic, layout = self.rng.choice(self.part.topics), self.rng.choice([0, 1, 2])
            try:
                self.publish(topic, layout)
            except STARVED:
                assert self._version(topic) == self.versions[topic], "a failed publish burned a number"
            self.status()

    def reserve(self) -> None:
        """The kernel refuses memory, whatever is asked for."""
        name, code = self.rng.choice(RESERVES)
        topic = self.rng.choice(self.part.topics)
        genuine, hits = getattr(os, name), 0

        def refuse(*_: object) -> None:
            nonlocal hits
            hits += 1
            raise OSError(code, os.strerror(code))

        setattr(os, name, refuse)
        try:
            for layout in self.rng.sample([0, 1, 2, 0, 2, 1], 6):
                try:
                    self.lend(topic) if self.rng.random() < 0.2 else self.publish(topic, layout)
                    assert not hits, "published without memory"
                except (AllocationError, FdError):
                    assert hits, "no memory, and nobody refused it"
                if hits:
                    break
        finally:
            setattr(os, name, genuine)
        assert self._version(topic) == self.versions[topic], "a failed publish burned a number"
        if hits:
            self.page.fault("publisher: reserve fails")
            self.publish(topic, layout)

    def cancel(self) -> None:
        """Cancel a publish, a loan or a wait at any moment; either nothing happened or all of it."""
        topic, layout = self.rng.choice(self.part.topics), self.rng.choice([0, 1, 2])
        delay = self.rng.choice([0.0, self.rng.uniform(0, 0.001), self.rng.uniform(0, 0.01)])
        what = self.rng.choice(["publish", "publish", "publish and wait", "loan", "wait"])
        state, label = self._source(topic, layout), self._label(topic, layout)
        if what.startswith("publish"):
            wait = "all" if what == "publish and wait" else "none"
            named: dict[str, Any] = {"topic": topic, "label": label, "wait": wait, "timeout": 0.3}
            if self.runner is not None:
                outcome, result = self.cancelled(self.pub.publish(state, **named), delay)
            else:
                outcome, result = self.interrupted(lambda: self.pub.publish(state, **named), max(delay, 0.0001))
        elif what == "loan":
            outcome, result = self._cancel_loan(topic, layout, delay)
        else:
            if not self.versions[topic]:
                return
            wanted = self.versions[topic]
            if self.runner is not None:
                call = self.pub.wait(wanted, "released", timeout=0.3, topic=topic)
                outcome, result = self.cancelled(call, delay)
            else:
                outcome, result = self.interrupted(
                    lambda: self.pub.wait(wanted, "released", timeout=0.3, topic=topic), max(delay, 0.0001)
                )
        skipped = self.part.options["when_full"] == "skip" and isinstance(result, PoolExhausted)
        if outcome == "failed" and not (skipped or isinstance(result, WaitTimeout)):
            raise result
        for tensor in state.values():
            tensor.fill_(-2)  # nobody reads the source any more
        version = self._version(topic)
        allowed = (0, 1) if what.startswith("publish") else (0,)
        assert version - self.versions[topic] in allowed, f"{what}: version {version} after {self.versions[topic]}"
        self.versions[topic] = version
        if not self.rng.randrange(4):
            self.publish(topic)

    def _cancel_loan(self, topic: str, layout: int, delay: float) -> tuple[str, Any]:
        like = pattern.state(0, topic, 0, layout)
        loan = self.pub.loan(like=like, topic=topic)
        if self.runner is None:

            def lend() -> None:
                with loan:
                    time.sleep(0.001)

            return self.interrupted(lend, max(delay, 0.0001))

        async def borrow() -> None:
            async with loan:
                next(iter(loan.tensors.values())).fill_(-4)
                await asyncio.sleep(0.005)

        return self.cancelled(borrow(), delay)

    def in_fork(self) -> None:
        only_forked(self.pub.status)
        only_forked(lambda: self.pub.incarnation)
        time.sleep(0.001)

    def work(self) -> None:
        """Publishes that wait for acks that never come."""
        incarnation = self.pub.incarnation
        for topic in self.part.topics:
            version = self.versions[topic] + 1
            state = pattern.state(incarnation, topic, version, 1)
            label = pattern.label_of(incarnation, topic, version, 1)
            if self.runner is not None:
                self._waiting(topic, state, label)
                continue

            def publish(topic: str = topic, state: Any = state, label: str = label) -> None:
                with suppress(BusyncError):
                    self.pub.publish(state, topic=topic, label=label, wait=99, timeout=60)

            threading.Thread(target=publish, name="work", daemon=True).start()
        time.sleep(self.rng.uniform(0, 0.01))

    def _waiting(self, topic: str, state: Any, label: str) -> None:
        assert self.runner is not None

        async def publish() -> None:
            with suppress(BusyncError):
                await self.pub.publish(state, topic=topic, label=label, wait=99, timeout=60)

        async def start() -> None:
            self._tasks = [*getattr(self, "_tasks", []), asyncio.get_running_loop().create_task(publish())]
            await asyncio.sleep(0)

        self.runner.run(start())
