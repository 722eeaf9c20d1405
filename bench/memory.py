"""What a system's processes take beyond their idle size, with every reader holding the newest version."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.one import Effort, Play, playing
from bench.systems.base import Cell, System, SystemFailed

ROUNDS: Final = Effort(most=3, least=3, seconds=0.0)  #: so many that a pool has what it wants


@dataclass(frozen=True, slots=True)
class Size:
    """A process's memory, in bytes."""

    pss: int  #: its own, and its part of what it shares
    dirty: int  #: its own, written
    tables: int  #: page tables, which count nowhere else

    @classmethod
    def of(cls, pid: int) -> Size:
        """As the kernel has it now."""
        rollup, status = _fields(f"/proc/{pid}/smaps_rollup"), _fields(f"/proc/{pid}/status")
        return cls(rollup["Pss"], rollup["Private_Dirty"], status["VmPTE"])

    def __sub__(self, other: Size) -> Size:
        return Size(self.pss - other.pss, self.dirty - other.dirty, self.tables - other.tables)


def _fields(path: str) -> dict[str, int]:
    """Those of a file of /proc that are a number of kB, in bytes."""
    found = {}
    for line in Path(path).read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            found[name] = int(rest.split()[0]) * 1024
    return found


def measure_memory(system: System, cell: Cell) -> dict[str, Any]:
    """Sizes beyond idle (attached, before the first version), in bytes. Never raises for what the system cannot do.

    Every reader has read every byte of the version it holds. ``pss`` is that of all processes together, ``learner``,
    ``readers`` and ``reader`` (the median one) that of each; ``dirty`` and ``tables`` are the median reader's.
    """
    try:
        with playing(system, cell, ROUNDS) as play:
            idle = _sizes(play)
            kept = play.rounds().kept
            learner, *readers = [now - before for now, before in zip(_sizes(play), idle, strict=True)]
    except SystemFailed as error:
        return {"failed": str(error)}
    return {
        "failed": "",
        "kept": kept,
        "idle": sum(size.pss for size in idle),
        "pss": learner.pss + sum(size.pss for size in readers),
        "learner": learner.pss,
        "readers": [size.pss for size in readers],
        "reader": int(median(size.pss for size in readers)),
        "dirty": int(median(size.dirty for size in readers)),
        "tables": int(median(size.tables for size in readers)),
    }


def allowed_bytes(cell: Cell, kept: int) -> float:
    """What all processes together may take: the pool, and for each 2 MB, 1 KB per view, 0.2 % of what it maps.

    One version counts as mapped, though processes may map more.
    """
    each = 2e6 + 1e3 * cell.kind.tensors + 0.002 * cell.kind.nbytes
    return kept + (cell.readers + 1) * each


def _sizes(play: Play) -> list[Size]:
    """Of the learner and the readers."""
    pids = [process.pid for process in (play.learner, *play.readers)]
    return [Size.of(pid) for pid in pids if pid is not None]
