"""What scripted child processes do: one method per step. Arguments and answers travel by pickle."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import uvloop

import busync
from busync import blocking
from busync.errors import BusyncError, ForkedError
from tests.support import gpu, patterns
from tests.support.leaks import leftovers, resources

FLAVOURS = ["asyncio", "uvloop", "blocking"]
Seen = tuple[int, str, int]  #: version, label, incarnation


class Role:
    """A process under test. ``stop`` gives everything back; ``left`` then tells what it did not give back."""

    WATCHED = True  #: loops run in debug mode, and a callback that holds one fails the test

    def __init__(self) -> None:
        self._child = 0
        self._to_child = -1
        self._before = resources()
        self._allocated = gpu.allocated() if patterns.device().type == "cuda" else 0

    def stop(self) -> None:
        raise NotImplementedError

    def left(self) -> str:
        left = leftovers(self._before)
        if patterns.device().type == "cuda":
            left += gpu.left(self._allocated)
        return left

    def pid(self) -> int:
        return os.getpid()

    def fds(self) -> int:
        return sum(resources().fds.values())

    def gpu(self) -> dict[str, int]:
        """What this process uses of a GPU."""
        return gpu.usage() if patterns.device().type == "cuda" else {}

    def mappings(self) -> int:
        """Mapped segments and boards."""
        return sum(resources().mappings.values())

    def _fork(self, child: Callable[[Callable[[], bool]], None], *, leave: str) -> int:
        """Fork; the child runs ``child(asked_to_stop)`` and ends by "os._exit", "exit" or not before it is killed."""
        reader, writer = os.pipe()
        self._child = os.fork()
        if self._child:
            os.close(reader)
            self._to_child = writer
            return self._child
        os.close(writer)
        os.set_blocking(reader, False)

        def asked_to_stop() -> bool:
            try:
                return os.read(reader, 1) == b""
            except BlockingIOError:
                return False

        status = 1
        try:
            child(asked_to_stop)
            status = 0
        except BaseException:
            traceback.print_exc()
        if leave == "collect":
            self.__dict__.clear()
            gc.collect()
        sys.stderr.flush()
        os._exit(status)

    def fork_idle(self) -> int:
        """Fork a child that does nothing until it is asked to stop. Its pid."""

        def idle(asked_to_stop: Callable[[], bool]) -> None:
            while not asked_to_stop():
                time.sleep(0.005)

        return self._fork(idle, leave="os._exit")

    def end_child(self) -> None:
        """End the forked child, and insist that all was well there."""
        os.close(self._to_child)
        _, status = os.waitpid(self._child, 0)
        assert status == 0, f"the forked child ended with status {status}"


class SubscriberRole(Role):
    """A subscriber: "asyncio", "uvloop" or "blocking". It keeps what it adopts in place until it is told otherwise."""

    def __init__(self, flavour: str, endpoint: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.held: dict[tuple[int, int], Any] = {}  #: tensors by seed and version
        self.snapshot: Any = None
        self.checked = 0
        self._runner: asyncio.Runner | None = None
        self.sub: Any
        if flavour == "blocking":
            self.sub = blocking.Subscriber(endpoint, **options)
            self.sub.__enter__()
        else:
            self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop if flavour == "uvloop" else None)
            self.sub = busync.Subscriber(endpoint, **options)
            self._run(self.sub.__aenter__())

    def _run(self, result: Any) -> Any:
        """The result of a call of either kind of subscriber."""
        if self._runner is None:
            return result

        async def wait() -> Any:
            return await result

        return self._runner.run(wait())

    def stop(self) -> None:
        self.snapshot = None
        self.held.clear()
        self._run(self.sub.close())
        if self._runner is not None:
            self._runner.close()
        del self.sub, self._runner

    # Steps

    def next(self, timeout: float = 10.0) -> Seen:
        return self._seen(self._run(self.sub.next(timeout)))

    def latest(self, timeout: float = 10.0) -> Seen:
        return self._seen(self._run(self.sub.latest(timeout)))

    def wait_version(self, version: int, timeout: float = 10.0) -> Seen:
        return self._seen(self._run(self.sub.wait_version(version, timeout)))

    def poll(self) -> Seen | None:
        async def poll() -> Any:
            return self.sub.poll()

        snapshot = self._runner.run(poll()) if self._runner is not None else self.sub.poll()
        return None if snapshot is None else self._seen(snapshot)

    def _seen(self, snapshot: Any) -> Seen:
        self.snapshot = snapshot
        return snapshot.version, snapshot.label, snapshot.incarnation

    def keep(self) -> int:
        """Take the snapshot's tensors in place; how many elements are right."""
        seed, version = int(self.snapshot.label), self.snapshot.version
        tensors = dict(self.snapshot.tensors)
        self.held[seed, version] = tensors
        return patterns.check(tensors, seed, version)

    def load(self) -> int:
        """Load the snapshot into a module; how many elements are right."""
        module = patterns.Module()
        seed, version = int(self.snapshot.label), self.snapshot.version
        self._run(self.snapshot.load_into(module))
        return patterns.check(module.state_dict(), seed, version)

    def ack(self) -> None:
        self._run(self.snapshot.ack())

    def release(self) -> None:
        self.snapshot.release()
        self.snapshot = None

    def drop(self, *, newest: bool = False) -> None:
        """Let go of every version in place, but for the newest unless that is meant too."""
        for key in sorted(self.held)[: None if newest else -1]:
            del self.held[key]
        if newest:
            self.snapshot = None

    def check(self) -> int:
        """Check every element in place again; how many versions."""
        for (seed, version), tensors in self.held.items():
            self.checked += patterns.check(tensors, seed, version)
        return len(self.held)

    def scribble(self) -> None:
        """Write into every tensor in place, which nobody else may notice."""
        for tensors in self.held.values():
            for tensor in tensors.values():
                patterns.fill(tensor, -1)

    def state(self) -> dict[str, Any]:
        return {"version": self.sub.version, "adopted": self.sub.adopted, "lag": self.sub.lag}

    def connected(self) -> bool:
        async def connected() -> bool:
            await asyncio.sleep(0)
            return bool(self.sub.connected)

        return self._runner.run(connected()) if self._runner is not None else bool(self.sub.connected)

    # Forks

    def fork_reader(self, leave: str = "os._exit") -> int:
        """Fork a child that checks all elements in place over and over until it is asked to stop. Its pid."""

        def read(asked_to_stop: Callable[[], bool]) -> None:
            assert self.held, "nothing to read"
            try:
                asked = self.sub.next(0.0)
                if self._runner is not None:
                    asked.send(None)  # by hand: uvloop shares its io_uring with the parent, and cannot run here
            except ForkedError:
                pass
            else:
                raise AssertionError("the child could use its parent's subscriber")
            rounds = 0
            while not asked_to_stop() or not rounds:
                self.check()
                rounds += 1

        return self._fork(read, leave=leave)

    # Under fire

    def run_for(self, seconds: float, seed: int) -> dict[str, int]:
        """Adopt, check, hold, drop and load at random until the time is over; counts of what was seen."""
        rng = random.Random(seed)
        counts = {"versions": 0, "elements": 0, "incarnations": 0, "timeouts": 0}
        last: tuple[int, int] | None = None
        stop_at = time.monotonic() + seconds
        while time.monotonic() < stop_at:
            try:
                version, _, incarnation = self.next(rng.uniform(0.0, 0.3))
            except busync.WaitTimeout:
                counts["timeouts"] += 1
                self.check()
                continue
            if last is None or incarnation != last[0]:
                counts["incarnations"] += 1
            else:
                assert version > last[1], f"version {version} after {last[1]}"
            last = incarnation, version
            if rng.random() < 0.3:
                counts["elements"] += self.load()
            else:
                counts["elements"] += self.keep()
            self.snapshot = None
            counts["versions"] += 1
            self.check()
            self.drop(newest=rng.random() < 0.3)
        counts["elements"] += self.checked
        return counts


class PublisherRole(Role):
    """A publisher. Its labels tell its seed, which is made from its incarnation unless given."""

    def __init__(self, endpoint: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.pub = blocking.Publisher(endpoint, **options)
        self.pub.__enter__()
        self.seed = self.pub.incarnation % 1_000_000
        self.version = 0
        self._forever: threading.Thread | None = None
        self._enough = threading.Event()
        self._error = ""

    def stop(self) -> None:
        self.rest()
        self.pub.close()
        del self.pub

    def incarnation(self) -> int:
        return self.pub.incarnation

    def publish(self, wait: Any = "none", timeout: float = 10.0) -> dict[str, Any]:
        """Publish the next version, and then spoil the source: readers may not notice."""
        state = patterns.state(self.seed, self.version + 1)
        report = self.pub.publish(state, label=str(self.seed), wait=wait, timeout=timeout)
        for tensor in state.values():
            patterns.fill(tensor, -2)
        self.version += 1
        assert report.version == self.version
        return {"version": report.version, "acked": report.acked, "pending": report.pending, "gone": report.gone}

    def subscribers(self) -> list[str]:
        return [s["name"] for s in self.pub.status()["subscribers"] if s["state"] != "joining"]

    def status(self) -> dict[str, Any]:
        return self.pub.status()

    def publish_forever(self, interval: float) -> None:
        """Publish from a thread until told to rest."""

        def run() -> None:
            try:
                while not self._enough.wait(interval):
                    self.publish()
            except BusyncError as error:
                self._error = repr(error)

        self._enough.clear()
        self._forever = threading.Thread(target=run, name="learner")
        self._forever.start()

    def rest(self) -> int:
        """Stop publishing; how many versions there are."""
        if self._forever is not None:
            self._enough.set()
            self._forever.join()
            self._forever = None
        assert not self._error, self._error
        return self.version

    def fork_child(self, leave: str = "os._exit") -> int:
        """Fork a child that tries the publisher and then waits until it is asked to stop. Its pid."""

        def use(asked_to_stop: Callable[[], bool]) -> None:
            for call in (self.pub.status, lambda: self.pub.publish({"w": torch.zeros(3)})):
                try:
                    call()
                except ForkedError:
                    pass
                else:
                    raise AssertionError("the child could use its parent's publisher")
            self.pub.close()  # says nothing, does nothing
            while not asked_to_stop():
                time.sleep(0.005)

        return self._fork(use, leave=leave)


def wait_until(condition: Callable[[], bool], timeout: float = 10.0, what: str = "it") -> None:
    """Wait for something in another process; plain code."""
    stop_at = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < stop_at, f"{what} did not happen within {timeout} s"
        time.sleep(0.005)


async def soon(condition: Callable[[], bool], timeout: float = 10.0, what: str = "it") -> None:
    """Wait for something; asyncio code."""
    stop_at = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < stop_at, f"{what} did not happen within {timeout} s"
        await asyncio.sleep(0.005)
