"""What busync has promised to show, each bound with what was measured: computed from the results alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from bench.memory import allowed_bytes
from bench.works import NOTHING, OURS, Results, Work, number, size, turnwise

LARGE: Final = ("gpt2", "lm")  #: 498 and 988 MB
SMALL: Final = "cartpole"  #: 20 KB
FEW, MANY = 64, 1000  #: connections whose cost is compared
LATE: Final = 0.020  #: seconds
LOANED: Final = 2.0  #: milliseconds


@dataclass(frozen=True, slots=True)
class Target:
    """One bound."""

    what: str
    bound: str
    measured: str = NOTHING
    met: bool | None = None  #: None: it was not measured


@dataclass(frozen=True, slots=True)
class _Point:
    """One value that the bound speaks of. None: busync has no figure there, though it was tried."""

    where: str
    value: float | None


def targets(run: Results) -> list[Target]:
    """All of them, in the order in which they were set."""
    if any(work.cell.kind.on_device for work in run.works):
        return _on_gpu(run)
    idle = [work for work in run.works if not work.cell.busy]
    views = [work for work in idle if work.cell.mode == "view" and not work.cell.processes]

    def of(*states: str, readers: int = 0) -> list[Work]:
        return [w for w in views if w.cell.state in states and readers in (0, w.cell.readers)]

    gpt2 = of("gpt2")
    return [
        _most("view, 498 and 988 MB: busync over 1.25 x limit + floor", 1, _over_machine(of(*LARGE), 1.25)),
        _most("loan, 988 MB: busync over a loan of 20 KB to as many", 1.5, _loans(run, idle)),
        _most("view, 5,000 tensors: busync over 1.5 x limit + floor", 1, _over_machine(of("many"), 1.5)),
        _most("view, 20 KB, 16 readers: busync over floor", 2.5, _over_floor(of(SMALL, readers=16))),
        _most("view, 20 KB, 64 readers: busync over floor", 3, _over_floor(of(SMALL, readers=64))),
        _ahead(run),
        *(_least(f"view, 498 MB: {peer} over busync", factor, _over_us(gpt2, peer))
          for peer, factor in (("queues", 10), ("gloo", 10), ("zmq", 10), ("files", 4))),
        _memory(run),
        _most(f"cost per connection at {MANY:,} over that at {FEW} in as many processes", 1.3, _connections(run)),
        _most("view, 498 MB, 4 readers: busy machine over idle", 2, _busy(run)),
        _most("first publish of 498 MB over queues' steady state", 1, _first(gpt2)),
        *(_loops(run, role) for role in ("learner", "actor")),
    ]  # fmt: skip


def _on_gpu(run: Results) -> list[Target]:
    """What a GPU is for."""
    views, loans = ([work for work in run.works if work.cell.mode == mode] for mode in ("view", "loan"))
    return [
        _most("GPU, view: busync over 1.2 x limit + floor", 1, _over_machine(views, 1.2)),
        _most("GPU, loan: busync, in ms", LOANED, _loaned(loans)),
        _most("GPU, loan: busync less the floor of a view to as many, in ms", LOANED, _beyond_floor(run, loans)),
    ]


def _verdict(what: str, bound: str, points: list[_Point], worst: Callable[[list[_Point]], _Point], met: bool) -> Target:
    """From the worst of the points, one of which without a figure is worse than all."""
    if not points:
        return Target(what, bound)
    missing = [point for point in points if point.value is None]
    if missing:
        return Target(what, bound, f"no figure ({missing[0].where})", False)
    at = worst(points)
    return Target(what, bound, f"{number(at.value)} ({at.where}{_of(points)})", met)


def _of(points: list[_Point]) -> str:
    return f", the worst of {len(points)}" if len(points) > 1 else ""


def _most(what: str, bound: float, points: Iterable[_Point]) -> Target:
    found = list(points)
    met = all(point.value is not None and point.value <= bound for point in found)
    return _verdict(what, f"at most {bound:g}", found, lambda all_: max(all_, key=lambda p: p.value or 0.0), met)


def _least(what: str, bound: float, points: Iterable[_Point]) -> Target:
    found = list(points)
    met = all(point.value is not None and point.value >= bound for point in found)
    return _verdict(what, f"at least {bound:g}", found, lambda all_: min(all_, key=lambda p: p.value or 0.0), met)


def _stands(work: Work) -> bool:
    return OURS in work.rows and not work.rows[OURS].failed and work.cost(OURS) is not None


def _over_machine(works: list[Work], weight: float) -> Iterable[_Point]:
    """Over so many limits and one floor: cells where both were measured."""
    for work in works:
        if all(work.cost(bound) is not None for bound in ("limit", "floor")) and OURS in work.rows:
            bounds = (weight, work.rows["limit"]), (1.0, work.rows["floor"])
            yield _Point(str(work.cell), turnwise(work.rows[OURS], *bounds) if _stands(work) else None)


def _over_floor(works: list[Work]) -> Iterable[_Point]:
    for work in works:
        if work.cost("floor") is not None and OURS in work.rows:
            yield _Point(str(work.cell), work.ratio(OURS, "floor") if _stands(work) else None)


def _over_us(works: list[Work], peer: str) -> Iterable[_Point]:
    for work in works:
        if work.cost(peer) is not None and OURS in work.rows:
            yield _Point(str(work.cell), work.ratio(peer, OURS) if _stands(work) else None)


def _loans(run: Results, idle: list[Work]) -> Iterable[_Point]:
    for work in idle:
        cell = work.cell
        small = run.at("loan", SMALL, cell.readers)
        if (cell.mode, cell.state) == ("loan", "lm") and small and OURS in work.rows and OURS in small.rows:
            ratio = turnwise(work.rows[OURS], (1.0, small.rows[OURS]))
            yield _Point(str(cell), ratio if _stands(work) and _stands(small) else None)


def _loaned(loans: list[Work]) -> Iterable[_Point]:
    for work in loans:
        cost = work.cost(OURS)
        if OURS in work.rows:
            yield _Point(str(work.cell), cost * 1e3 if cost is not None and _stands(work) else None)


def _beyond_floor(run: Results, loans: list[Work]) -> Iterable[_Point]:
    """The proof alone takes longer than the bound, where it reads from a thousand tensors."""
    for work in loans:
        cell = work.cell
        view, cost = run.at("view", cell.state, cell.readers), work.cost(OURS)
        floor = view.cost("floor") if view else None
        if floor is not None and OURS in work.rows:
            yield _Point(str(cell), (cost - floor) * 1e3 if cost is not None and _stands(work) else None)


def _ahead(run: Results) -> Target:
    """A failure or a faster peer in one cell is enough to miss it."""
    what, bound = "view, read and load: ahead of every peer", "in every cell"
    works = [work for work in run.works if work.cell.mode in ("view", "read", "load") and work.peers()]
    behind = [str(work.cell) for work in works if work.ahead()]
    if not works:
        return Target(what, bound)
    text = f"in {len(works) - len(behind)} of {len(works)}"
    return Target(what, bound, text + (f"; behind at {', '.join(behind)}" if behind else ""), not behind)


def _memory(run: Results) -> Target:
    """The bound follows from the pool that there was."""
    what, bound = "memory, 16 readers in place on 498 MB", "the pool, and 2 MB + 1 KB per view + 0.2 % each"
    for note in run.memory:
        row = note.rows.get(OURS)
        if (note.cell.state, note.cell.readers) == ("gpt2", 16) and row:
            if row["failed"]:
                return Target(what, bound, f"no figure ({note.cell})", False)
            allowed = allowed_bytes(note.cell, row["kept"])
            return Target(what, bound, f"{size(row['pss'])} of {size(allowed)}", row["pss"] <= allowed)
    return Target(what, bound)


def per_connection(run: Results, name: str) -> list[tuple[Work, Work, float | None]]:
    """Where few and many connections to as many processes were measured: both, and the ratio of costs for each."""
    found = []
    for work in run.works:
        cell = work.cell
        few = run.at(cell.mode, cell.state, FEW, cell.processes)
        if cell.processes and cell.readers == MANY and not cell.busy and few and name in work.rows and name in few.rows:
            ratio = turnwise(work.rows[name], (MANY / FEW, few.rows[name]))
            found.append((few, work, ratio))
    return found


def _connections(run: Results) -> Iterable[_Point]:
    for few, many, ratio in per_connection(run, OURS):
        yield _Point(str(many.cell), ratio if _stands(few) and _stands(many) else None)


def under_load(run: Results, name: str) -> list[tuple[Work, Work, float | None]]:
    """Where the same work was measured idle and busy: both, and the ratio."""
    found = []
    for work in run.works:
        idle = run.idle(work)
        if work.cell.busy and idle and name in work.rows and name in idle.rows:
            found.append((idle, work, turnwise(work.rows[name], (1.0, idle.rows[name]))))
    return found


def _busy(run: Results) -> Iterable[_Point]:
    for idle, busy, ratio in under_load(run, OURS):
        if (busy.cell.state, busy.cell.readers) == ("gpt2", 4):
            yield _Point(str(busy.cell), ratio if _stands(idle) and _stands(busy) else None)


def _first(works: list[Work]) -> Iterable[_Point]:
    for work in works:
        steady = work.cost("queues")
        if steady is not None and OURS in work.rows:
            first = work.rows[OURS].first
            yield _Point(str(work.cell), first / steady if first is not None and _stands(work) else None)


def _loops(run: Results, role: str) -> Target:
    what, bound = f"988 MB: callbacks on the {role}'s loop late by (p99)", f"at most {LATE * 1e3:g} ms"
    rows = [(note.cell, row) for note in run.loops if note.cell.state == "lm" and (row := note.rows.get(OURS))]
    failed = [cell for cell, row in rows if row["failed"]]
    if not rows or failed:
        return Target(what, bound, f"no figure ({failed[0]})", False) if failed else Target(what, bound)
    cell, row = max(rows, key=lambda pair: pair[1][role]["p99"])
    late = row[role]
    text = f"{number(late['p99'] * 1e3)} ms, at most {number(late['max'] * 1e3)} ({cell})"
    return Target(what, bound, text, late["p99"] <= LATE)
