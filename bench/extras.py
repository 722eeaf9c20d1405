"""Parts of the report beside the cells: firsts, busy machines, connections, memory, event loops, and its own cost."""

from __future__ import annotations

from bench.memory import allowed_bytes
from bench.systems import MODULES
from bench.targets import FEW, MANY, per_connection, under_load
from bench.works import NOTHING, OURS, Note, Results, Work, line, number, size, table

MEMORY = """\
What all processes of a system take beyond their idle size, in MB: proportional set sizes, summed. Idle is attached,
before the first version. Then some versions have gone round, and every reader has read every byte of the newest, which
it holds. "For versions" is the shared memory that the system keeps at that moment, mapped by a process or not. Page
tables are in no set size. A reader's own is its private dirty memory, of the median reader."""
WAITS = """\
A callback is due every millisecond on the learner's and on an actor's asyncio loop, while the learner publishes without
a pause and the actor adopts each version in place, reads all of it on a thread, and releases it when the next is there.
Times are fixed beforehand: what holds a loop for 30 ms makes 30 callbacks late. The first versions of a cold pool
count. "Quiet" is before the first version: what this machine and asyncio do by themselves."""


def _systems(works: list[Work]) -> list[str]:
    """Names in the order of the systems; what is not known to this version comes last."""
    names = {name for work in works for name in work.rows}
    return [*(name for name in MODULES if name in names), *sorted(names - set(MODULES))]


def _shown(name: str) -> str:
    return f"**{name}**" if name == OURS else name


def beside(run: Results) -> list[str]:
    """The first publish, the busy machine, and the connections."""
    return [*_firsts(run), *_busy(run), *_connections(run)]


def _firsts(run: Results) -> list[str]:
    """Cold beside steady, for the large states."""
    rows = []
    for work in run.works:
        cell = work.cell
        if cell.mode == "view" and cell.kind.nbytes > 100e6 and not cell.busy and OURS in work.rows:
            first = work.rows[OURS].first
            if first is not None:
                steady = [work.cost(name) for name in ("queues", "queues-reuse")]
                ratios = [NOTHING if cost is None else number(first / cost) for cost in steady]
                shown = [number(None if cost is None else cost * 1e3) for cost in steady]
                rows.append([str(cell), number(first * 1e3), shown[0], ratios[0], shown[1], ratios[1]])
    head = ("cell", "busync, first, ms", "queues, steady, ms", "ratio", "queues-reuse, steady, ms", "ratio")
    about = "The very first publish, with a cold pool, beside what queues take when they are warm."
    return ["## The first publish", about, table(head, rows)] if rows else []


def _busy(run: Results) -> list[str]:
    rows = []
    for name in _systems(run.works):
        for idle, busy, ratio in under_load(run, name):
            rows.append([f"{_shown(name)}, {idle.cell}", idle.shown(name), busy.shown(name), number(ratio)])
    head = ("system, cell", "idle ms", "busy ms", "busy / idle")
    about = "As many loops of single-threaded matrix products as there are cores, in the readers' processes."
    return ["## A busy machine", about, table(head, rows)] if rows else []


def _connections(run: Results) -> list[str]:
    rows = []
    for name in _systems(run.works):
        for few, many, ratio in per_connection(run, name):
            costs = [work.cost(name) for work in (few, many)]
            each = [None if cost is None else cost * 1e6 / work.cell.readers
                    for work, cost in zip((few, many), costs, strict=True)]  # fmt: skip
            rows.append(
                [f"{_shown(name)}, {many.cell}", *map(number, each), number(ratio), many.rows[name].failed or "all"]
            )
    head = ("system, cell", f"us per reader at {FEW}", f"at {MANY:,}", "ratio", "answered")
    about = "What one more connection costs. A round is over when every one has answered."
    return ["## A thousand connections", about, table(head, rows)] if rows else []


def memory(run: Results) -> list[str]:
    """A table for each cell."""
    parts = ["## Memory", MEMORY] if run.memory else []
    for note in run.memory:
        rows = [[_shown(name), *_sizes(row)] for name, row in note.rows.items() if not row["failed"]]
        head = ("system", "all processes", "for versions", "learner", "a reader", "a reader's own", "its page tables")
        parts += [f"### {note.cell}", table(head, rows), _bound(note)]
        parts.append("\n".join(f"- {name}: {line(row['failed'])}" for name, row in note.rows.items() if row["failed"]))
    return parts


def _sizes(row: dict[str, float]) -> list[str]:
    fields = ("pss", "kept", "learner", "reader", "dirty", "tables")
    return [number(row[field] / 1e6) for field in fields]


def _bound(note: Note) -> str:
    row = note.rows.get(OURS)
    if not row or row["failed"]:
        return ""
    return f"The bound for busync: {size(allowed_bytes(note.cell, row['kept']))}; {size(row['pss'])} were measured."


def waits(run: Results) -> list[str]:
    """A table for each cell."""
    rows, failures = [], []
    for note in run.loops:
        for name, row in note.rows.items():
            if row["failed"]:
                failures.append(f"- {note.cell} failed: {line(row['failed'])}")
                continue
            for role in ("learner", "actor"):
                late, quiet = row[role], row["quiet"][role]
                figures = [number(late[key] * 1e3) for key in ("p50", "p99", "max")]
                rows.append([f"{note.cell}, {role}, {name}", f"{row['versions']}", f"{late['callbacks']:,}", *figures,
                             number(quiet["p99"] * 1e3), number(quiet["max"] * 1e3)])  # fmt: skip
    if not rows and not failures:
        return []
    head = ("loop", "versions", "callbacks", "median ms", "p99 ms", "max ms", "quiet p99 ms", "quiet max ms")
    return ["## How late callbacks come", WAITS, table(head, rows) if rows else "", "\n".join(failures)]


def where_time_went(run: Results) -> list[str]:
    """What each cell cost to measure, and most of it."""
    costs = [(work.cell, {name: row.took for name, row in work.rows.items()}) for work in run.works]
    costs += [(note.cell, {name: row.get("took", 0.0) for name, row in note.rows.items()})
              for note in (*run.memory, *run.loops)]  # fmt: skip
    rows = []
    for cell, took in costs:
        if total := sum(took.values()):
            slow = sorted(took, key=lambda name: -took[name])[:3]
            rows.append([str(cell), f"{total:.1f}", ", ".join(f"{name} {took[name]:.1f}" for name in slow)])
    head = ("cell", "s", "the slowest systems, s")
    return ["## Where the time went", table(head, rows)] if rows else []
