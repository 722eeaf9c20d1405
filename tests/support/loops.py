"""Finds callbacks that hold an event loop for too long, on every loop of the process, and what asyncio complains of.

Loops run in debug mode, which also refuses calls from the wrong thread. A callback is judged by the time that it took
less the time that threads of this process waited for a CPU: a busy machine must not fail a test.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from typing import Any

LIMIT = 0.1  #: seconds that a callback may hold a loop
BEAT = 0.025  #: seconds between looks at the time spent waiting for a CPU


def _waited_for_cpu() -> float:
    """Seconds that all threads of this process have waited for a CPU since they began."""
    total = 0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/schedstat", "rb") as stat:
                total += int(stat.read().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total / 1e9


class LoopWatch(logging.Handler):
    """Watches all loops of this process once installed; ``complaints`` collects what is wrong."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.complaints: list[str] = []
        self._waited: dict[int, float] = {}  #: by thread, at its last beat
        self._watched: set[type] = set()

    def install(self) -> None:
        """Watch every kind of loop that is loaded by now. May be called again."""
        if not self._watched:
            logging.getLogger("asyncio").addHandler(self)
        self._watch(asyncio.BaseEventLoop)
        if "uvloop" in sys.modules:
            self._watch(sys.modules["uvloop"].Loop)

    def take(self) -> list[str]:
        """The complaints since the last call."""
        taken, self.complaints = self.complaints, []
        return taken

    def emit(self, record: logging.LogRecord) -> None:
        """A record of the logger "asyncio"."""
        if not str(record.msg).startswith("Executing"):
            self.complaints.append(record.getMessage())
            return
        took = float(record.args[1]) if isinstance(record.args, tuple) else LIMIT  # type: ignore[arg-type]
        began = self._waited.get(threading.get_ident())
        held = took - max(0.0, _waited_for_cpu() - began) if began is not None else took
        if held >= LIMIT:
            self.complaints.append(f"{record.getMessage()}, of which {held:.3f} s were not spent waiting for a CPU")

    def _watch(self, kind: type) -> None:
        if kind in self._watched:
            return
        self._watched.add(kind)
        original: Any = kind.run_forever  # type: ignore[attr-defined]

        def run_forever(loop: asyncio.AbstractEventLoop) -> None:
            loop.set_debug(True)
            loop.slow_callback_duration = LIMIT
            thread = threading.get_ident()
            timer: asyncio.TimerHandle | None = None

            def beat() -> None:
                nonlocal timer
                self._waited[thread] = _waited_for_cpu()
                timer = loop.call_later(BEAT, beat)

            beat()
            try:
                original(loop)
            finally:
                if timer is not None:
                    timer.cancel()
                self._waited.pop(thread, None)

        kind.run_forever = run_forever  # type: ignore[attr-defined]
