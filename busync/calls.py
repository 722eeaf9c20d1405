"""Work on other threads, and calls into a thread that runs an event loop, without losing hold of either."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from busync.errors import ClosedError

T = TypeVar("T")


class Call(Generic[T]):
    """A coroutine running on the loop of another thread.

    Whoever waits for it waits to its very end, even when cancelled or interrupted: until then the other side may still
    be reading the caller's tensors.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], what: str) -> None:
        self._loop = loop
        self._what = what
        self._task: asyncio.Task[None] | None = None
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            loop.call_soon_threadsafe(self._start, coroutine)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            self._future.set_exception(ClosedError(what))

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(self._run(coroutine))

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> None:
        try:
            result = await coroutine
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

        if not self._future.done():
            self._loop.call_soon_threadsafe(cancel)

    async def wait(self) -> T:
        """The result, for a coroutine. Cancelling cancels the call and waits for its end."""
        wrapped = asyncio.wrap_future(self._future)
        cancelled = False
        while not wrapped.done():
            try:
                await asyncio.wait([wrapped])
            except asyncio.CancelledError:
                cancelled = True
                self._cancel()
        if cancelled:
            wrapped.exception()
            raise asyncio.CancelledError
        return wrapped.result()

    def block(self) -> T:
        """The result, for plain code. An interrupt (Ctrl-C) cancels the call and waits for its end."""
        try:
            return self._future.result()
        except KeyboardInterrupt:
            self._cancel()
            concurrent.futures.wait([self._future])
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
    future.result()
    return cancelled
