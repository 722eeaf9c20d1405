"""The process that an export was made for, and whether it has certainly ended."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Reader:
    """A process that reads, told apart from a later one with the same number."""

    pid: int
    started: int  #: clock ticks after boot; UNKNOWN: it cannot be looked at
    name: str = field(default="", compare=False)  #: for people
    session: int = 0  #: which of its sessions, for ``CudaExporter.end``

    @classmethod
    def of(cls, pid: int, name: str = "", session: int = 0) -> Reader:
        """The process that has this number now."""
        state = _state(pid)
        return cls(pid, UNKNOWN if state is None else state[1], name, session)

    @property
    def gone(self) -> bool:
        """Whether the process has certainly ended, and with it everything that it had open.

        A process of another PID namespace (its number reads 0 here), or one that may not be looked at, is not gone
        while there may be one: to count down for the living would give memory away under them.
        """
        state = _state(self.pid)
        if state is None or self.started == UNKNOWN:
            try:
                os.kill(self.pid, 0)  # no signal: asks whether there is one
            except ProcessLookupError:
                return True
            except PermissionError:
                pass
            return False
        return state[0] or state[1] != self.started

    def __str__(self) -> str:
        return f"{self.name or 'a reader'} (pid {self.pid})"


def _state(pid: int) -> tuple[bool, int] | None:
    """Whether a process is but waited for, and when it started; None if that cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    threads = int(fields[17])  # a leader may end before its other threads
    return fields[0] in (b"Z", b"X") and threads <= 1, int(fields[19])
