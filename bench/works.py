"""Results as objects: cells, what each system did at them, and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from bench.systems.base import Cell

BOUNDS: Final = ("limit", "floor")  #: what the machine allows: no rivals
OURS: Final = "busync"
NOTHING: Final = "–"


@dataclass(frozen=True, slots=True)
class Row:
    """What one system did at one cell."""

    blocks: list[list[float]]  #: seconds of each round, a list for each turn
    first: float | None  #: seconds of the very first round, the median of turns
    failed: str
    took: float = 0.0  #: seconds of all turns, starts and ends included

    @property
    def rounds(self) -> list[float]:
        """Of all blocks, the fastest first."""
        return sorted(seconds for block in self.blocks for seconds in block)


def turnwise(own: Row | None, *others: tuple[float, Row | None]) -> float | None:
    """A cost in others together, each times its weight: turn by turn, then the median. Missed turns are left out."""
    rows = [row for row in (own, *(row for _, row in others)) if row is not None]
    if len(rows) <= len(others):
        return None
    turns = zip(*(row.blocks for row in rows), strict=False)
    medians = [[median(block) for block in turn] for turn in turns if all(turn)]
    weights = [weight for weight, _ in others]
    sums = [(first, sum(w * cost for w, cost in zip(weights, rest, strict=True))) for first, *rest in medians]
    ratios = [first / total for first, total in sums if total > 0]
    return median(ratios) if ratios else None


@dataclass(frozen=True, slots=True)
class Work:
    """A cell and what all systems did at it."""

    cell: Cell
    rows: dict[str, Row]

    @classmethod
    def of(cls, systems: dict[str, dict[str, Any]], **cell: Any) -> Work:
        """As it is in the results."""
        return cls(Cell(**cell), {name: Row(**row) for name, row in systems.items()})

    def cost(self, name: str) -> float | None:
        """The median of a system's rounds, in seconds."""
        rounds = self.rows[name].rounds if name in self.rows else []
        return median(rounds) if rounds else None

    def ratio(self, name: str, *base: str) -> float | None:
        """A system's cost in those of others together."""
        return turnwise(self.rows.get(name), *((1.0, self.rows.get(one)) for one in base))

    def shown(self, name: str) -> str:
        """A median in ms, or that there is none."""
        cost, failed = self.cost(name), name in self.rows and self.rows[name].failed
        if cost is None:
            return "failed" if failed else NOTHING
        return number(cost * 1e3) + (", then failed" if failed else "")

    def peers(self) -> list[tuple[str, float | None]]:
        """Rivals that have figures, and their costs in those of busync. The fastest first."""
        costs = {name: self.cost(name) or math.inf for name in self.rows if name not in (*BOUNDS, OURS)}
        known = [(name, self.ratio(name, OURS)) for name in costs if costs[name] < math.inf]
        return sorted(known, key=lambda peer: (peer[1] or math.inf, costs[peer[0]]))

    def ahead(self) -> list[tuple[str, float | None]]:
        """Rivals that are faster than busync, or have figures where it failed or was not measured."""
        stands = self.cost(OURS) is not None and not self.rows[OURS].failed
        return [(name, ratio) for name, ratio in self.peers() if not stands or (ratio is not None and ratio < 1)]


@dataclass(frozen=True, slots=True)
class Note:
    """What was measured of each system at a cell that is not timed: memory, or event loops."""

    cell: Cell
    rows: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, systems: dict[str, dict[str, Any]], **cell: Any) -> Note:
        """As it is in the results."""
        return cls(Cell(**cell), systems)


@dataclass(frozen=True, slots=True)
class Results:
    """All of a run."""

    works: list[Work] = field(default_factory=list)
    memory: list[Note] = field(default_factory=list)
    loops: list[Note] = field(default_factory=list)

    @classmethod
    def of(cls, results: dict[str, Any]) -> Results:
        """As they are in the file."""
        notes = ([Note.of(**note) for note in results.get(key, ())] for key in ("memory", "loops"))
        return cls([Work.of(**cell) for cell in results.get("cells", ())], *notes)

    def idle(self, busy: Work) -> Work | None:
        """The same work on a machine that does nothing else."""
        cell = busy.cell
        return self.at(cell.mode, cell.state, cell.readers, cell.processes)

    def at(self, mode: str, state: str, readers: int, processes: int = 0) -> Work | None:
        """The work of that cell, if it was measured."""
        wanted = (mode, state, readers, processes, False)
        for work in self.works:
            cell = work.cell
            if (cell.mode, cell.state, cell.readers, cell.processes, cell.busy) == wanted:
                return work
        return None


def number(value: float | None) -> str:
    """Three digits that mean something."""
    if value is None or math.isnan(value):
        return NOTHING
    if value < 0:
        return f"-{number(-value)}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def size(nbytes: float) -> str:
    """Bytes in a unit that fits."""
    power = int(math.log10(nbytes) // 3) if nbytes >= 1 else 0
    return f"{nbytes / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def line(text: str, most: int = 300) -> str:
    """Foreign text as one line that Markdown leaves alone."""
    text = " ".join(text.split())[:most]
    return "".join(f"\\{letter}" if letter in "\\`*_<>[]|" else letter for letter in text)


def table(head: Iterable[str], rows: Iterable[list[str]]) -> str:
    """In Markdown: the first column to the left, the others to the right."""
    lines = [titles := list(head), ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
