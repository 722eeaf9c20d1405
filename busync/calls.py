"""Work on other threads, and calls into a thread that runs an event loop, without losing hold of either."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from busync.errors import ClosedError

T = TypeVar("T")


class Call(Generic[T]):
    """A coroutine to run on the loop of another thread: made there by ``start``, or ended unrun by ``refuse``.

    Whoever waits for it waits to its very end, even when cancelled or interrupted: until then the other side may still
    be reading the caller's tensors.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], what: str) -> None:
        self._loop = loop
        self._coroutine = coroutine
        self._what = what
        self._task: asyncio.Task[None] | None = None
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def start(self) -> None:
        """Run it. On the loop's thread."""
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self._future.done():  # cancelled before its first step: _run never ran
            self.refuse()

    def refuse(self) -> None:
        """The other side ends: the call fails with ClosedError. On the loop's thread, or when the loop is closed."""
        self._coroutine.close()
        self._future.set_exception(ClosedError(self._what))

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

        with suppress(RuntimeError):  # the loop is closed: the call has ended, or is about to be refused
            self._loop.call_soon_threadsafe(cancel)

    def result_of_cancelled(self) -> T | None:
        """What a call came to that ended before its cancellation reached it, for whoever must give it back."""
        failed = self._future.cancelled() or self._future.exception() is not None
        return None if failed else self._future.result()

    async def wait(self, *, cancel: bool = True) -> T:
        """The result, for a coroutine. Cancelling cancels the call (if ``cancel``) and waits for its end."""
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
            concurrent.futures.wait([self._future])
        except BaseException:
            if cancel:
                self._cancel()
            concurrent.futures.wait([self._future])
            raise
        return self._future.result()


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
    future.result()
    return cancelled
