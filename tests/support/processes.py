"""Child processes that a test scripts step by step: ``Actor``. They come from a forkserver that has torch loaded."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import Any

PRELOAD = ["pytest", "torch", "busync.publisher", "busync.subscriber", "busync.blocking", "tests.support.roles"]
DEVICE = "BUSYNC_TEST_DEVICE"  #: the variable that names where ``patterns`` puts states
INHERITED = (
    "BUSYNC_RUNTIME_DIR",
    DEVICE,
    "CUDA_VISIBLE_DEVICES",
)  #: the forkserver's environment is older than a test's
STEP_TIMEOUT = 20.0  #: seconds that a step may take unless the test says otherwise
STARTED: set[int] = set()  #: pids of all children
KILLED: set[int] = set()  #: pids of children that did not end by themselves
_TROUBLE = re.compile(r"Traceback|Warning|Error|Exception|Fatal|Executing|Assertion", re.IGNORECASE)


@contextmanager
def forkserver() -> Iterator[ForkServerContext]:
    """A forkserver with everything loaded. Its end is the end of the block."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    _forkserver.ensure_running()
    first = context.Process(target=_nothing)  # the first fork waits until everything is loaded
    first.start()
    first.join(60)
    first.close()
    try:
        yield context
    finally:
        _forkserver._stop()  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def _nothing() -> None:
    return


class ChildError(AssertionError):
    """Something went wrong in a child."""


class Actor:
    """One child. ``start`` a step and ``finish`` it, or ``call`` for both; then ``stop`` or ``kill``."""

    def __init__(self, context: ForkServerContext, log: Path, role: str | type, *args: Any) -> None:
        self.log = log
        self._pipe, theirs = context.Pipe()
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        self.process = context.Process(target=_serve, args=(theirs, str(log), environment, role, args))
        self.process.start()
        STARTED.add(self.pid)
        theirs.close()
        self._busy, self._step = True, "make"
        self._over = False
        self.forked: list[int] = []  #: pids of its own children; they end with it unless a test takes them out

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start(self, step: str, *args: Any, **named: Any) -> None:
        """Start a step; ``finish`` it before the next."""
        assert not self._busy, "the last step is not finished"
        self._busy, self._step = True, step
        self._pipe.send((step, args, named))

    def finish(self, timeout: float = STEP_TIMEOUT) -> Any:
        """The answer of the step that was started.

        Raises: what the step raised.
            ChildError: the child is dead or stuck.
        """
        assert self._busy, "no step was started"
        if not self._pipe.poll(timeout):
            os.kill(self.pid, signal.SIGUSR1)  # every thread's stack goes into the log
            time.sleep(0.2)
            self.kill()
            raise ChildError(f"the child is stuck:\n{self._said()}")
        try:
            kind, answer, trace = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            raise ChildError(f"the child ended with {self.process.exitcode}:\n{self._said()}") from None
        self._busy = False
        if self._step.startswith("fork_") and kind == "ok":
            self.forked.append(answer)
        if kind == "error":
            answer.add_note(trace)
            raise answer
        return answer

    def call(self, step: str, *args: Any, timeout: float = STEP_TIMEOUT, **named: Any) -> Any:
        """One step."""
        self.start(step, *args, **named)
        return self.finish(timeout)

    def stop(self, *, timeout: float = STEP_TIMEOUT) -> None:
        """End the child in good order: it leaks nothing, exits with 0, and has said nothing on stderr."""
        if self._over:
            return
        try:
            if self._busy:
                self.finish(timeout)
            self.call("stop", timeout=timeout)
            self.process.join(timeout)
            code = self.process.exitcode
        finally:
            self.kill()
        said = self._said()
        assert code == 0, f"the child ended with {code}:\n{said}"
        assert not _TROUBLE.search(said), f"the child said:\n{said}"

    def kill(self) -> None:
        """SIGKILL. What it had said on stderr until then is checked, too. May be called again."""
        if self._over:
            return
        self._over = True
        self._pipe.close()
        pid = self.pid
        if self.process.exitcode is None:
            KILLED.add(pid)
        self.process.kill()
        # Not join(): it waits for a pipe that forked children of the child have, too.
        stop_at = time.monotonic() + STEP_TIMEOUT
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < stop_at:
            time.sleep(0.002)
        assert not os.path.exists(f"/proc/{pid}"), "the child survived SIGKILL"
        self.process.join(5)
        if self.process.exitcode is not None:
            self.process.close()
        for forked in self.forked:
            with suppress(ProcessLookupError):
                os.kill(forked, signal.SIGKILL)
        said = self._said()
        assert not _TROUBLE.search(said), f"the child said:\n{said}"

    def _said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Cast:
    """The children of one test."""

    def __init__(self, context: ForkServerContext, directory: Path) -> None:
        self._context = context
        self._directory = directory
        self._actors: list[Actor] = []

    def subscriber(self, endpoint: str, flavour: str = "asyncio", **options: Any) -> Actor:
        """A subscriber that is attached."""
        actor = self.begin("SubscriberRole", flavour, endpoint, options)
        actor.finish()
        return actor

    def publisher(self, endpoint: str, **options: Any) -> Actor:
        """A publisher that serves."""
        actor = self.begin("PublisherRole", endpoint, options)
        actor.finish()
        return actor

    def begin(self, role: str | type, *args: Any) -> Actor:
        """A child that is being made; ``finish`` waits for it. ``role``: a Role, or the name of one in ``roles``."""
        actor = Actor(self._context, self._directory / f"child-{len(self._actors)}.log", role, *args)
        self._actors.append(actor)
        return actor

    def end(self, *, failed: bool) -> None:
        """End all of them, in good order if all was well so far."""
        errors: list[BaseException] = []
        for actor in reversed(self._actors):  # subscribers usually came last
            try:
                actor.kill() if failed else actor.stop()
            except BaseException as error:
                errors.append(error)
        self._actors.clear()
        if errors and not failed:
            raise errors[0]


def _serve(
    pipe: Connection[Any, Any], log: str, environment: dict[str, str], role: str | type, args: tuple[Any, ...]
) -> None:
    """The child."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr)
    warnings.simplefilter("error")
    logging.basicConfig(level=logging.ERROR)
    os.environ.update(environment)

    from tests.support import gpu, roles
    from tests.support.loops import LoopWatch
    from tests.support.warm import warm_up

    if os.environ.get(DEVICE) == "cuda":
        gpu.warm_up()
    warm_up()
    make: Any = getattr(roles, role) if isinstance(role, str) else role
    watch = LoopWatch()
    if make.WATCHED:
        watch.install()
    actor: Any = None
    step, positional = "make", args
    named: dict[str, Any] = {}
    while True:
        try:
            if step == "make":
                actor = make(*positional)
                answer = None
            elif step == "stop":
                actor.stop()
                left, slow = actor.left(), watch.take()
                assert not left, f"left behind: {left}"
                assert not slow, f"event loops complain: {slow}"
                answer = None
            else:
                answer = getattr(actor, step)(*positional, **named)
            reply: tuple[str, Any, str] = ("ok", answer, "")
        except BaseException as error:
            reply = ("error", error.with_traceback(None), traceback.format_exc())
            error.__context__ = error.__cause__ = None
        try:
            pipe.send(reply)
            if step == "stop":
                return
            del reply
            step, positional, named = pipe.recv()
        except (EOFError, OSError):  # the test is gone
            os._exit(3)
