"""Ctrl-C kept out of what must not be left half done, in plain code that waits without an event loop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

#: What the functions of ``signal`` wrap. Their enumerations would take 8 us of the 150 of a small version.
_getsignal: Callable[[int], Any] = signal._signal.getsignal  # type: ignore[attr-defined]
_signal: Callable[[int, Any], Any] = signal._signal.signal  # type: ignore[attr-defined]
_SIGINT = int(signal.SIGINT)
_main = threading.main_thread().ident


class CtrlC:
    """A block in which Ctrl-C strikes only inside ``wait``, or else at the end of the block.

    Does nothing where Ctrl-C does not raise KeyboardInterrupt: outside of the main thread, or when the program has a
    handler of its own.
    """

    __slots__ = ("_deferred", "_struck", "_waiting")

    def __enter__(self) -> Self:
        self._struck = self._waiting = False
        self._deferred = threading.get_ident() == _main and (
            (handler := _getsignal(_SIGINT)) is signal.default_int_handler or _is_ours(handler)
        )
        if self._deferred:
            _signal(_SIGINT, self._strike)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._deferred:
            _signal(_SIGINT, signal.default_int_handler)
            if self._struck and kind is not KeyboardInterrupt:
                raise KeyboardInterrupt from None

    def _strike(self, number: int, frame: FrameType | None) -> None:
        self._struck = True
        if self._waiting:
            self._waiting = False  # once: what is left of the block tidies up
            raise KeyboardInterrupt

    def wait(self, pause: Callable[[float | None], object], seconds: float | None) -> None:
        """Call ``pause``, which waits so many seconds, takes nothing in and may be interrupted.

        Raises:
            KeyboardInterrupt: Ctrl-C came before or meanwhile.
        """
        try:
            self._waiting = True
            if self._struck:
                raise KeyboardInterrupt
            pause(seconds)
        finally:
            self._waiting = False


def _is_ours(handler: object) -> bool:
    """Of a block that is over, if it is found where none is open: a handler of the program's own raised at its end."""
    return isinstance(getattr(handler, "__self__", None), CtrlC)


def _after_in_child() -> None:
    """Another thread has forked while the main one was inside a block, which the child does not have."""
    global _main
    _main = threading.get_ident()  # of the only thread there is
    if _is_ours(_getsignal(_SIGINT)):
        _signal(_SIGINT, signal.default_int_handler)


os.register_at_fork(after_in_child=_after_in_child)
