"""Work on other threads, and calls into a thread that runs an event loop, without losing hold of either."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from busync.errors import ClosedError

T = TypeVar("T")


class Outcome(Generic[T]):
    """What another thread brings, once: a result or an error. One caller waits for it.

    A Future of the standard library may not be waited for where Ctrl-C can strike: it takes a lock in Python code, and
    an exception between taking it and entering the block leaves it taken. Whoever brings the result then hangs. Here
    is one raw lock, which only the waiting side ever takes.
    """

    def __init__(self) -> None:
        self.done = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._open = threading.Lock()
        self._open.acquire()
        self._wake: Callable[[], object] | None = None  #: the coroutine that waits

    def set_result(self, result: T) -> None:
        """Bring the result."""
        self._result = result
        self._over()

    def set_exception(self, error: BaseException) -> None:
        """Bring an error."""
        self._error = error
        self._over()

    def _over(self) -> None:
        self.done = True
        with suppress(RuntimeError):  # it is open already
            self._open.release()
        if self._wake is not None:
            self._wake()

    @property
    def failed(self) -> bool:
        """Whether an error was brought."""
        return self._error is not None

    def result(self) -> T:
        """The result, once it is there; raises the error."""
        assert self.done, "asked for too early"
        try:
            if self._error is not None:
                raise self._error
            return cast(T, self._result)
        finally:
            del self  # an error refers to this frame

    def block(self, timeout: float = -1) -> None:
        """Wait until it is there, for ``timeout`` seconds at most. May be interrupted, and called again."""
        if not self.done:
            self._open.acquire(timeout=timeout)

    async def wait(self) -> None:
        """Wait until it is there. May be cancelled, and called again."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(arrived.set)

        self._wake = wake
        if not self.done:  # looked at after the word was left, as the other side looks for it after it was done
            await arrived.wait()


class Call(Generic[T]):
    """A coroutine to run on the loop of another thread: made there by ``start``, or ended unrun by ``refuse``.

    It is handed over by whoever waits for it, and not before: so an interruption (Ctrl-C) at any moment finds it
    either not begun or waited for. Whoever waits for it waits to its very end, even when cancelled or interrupted:
    until then the other side may still be reading the caller's tensors.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], what: str,
        hand_over: Callable[[Call[Any]], None],
    ) -> None:  # fmt: skip
        self._loop = loop
        self._coroutine = coroutine
        self._what = what
        self._hand_over = hand_over  #: may be called again: only the first ``start`` or ``refuse`` counts
        self._task: asyncio.Task[None] | None = None
        self._outcome: Outcome[T] = Outcome()

    def start(self) -> None:
        """Run it. On the loop's thread."""
        if self._task is None and not self._outcome.done:
            self._task = self._loop.create_task(self._run())
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.refuse()  # if it was cancelled before its first step, _run never ran

    def refuse(self) -> None:
        """The other side ends: the call fails with ClosedError. On the loop's thread, or when the loop is closed."""
        if not self._outcome.done:
            self._coroutine.close()
            self._outcome.set_exception(ClosedError(self._what))

    async def _run(self) -> None:
        try:
            result = await self._coroutine
        except asyncio.CancelledError:
            self._outcome.set_exception(ClosedError(self._what))
        except BaseException as error:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(result)

    def _cancel(self) -> None:
        def cancel() -> None:
            if self._task is not None:
                self._task.cancel()
            else:  # interrupted before, or while, it was handed over
                self.refuse()

        try:
            self._loop.call_soon_threadsafe(cancel)
        except RuntimeError:  # the loop is closed: the call has ended, or never begins
            self.refuse()

    def result_of_cancelled(self) -> T | None:
        """What a call came to that ended before its cancellation reached it, for whoever must give it back."""
        return None if self._outcome.failed else self._outcome.result()

    async def wait(self, *, cancel: bool = True) -> T:
        """The result, for a coroutine. Cancelling cancels the call (if ``cancel``) and waits for its end."""
        self._hand_over(self)
        cancelled = False
        while not self._outcome.done:
            try:
                await self._outcome.wait()
            except asyncio.CancelledError:
                cancelled = True
                if cancel:
                    self._cancel()
        if cancelled:
            raise asyncio.CancelledError
        return self._outcome.result()

    def block(self, *, cancel: bool = True) -> T:
        """As ``wait``, for plain code, and what a signal handler raises (Ctrl-C) for a cancellation."""
        try:
            self._hand_over(self)
            self._outcome.block()
        except BaseException:
            if cancel:
                self._cancel()
            else:
                self._hand_over(self)
            self._outcome.block()
            raise
        return self._outcome.result()


def start_job(
    loop: asyncio.AbstractEventLoop, executor: concurrent.futures.Executor, job: Callable[[], T]
) -> asyncio.Future[T]:
    """Run a job, which may call the user's code, on a thread. It may raise anything.

    StopIteration becomes RuntimeError, as in a coroutine: an asyncio future cannot carry it, and would never be done.

    Raises:
        ClosedError: the interpreter ends, and threads take no work any more.
    """

    def run() -> T:
        try:
            return job()
        except StopIteration as error:
            raise RuntimeError("StopIteration where nothing iterates") from error

    try:
        return loop.run_in_executor(executor, run)
    except RuntimeError as error:
        if "after" in str(error):  # "cannot schedule new futures after (interpreter) shutdown"
            raise ClosedError("interpreter") from error
        raise


async def settle(future: asyncio.Future[Any]) -> bool:
    """Wait for the end of what must not be left half done; says whether the caller was cancelled meanwhile."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


async def outlast(outcome: Outcome[T]) -> bool:
    """As ``finish``, of what another thread brings."""
    cancelled = False
    while not outcome.done:
        try:
            await outcome.wait()
        except asyncio.CancelledError:
            cancelled = True
    outcome.result()
    return cancelled


async def finish(future: asyncio.Future[Any]) -> bool:
    """As ``settle``, and raises what the work raised."""
    cancelled = await settle(future)
    try:
        future.result()
    finally:
        del future  # an exception refers to this frame: together they would keep a lease until the next collection
    return cancelled
