"""A process under fire: it improvises by its own dice, and does to itself what the stage asks for."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import uvloop

from busync.errors import AllocationError, AttachError, EndpointError, FdError, ForkedError, PublisherLost
from tests.faults import points
from tests.faults.page import Page, Slot
from tests.faults.points import Trap
from tests.support.leaks import leftovers, resources

NOBODY = 65534
FEW = 20  #: descriptors with which a publisher admits nobody any more
EXIT_REFUSED = 5  #: the endpoint's directory was broken when a publisher wanted it
OPS = (
    "start", "open", "close", "publish", "publish all", "loan", "wait", "status", "adopt", "poll", "look again",
    "check", "let go", "reopen", "fork", "join forked", "starve", "reserve", "cancel", "interrupt", "final", "settle",
    "stop", "exit", "rude",
)  # fmt: skip
#: What a process whose descriptors are exhausted may be told.
STARVED = (FdError, AllocationError, AttachError, PublisherLost)
_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


@dataclass(frozen=True, slots=True)
class Part:
    """What a child is."""

    name: str
    side: str  #: "publisher" or "subscriber"
    kind: str  #: "writer", "reader", "bus" or "door"
    endpoint: str
    topics: tuple[str, ...]
    flavour: str
    options: dict[str, Any]
    dice: int
    trap: Trap | None
    unprivileged: bool
    log: str


class Child:
    """One process. ``improvise`` and the commands of the stage take turns."""

    def __init__(self, part: Part, page: Page, pipe: socket.socket) -> None:
        self.part, self.page, self._pipe = part, page, pipe
        self.rng = random.Random(part.dice)
        self.forked: list[int] = []
        self._resting = False
        self._before = resources()
        self.runner: asyncio.Runner | None = None
        if part.flavour != "blocking":
            self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop if part.flavour == "uvloop" else None)
        if part.trap is not None:
            points.spring(part.trap, part.side, page, self.forked)

    # What subclasses are

    def open(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def improvise(self) -> tuple[str, Callable[[], object]]:
        """The next operation, by dice."""
        raise NotImplementedError

    def obey(self, do: str, command: dict[str, Any]) -> Any:
        """A command that only this kind of child knows."""
        raise NotImplementedError

    def in_fork(self) -> None:
        """What a forked child does."""
        raise NotImplementedError

    def starving(self) -> None:
        """What to try without descriptors."""
        raise NotImplementedError

    def work(self) -> None:
        """Leave work in flight, for an exit."""
        raise NotImplementedError

    # The loop

    def live(self) -> NoReturn:
        self.op("open", self.open)
        while True:
            command = self.receive()
            if command is not None:
                answer = self._command(command)
                if answer is not None:
                    self._pipe.send(json.dumps(answer).encode())
            else:
                name, operation = self.improvise()
                self.op(name, operation)
                self.reap()

    def op(self, name: str, operation: Callable[[], object]) -> Any:
        """Run one operation; the page tells the stage which, and since when."""
        self.page[Slot.OP] = OPS.index(name)
        stops = self.page[Slot.STOPS]
        begun = self.page[Slot.SINCE] = time.monotonic_ns()
        try:
            return operation()
        finally:
            took = time.monotonic_ns() - begun
            if stops == self.page[Slot.STOPS] and self.page.most(Slot.SLOWEST_OP, took):
                self.page[Slot.SLOWEST_OP_NAME] = OPS.index(name)
            self.page[Slot.SINCE] = 0

    def receive(self) -> dict[str, Any] | None:
        """The next command; while it rests, the child waits for it."""
        try:
            data = self._pipe.recv(4096, 0 if self._resting and not self.page[Slot.SINCE] else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        if not data:
            os._exit(3)  # the stage is gone
        command: dict[str, Any] = json.loads(data)
        return command

    def _command(self, command: dict[str, Any]) -> Any:
        do = command["do"]
        if "seed" in command:
            self.rng.seed(command["seed"])
        match do:
            case "rest":
                self._resting = True
                self.op("join forked", lambda: self.reap(wait=True))
                return {"resting": True}
            case "fork":
                return self.op("fork", self.fork)
            case "starve":
                return self.op("starve", self.starve)
            case "exit":
                self.op("exit", lambda: self.leave(command["detail"]))
                raise AssertionError("still here")
            case "stop":
                answer = self.op("stop", self.stop)
                self._pipe.send(json.dumps(answer).encode())
                ctypes.pythonapi.Py_Exit(0)
                return None
            case _:
                return self.obey(do, command)

    def stop(self) -> dict[str, Any]:
        """End in good order; what was left behind."""
        self.reap(wait=True)
        self.close()
        if self.runner is not None:
            self.runner.close()
        return {"left": leftovers(self._before)}

    def run(self, result: Any) -> Any:
        """The result of a call of either flavour."""
        if self.runner is None:
            return result

        async def wait() -> Any:
            return await result

        return self.runner.run(wait())

    # Faults

    def fork(self) -> None:
        """Fork now, or from another thread while this one goes on."""
        self.page.fault(f"{self.part.side}: fork")
        if self.rng.random() < 0.5:
            self._fork()
            return
        delay = self.rng.uniform(0, 0.003)

        def fork() -> None:
            time.sleep(delay)
            self._fork()

        thread = threading.Thread(target=fork)
        thread.start()
        stop_at = time.monotonic() + 5
        while thread.is_alive() and time.monotonic() < stop_at:
            self.improvise()[1]()
        thread.join(5)
        assert not thread.is_alive(), "a fork did not come back"

    def _fork(self) -> None:
        linger, collect = self.rng.choice([0.0, 0.01, 0.15]), self.rng.random() < 0.5
        pid = os.fork()
        if pid:
            self.forked.append(pid)
            return
        status = 1
        try:
            stop_at = time.monotonic() + linger
            self.in_fork()
            while time.monotonic() < stop_at:
                self.in_fork()
            if collect:
                # Not the caller's own loop: asyncio closes what it collects, in the parent's epoll as well.
                runner = self.runner
                self.__dict__.clear()
                gc.collect()
                assert runner is None or runner.get_loop() is not None
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)

    def reap(self, *, wait: bool = False) -> None:
        """Collect forked children, all of which must have ended well."""
        stop_at = time.monotonic() + 8
        while self.forked:
            for pid in list(self.forked):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.forked.remove(pid)
                    assert status == 0, f"a forked child ended with status {status}"
            if not wait or not self.forked:
                return
            assert time.monotonic() < stop_at, "a forked child is stuck"
            time.sleep(0.002)

    def starve(self) -> None:
        """Lower the limit on descriptors to what is open, go on, and raise it again."""
        with self.few_descriptors() as fewer:
            if not self.before_starving():
                return
            self.page.fault(f"{self.part.side}: descriptors exhausted")
            # uvloop takes two for itself at every run; a reader that looks at its page tables one for good.
            fewer(3 if self.part.flavour == "uvloop" else 0)
            self.starving()

    def before_starving(self) -> bool:
        """Whether the process can bear to have no descriptor at all; few are left already."""
        return True

    @contextlib.contextmanager
    def few_descriptors(self) -> Iterator[Callable[[int], None]]:
        """What it gives leaves so many descriptors more than are open; few from the start."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

        def leave(spare: int) -> None:
            limit = len(os.listdir("/proc/self/fd")) - 1 + spare
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, limit), hard))

        try:
            leave(FEW)
            yield leave
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def cancelled(self, call: Coroutine[Any, Any, Any], delay: float) -> tuple[str, Any]:
        """Cancel a call after a while: ("cancelled" | "done" | "failed", its result or error)."""
        assert self.runner is not None, "plain code has nothing to cancel"
        self.page.fault(f"{self.part.side}: await cancelled")

        async def cancel() -> tuple[str, Any]:
            task = asyncio.get_running_loop().create_task(call)
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                return "cancelled", None
            error = task.exception()
            return ("failed", error) if error is not None else ("done", task.result())

        return self.runner.run(cancel())

    def interrupted(self, call: Callable[[], Any], delay: float) -> tuple[str, Any]:
        """Interrupt a call of plain code, as Ctrl-C does: what became of it, as ``cancelled`` says it."""
        self.page.fault(f"{self.part.side}: call interrupted by a signal")
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            try:
                return "done", call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            return "cancelled", None
        except Exception as error:
            return "failed", error
        finally:
            signal.signal(signal.SIGALRM, lambda *_: None)  # Python complains of a late signal that is ignored
            signal.signal(signal.SIGINT, lambda *_: None)

    def leave(self, how: str) -> None:
        """Exit with everything open."""
        self.page.fault(f"{self.part.side}: exit")
        if how == "SIGTERM":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "os._exit":
            os._exit(0)
        if how == "end in a step":
            self.work()
        sys.stdout.flush()
        ctypes.pythonapi.Py_Exit(0)  # as at the end of a program: exit hooks, finalizers, modules

    def faulty_since(self, begun: int) -> bool:
        """Whether the endpoint's directory was out of order at some moment since then."""
        faulty = self.page[Slot.FAULTY]
        return faulty < 0 or faulty > begun


def only_forked(call: Callable[[], object]) -> None:
    """A call that a forked child may not make.

    Raises:
        AssertionError: it could.
    """
    try:
        call()
    except ForkedError:
        return
    raise AssertionError("a forked child could use what is its parent's")


def main(make: type[Child], part: Part, page: Page, pipe: socket.socket) -> NoReturn:
    """The life of a child, right after the fork."""
    try:
        fd = os.open(part.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, 2)
        os.close(fd)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        if part.unprivileged:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # or /proc/self belongs to somebody else
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        faulthandler.enable(sys.stderr)
        faulthandler.register(signal.SIGUSR1, sys.stderr)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        warnings.simplefilter("error")
        if part.flavour == "blocking":  # Ctrl-C may strike between the making of a coroutine and its first step
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        logging.basicConfig(level=logging.ERROR)
        child = make(part, page, pipe)
        child.live()
    except SystemExit as ended:
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    except EndpointError as error:
        if part.side == "publisher" and page[Slot.OP] == OPS.index("open") and page[Slot.FAULTY]:
            os._exit(EXIT_REFUSED)
        traceback.print_exception(error)
        os._exit(9)
    except BaseException:
        traceback.print_exc()
        os._exit(9)
