"""Work on other threads, and calls into a thread that runs an event loop, without losing hold of either."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from busync.errors import ClosedError

T = TypeVar("T")


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
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def start(self) -> None:
        """Run it. On the loop's thread."""
        if self._task is None and not self._future.done():
            self._task = self._loop.create_task(self._run())
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self._future.done():  # cancelled before its first step: _run never ran
            self.refuse()

    def refuse(self) -> None:
        """The other side ends: the call fails with ClosedError. On the loop's thread, or when the loop is closed."""
        with suppress(concurrent.futures.InvalidStateError):
            self._future.set_exception(ClosedError(self._what))
            self._coroutine.close()

    async def _run(self) -> None:
        try:
            result = await self._coroutine
        except asyncio.CancelledError:
            self._future.set_exception(ClosedError(self._what))
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(result)

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
        failed = self._future.cancelled() or self._future.exception() is not None
        return None if failed else self._future.result()

    async def wait(self, *, cancel: bool = True) -> T:
        """The result, for a coroutine. Cancelling cancels the call (if ``cancel``) and waits for its end."""
        self._hand_over(self)
        wrapped = asyncio.wrap_future(self._future)
        cancelled = False
        while not wrapped.done():
            try:
                await asyncio.wait([wrapped])
            except asyncio.CancelledError:
                cancelled = True
                if cancel:
                    self._cancel()
        if cancelled:
            wrapped.exception()
            raise asyncio.CancelledError
        return wrapped.result()

    def block(self, *, cancel: bool = True) -> T:
        """As ``wait``, for plain code, and what a signal handler raises (Ctrl-C) for a cancellation."""
        try:
            self._hand_over(self)
            concurrent.futures.wait([self._future])
        except BaseException:
            if cancel:
                self._cancel()
            else:
                self._hand_over(self)
            concurrent.futures.wait([self._future])
            raise
        return self._future.result()


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


async def finish(future: asyncio.Future[Any]) -> bool:
    """As ``settle``, and raises what the work raised."""
    cancelled = await settle(future)
    try:
        future.result()
    finally:
        del future  # an exception refers to this frame: together they would keep a lease until the next collection
    return cancelled
