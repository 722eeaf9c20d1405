"""A subscriber that improvises: in place, loads, prefetch, digests; every element of every version is checked."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import busync
from busync import blocking
from busync.errors import BusyncError, ClosedError, EndpointError, PinnedError, WaitTimeout
from tests.faults import pattern
from tests.faults.child import STARVED, Child, only_forked
from tests.faults.page import Slot
from tests.support import patterns

Key = tuple[int, str, int, int]  #: incarnation, topic, version, layout


class Reader(Child):
    """One subscriber of one topic. ``held`` has the tensors in place."""

    sub: Any

    def open(self) -> None:
        self.held: dict[Key, Any] = {}
        self.last: tuple[int, int] = (0, 0)
        self.snapshot: Any = None
        self.topic = self.part.topics[0]
        self._open(10.0)

    def _open(self, timeout: float) -> None:
        """Open, again and again while the endpoint is broken."""
        begun = time.monotonic_ns()
        self.last = (self.last[0], 0)  # a fresh subscriber may be given the newest once more
        while True:
            options = {**self.part.options, "connect_timeout": timeout}
            try:
                if self.runner is None:
                    self.sub = blocking.Subscriber(self.part.endpoint, topic=self.topic, **options)
                    self.sub.__enter__()
                else:
                    self.sub = busync.Subscriber(self.part.endpoint, topic=self.topic, **options)
                    self.run(self.sub.__aenter__())
            except EndpointError:
                if not self.faulty_since(begun):
                    raise
                time.sleep(0.01)
            else:
                self.page.add(Slot.OPENED)
                return

    def close(self) -> None:
        self.held.clear()
        self.snapshot = None
        self.run(self.sub.close())
        del self.sub

    def improvise(self) -> tuple[str, Callable[[], object]]:
        dice = self.rng.random()
        if dice < 0.6:
            return "adopt", self.adopt
        if dice < 0.7:
            return "poll", self.poll
        if dice < 0.77:
            return "look again", self.look_again
        if dice < 0.85:
            return "check", self.check
        if dice < 0.97:
            return "let go", self.let_go
        return "reopen", self.reopen

    def obey(self, do: str, command: dict[str, Any]) -> Any:
        match do:
            case "cancel":
                return self.op("cancel" if self.runner else "interrupt", self.cancel)
            case "settle":
                return self.op("settle", lambda: self.settle(command))
        raise AssertionError(f"unknown command {do}")

    # Operations

    def adopt(self) -> None:
        self._take(lambda: self.run(self.sub.next(self.rng.choice([0.0, 0.01, 0.1]))))

    def poll(self) -> None:
        def poll() -> Any:
            if self.runner is None:
                return self.sub.poll()

            async def look() -> Any:
                await asyncio.sleep(0)
                return self.sub.poll()

            return self.runner.run(look())

        self._take(poll)

    def look_again(self) -> None:
        """The newest, though it may have been seen; its number never goes back."""
        version = max(1, self.last[1])
        call = self.rng.choice([
            lambda: self.run(self.sub.latest(0.02)), lambda: self.run(self.sub.wait_version(version, 0.02)),
        ])  # fmt: skip
        self._take(call, again=True)

    def _take(self, call: Callable[[], Any], *, again: bool = False) -> None:
        mine = len(self.held) + (self.snapshot is not None)
        pinned, why = 0, ""
        try:
            snapshot = call()
        except WaitTimeout:
            return
        except PinnedError as error:
            pinned, why = error.max_held, str(error)
        if pinned:
            assert mine >= pinned, f"pinned by {mine} versions of {pinned}: {why}"
            self.let_go()
            return
        if snapshot is not None:
            self.seen(snapshot, again=again)

    def seen(self, snapshot: Any, *, again: bool = False) -> None:
        """Use a snapshot in one of the ways there are."""
        incarnation, version = snapshot.incarnation, snapshot.version
        if incarnation == self.last[0]:
            late = version < self.last[1] if again else version <= self.last[1]
            assert not late, f"version {version} after {self.last[1]}"
        self.last = incarnation, version
        layout = pattern.layout_of(snapshot)
        self.page.add(Slot.ADOPTED)
        key = (incarnation, self.topic, version, layout)
        way = self.rng.choice(["place", "place", "load", "load", "both", "block", "leave", "keep"])
        if way in ("place", "both"):
            self.held[key] = dict(snapshot.tensors)
            self._check(self.held[key], key)
        if way in ("load", "both"):
            self._load(snapshot, key)
        if way == "block":
            self._block(snapshot, key)
        if way == "place" and self.rng.random() < 0.5:
            self.run(snapshot.ack())
        if self.rng.random() < 0.3:
            snapshot.release()
        self.snapshot = snapshot if way == "keep" else None
        del snapshot
        if len(self.held) > 1 and self.rng.random() < 0.8:
            self._drop(min(self.held))

    def _load(self, snapshot: Any, key: Key) -> None:
        module = patterns.Module(pattern.LAYOUTS[key[3]])
        self.run(snapshot.load_into(module))
        self._check(module.state_dict(), key)

    def _block(self, snapshot: Any, key: Key) -> None:
        if self.runner is None:
            with snapshot:
                self._load(snapshot, key)
                self._check(snapshot.tensors, key)
            return

        async def block() -> None:
            async with snapshot:
                module = patterns.Module(pattern.LAYOUTS[key[3]])
                await snapshot.load_into(module)
                self._check(module.state_dict(), key)
                self._check(snapshot.tensors, key)

        self.runner.run(block())

    def _check(self, tensors: Any, key: Key, *, count: bool = True) -> None:
        try:
            elements = pattern.check(tensors, *key)
        except AssertionError:
            self.page.add(Slot.WRONG)
            raise
        if count:
            self.page.add(Slot.ELEMENTS, elements)

    def check(self) -> None:
        """Every element in place, once more; now and then they are edited, which nobody else may notice."""
        for key, tensors in list(self.held.items()):
            self._check(tensors, key)
            if self.rng.random() < 0.1:
                for tensor in tensors.values():
                    tensor.fill_(-1)
                self._drop(key)

    def let_go(self) -> None:
        """Drop what is held: here, in another thread, or in a cycle."""
        self.snapshot = None
        for key in list(self.held):
            if self.rng.random() < 0.8:
                self._drop(key)

    def _drop(self, key: Key) -> None:
        box = [self.held.pop(key)]
        match self.rng.choice(["here", "here", "thread", "cycle"]):
            case "thread":
                thread = threading.Thread(target=box.clear)
                thread.start()
                thread.join()
            case "cycle":
                box.append(box)
                del box
                if self.rng.random() < 0.3:
                    gc.collect()

    def reopen(self) -> None:
        """A session ends in good order, and what is in place stays right."""
        self.run(self.sub.close())
        self.check()
        self._open(10.0)

    def settle(self, command: dict[str, Any]) -> dict[str, Any]:
        """Adopt whatever comes until the stage tells which version is the last, and that one is here."""
        self.held.clear()
        self.snapshot = None
        gc.collect()
        wanted: tuple[int, int] | None = None
        stop_at = time.monotonic() + 12
        while wanted is None or self.last != wanted:
            assert time.monotonic() < stop_at, f"has {self.last} and not {wanted}: {self.state()}"
            self._take(lambda: self.run(self.sub.next(0.05)))
            self.held.clear()
            self.snapshot = None
            told = self.receive() if wanted is None else None
            if told is not None:
                wanted = told["incarnation"], told["versions"][self.topic]
        self._say_last()
        return {"version": self.last[1]}

    def _say_last(self) -> None:
        try:
            self.run(self.sub.next(0.0))  # acknowledges the last one
        except WaitTimeout:
            return

    def state(self) -> dict[str, Any]:
        return {
            "connected": self.sub.connected, "version": self.sub.version, "adopted": self.sub.adopted,
            "held": [str(key) for key in self.held],
        }  # fmt: skip

    # Faults

    def starving(self) -> None:
        for _ in range(self.rng.choice([1, 2, 4])):
            try:
                if self.rng.random() < 0.2:
                    self.run(self.sub.close())
                    self._open(0.2)
                else:
                    self.improvise_more()
            except STARVED:
                pass
            except ClosedError:
                break
        self.check()
        if self.rng.random() < 0.5 or self._closed():
            self._hungry = True

    def starve(self) -> None:
        self._hungry = False
        super().starve()
        if self._hungry:
            self.run(self.sub.close())
            self._open(10.0)

    def _closed(self) -> bool:
        inner = self.sub if self.runner is not None else self.sub._inner
        return bool(inner._closed or not inner._opened)

    def improvise_more(self) -> None:
        self.rng.choice([self.adopt, self.poll, self.look_again])()

    def cancel(self) -> None:
        """Cancel a waiting call or a load at any moment; nothing is lost."""
        delay = self.rng.choice([0.0, self.rng.uniform(0, 0.002), self.rng.uniform(0, 0.02)])
        if self.runner is None:
            outcome, result = self.interrupted(lambda: self.sub.next(0.1), max(delay, 0.0001))
        else:
            what = self.rng.choice(["next", "next", "latest", "load", "open"])
            if what == "open":
                self._cancel_open(delay)
                return
            if what == "load":
                self._cancel_load(delay)
                return
            call = self.sub.next(0.1) if what == "next" else self.sub.latest(0.1)
            outcome, result = self.cancelled(call, delay)
        if outcome == "done":
            self._take(lambda: result, again=True)
        elif outcome == "failed" and not isinstance(result, WaitTimeout | PinnedError):
            raise result

    def _cancel_load(self, delay: float) -> None:
        """The module is loaded as a whole, or not at all."""
        try:
            snapshot = self.run(self.sub.next(0.1))
        except (WaitTimeout, PinnedError):
            self.let_go()
            return
        layout = pattern.layout_of(snapshot)
        key = (snapshot.incarnation, self.topic, snapshot.version, layout)
        self.last = key[0], key[2]
        self.page.add(Slot.ADOPTED)
        module = patterns.Module(pattern.LAYOUTS[layout])
        outcome, result = self.cancelled(snapshot.load_into(module), delay / 10)
        del snapshot
        if outcome == "failed":
            raise result
        if any(bool(tensor.any()) for tensor in module.state_dict().values()):
            self._check(module.state_dict(), key)
        else:
            assert outcome == "cancelled", "loaded, and nothing came"

    def _cancel_open(self, delay: float) -> None:
        extra = busync.Subscriber(self.part.endpoint, topic=self.topic, name="extra")

        async def use() -> None:
            async with extra:
                await asyncio.sleep(0.01)

        begun = time.monotonic_ns()
        outcome, result = self.cancelled(use(), delay)
        if outcome == "failed" and not (isinstance(result, EndpointError) and self.faulty_since(begun)):
            raise result

    def in_fork(self) -> None:
        for key, tensors in list(self.held.items()):
            pattern.check(tensors, *key)
        only_forked(lambda: self.sub.poll())
        time.sleep(0.001)

    def work(self) -> None:
        """A call that waits for ever, and tensors in place."""
        self.adopt()
        if self.runner is None:

            def wait() -> None:
                try:
                    while True:
                        self.sub.next(None)
                except BusyncError:
                    pass

            threading.Thread(target=wait, daemon=True).start()
            time.sleep(0.01)
            return

        async def start() -> None:
            self._task = asyncio.get_running_loop().create_task(self.sub.next(None))
            await asyncio.sleep(self.rng.uniform(0, 0.01))

        self.runner.run(start())
