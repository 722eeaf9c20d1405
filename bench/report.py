"""Results as a page to read: ``python -m bench.report [results.json]`` writes it again, beside the file."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from bench.systems import MODULES, find
from bench.systems.base import Cell

RESULTS: Final = Path(__file__).parent / "results" / "results.json"
BOUNDS: Final = ("limit", "floor")  #: what the machine allows: no rivals
OURS: Final = "busync"
NOTHING: Final = "–"
PICTURES: Final = ("bars-*.png", "readers.png", "size.png")
COLOURS: Final = tuple(zip(("#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000"), "s^Dv<P", strict=True))
SPECIAL: Final[dict[str, dict[str, Any]]] = {
    "limit": {"color": "#777777", "marker": "", "linestyle": "--"},
    "floor": {"color": "#777777", "marker": "", "linestyle": ":"},
    OURS: {"color": "#0072B2", "marker": "o", "linewidth": 4, "markersize": 8, "zorder": 1.7},
}
WORK: Final = """\
A learner holds new weights in private memory. The clock starts when it hands them over, and stops when every
subscriber process has said that it can use them, having read the first and the last value of every 8th tensor.

- **view**: readable tensors are enough.
- **read**: every subscriber has read every byte.
- **load**: every subscriber has copied them into its own module.
- **loan**: they were written in place beforehand, off the clock.
- **limit** is one copy of the bytes, without subscribers; **floor** is a round of wake-up, views and answer, without
  bytes. Neither delivers weights. A load has no floor; a loan copies nothing on the clock: compare it with the floor.

The systems take turns, and a turn is a block of rounds. Median, p90 and max are over the rounds of all blocks; a ratio
is taken between the medians of blocks of the same turn, and the median of these is shown: what drifts between turns
cancels, and a ratio may differ a little from that of the medians. What cannot do a cell's work is not in its table."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one system did at one cell."""

    blocks: list[list[float]]  #: seconds of each round, a list for each turn
    first: float | None
    failed: str

    @property
    def rounds(self) -> list[float]:
        """Of all blocks, the fastest first."""
        return sorted(seconds for block in self.blocks for seconds in block)


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
        """A system's cost in those of others together: block by block, then the median."""
        if any(one not in self.rows for one in (name, *base)):
            return None
        turns = zip(*(self.rows[one].blocks for one in (name, *base)), strict=False)
        medians = [[median(block) for block in turn] for turn in turns if all(turn)]
        ratios = [own / sum(others) for own, *others in medians if sum(others) > 0]
        return median(ratios) if ratios else None

    def peers(self) -> list[tuple[str, float | None]]:
        """Rivals that have figures, and their costs in those of busync. The fastest first."""
        costs = {name: self.cost(name) or math.inf for name in self.rows if name not in (*BOUNDS, OURS)}
        known = [(name, self.ratio(name, OURS)) for name in costs if costs[name] < math.inf]
        return sorted(known, key=lambda peer: (peer[1] or math.inf, costs[peer[0]]))

    def ahead(self) -> list[tuple[str, float | None]]:
        """Rivals that are faster than busync, or have figures where it failed or was not measured."""
        stands = self.cost(OURS) is not None and not self.rows[OURS].failed
        return [(name, ratio) for name, ratio in self.peers() if not stands or (ratio is not None and ratio < 1)]


def write_report(results: dict[str, Any], directory: Path) -> None:
    """Write ``README.md`` and pictures. Earlier pictures go."""
    for old in (old for pattern in PICTURES for old in directory.glob(pattern)):
        old.unlink()
    works = [Work.of(**cell) for cell in results.get("cells", ())]
    parts = ["# Benchmark results", *_summary(works), *_pictures(works, directory)]
    parts += ["## What was measured", WORK, _machine(results, works), *(p for work in works for p in _detail(work))]
    (directory / "README.md").write_text("\n\n".join(filter(None, parts)) + "\n")


def _summary(works: list[Work]) -> list[str]:
    if not works:
        return ["Nothing was measured."]
    rivalled = [work for work in works if work.peers()]
    behind = [f"- {work.cell}: {_peers(work)}" for work in rivalled if work.ahead()]
    verdict = f"busync is the fastest in {len(rivalled) - len(behind)} of {len(rivalled)} cells in which a peer ran."
    verdict = verdict if rivalled else "No peer ran: there is nothing to compare busync with but the machine."
    head = ("cell", "limit ms", "floor ms", "busync ms", "busync / (limit + floor)", "busync / floor", "fastest peer")
    rows = []
    for work in works:
        ratios = [_number(work.ratio(OURS, *BOUNDS)), _number(work.ratio(OURS, "floor"))]
        rows.append([str(work.cell), *(_cost(work, name) for name in (*BOUNDS, OURS)), *ratios, _peers(work)])
    return [verdict, "\n".join(behind), _table(head, rows)]


def _peers(work: Work) -> str:
    """Who is ahead, or who comes next."""
    if ahead := work.ahead():
        shown = [name if ratio is None else f"{name} ({_number(ratio)} of busync)" for name, ratio in ahead]
        why = {"failed": " (busync failed)", NOTHING: " (no busync)"}.get(_cost(work, OURS).split()[-1], "")
        return f"**ahead: {', '.join(shown)}**{why}"
    known = [f"{name} ({_number(ratio)} times as long as busync)" for name, ratio in work.peers() if ratio is not None]
    return known[0] if known else NOTHING


def _machine(results: dict[str, Any], works: list[Work]) -> str:
    """The systems, how each is used, and where all this was."""
    names = dict.fromkeys(name for work in works for name in work.rows)
    lines = [f"- **{name}**: {find(name).note}" for name in names if name in MODULES]
    lines += [f"- **{name}** was not measured: {_line(why)}" for name, why in results.get("missing", {}).items()]
    if machine := results.get("machine"):
        lines += [
            f"- Machine: {_line(machine['cpu'])}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.1f} GiB",
            f"- System: Linux {machine['kernel']}, Python {machine['python']}",
            "- Versions: " + ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
            f"- Commit {machine['commit']}, measured on {machine['date']} in {results.get('seconds', 0):.0f} s",
            f"- Load when it began: {machine['load']:.2f} (average of a minute)",
        ]
    return "\n".join(lines)


def _detail(work: Work) -> list[str]:
    """A cell's heading, table and failures."""
    cell, kind = work.cell, work.cell.kind
    about = f"{kind.what[0].upper()}{kind.what[1:]}: {kind.tensors:,} tensors, {_size(kind.nbytes)}."
    about += f" Readers: {cell.readers}. busync / (limit + floor): {_number(work.ratio(OURS, *BOUNDS))}."
    head = ("system", "median ms", "p90 ms", "max ms", "rounds", "first ms", "of limit", "of floor", "of busync")
    order = sorted(work.rows, key=lambda name: (name not in BOUNDS, work.cost(name) or math.inf))
    failures = [f"- {name} failed: {_line(work.rows[name].failed)}" for name in order if work.rows[name].failed]
    return [f"## {cell}", about, _table(head, (_row(work, name) for name in order)), "\n".join(failures)]


def _row(work: Work, name: str) -> list[str]:
    rounds, first = work.rows[name].rounds, work.rows[name].first or math.nan
    shown = f"**{name}**" if name == OURS else name
    p90, most = (rounds[at] * 1e3 if rounds else None for at in (math.ceil(0.9 * len(rounds)) - 1, -1))
    ratios = [_number(work.ratio(name, base)) for base in (*BOUNDS, OURS)]
    return [shown, _cost(work, name), _number(p90), _number(most), str(len(rounds)), _number(first * 1e3), *ratios]


def _cost(work: Work, name: str) -> str:
    """A median in ms, or that there is none."""
    cost, failed = work.cost(name), name in work.rows and work.rows[name].failed
    if cost is None:
        return "failed" if failed else NOTHING
    return _number(cost * 1e3) + (", then failed" if failed else "")


def _table(head: Iterable[str], rows: Iterable[list[str]]) -> str:
    lines = [titles := list(head), ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None) -> str:
    """Three digits that mean something."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def _size(nbytes: float) -> str:
    power = int(math.log10(nbytes) // 3)
    return f"{nbytes / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def _line(text: str, most: int = 300) -> str:
    """Foreign text as one line that Markdown leaves alone."""
    text = " ".join(text.split())[:most]
    return "".join(f"\\{letter}" if letter in "\\`*_<>[]|" else letter for letter in text)


def _pictures(works: list[Work], directory: Path) -> list[str]:
    """Draw what there is data for; the links."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ["There are no pictures, for matplotlib is not installed (the extra `examples` brings it)."]
    links = []

    def draw(name: str, caption: str, paint: Callable[[Any], None]) -> None:
        paint(figure := Figure(layout="constrained"))
        figure.savefig(directory / f"{name}.png", dpi=150)
        links.append(f"![{caption}]({name}.png)")

    works = [work for work in works if any(row.rounds for row in work.rows.values())]
    for mode in dict.fromkeys(work.cell.mode for work in works):
        shown = [work for work in works if work.cell.mode == mode]
        draw(f"bars-{mode}", f"Cost in each cell of mode {mode}", partial(_bars, works=shown))
    views = [work for work in works if work.cell.mode == "view" and not work.cell.processes]
    views.sort(key=lambda work: (work.cell.kind.nbytes, work.cell.readers))
    panels: dict[str, list[Work]] = {}
    for work in views:
        panels.setdefault(f"{work.cell.state}, {_size(work.cell.kind.nbytes)}", []).append(work)
    if panels := {title: points for title, points in panels.items() if len(points) > 1}:
        draw("readers", "Cost of a view against the number of readers", partial(_lines, panels=panels, along="readers"))
    four = [
        work for work in views if work.cell.readers == 4 and work.cell.state != "many"
    ]  # which costs by its tensors
    if len(four) > 1:
        paint = partial(_lines, panels={"view, 4 readers": four}, along="nbytes")
        draw("size", "Cost of a view with 4 readers against size", paint)
    return links


def _bars(figure: Any, works: list[Work]) -> None:
    """A panel for each cell, two in a row."""
    columns = min(2, len(works))
    heights = [max(len(work.rows) for work in works[at : at + columns]) + 2.5 for at in range(0, len(works), columns)]
    figure.set_size_inches(9, 0.22 * sum(heights) + 0.4)
    figure.supxlabel("median ms, logarithmic", fontsize=9)
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for number, work in enumerate(works):
        axes = figure.add_subplot(grid[divmod(number, columns)])
        costs = {name: (work.cost(name) or 0.0) * 1e3 for name in work.rows}
        least, most = (pick(cost for cost in costs.values() if cost) for pick in (min, max))
        left = 10 ** math.floor(math.log10(least / 1.5))
        for place, (name, cost) in enumerate(costs.items()):
            fill = SPECIAL.get(name, {"color": "#BBBBBB"})["color"]
            axes.barh(
                place, max(cost - left, 0), left=left, height=0.7, edgecolor=fill, fill=name not in BOUNDS, fc=fill
            )
            weight = "bold" if name == OURS else "normal"
            axes.text(max(cost, left), place, f" {_cost(work, name)}", va="center", fontsize=9, weight=weight)
        axes.set(xscale="log", xlim=(left, most * (most / left) ** 0.35))
        axes.set_yticks(range(len(costs)), costs)
        axes.invert_yaxis()
        _plain(axes, axes.xaxis, str(work.cell))


def _lines(figure: Any, panels: dict[str, list[Work]], along: Literal["readers", "nbytes"]) -> None:
    """A panel for each list of works, a line for each system."""
    columns = min(2, len(panels))
    figure.set_size_inches(9, 3.4 * (rows := math.ceil(len(panels) / columns)) + 0.6)
    names = list(dict.fromkeys(name for points in panels.values() for work in points for name in work.rows))
    order = [*SPECIAL, *(name for name in dict.fromkeys([*MODULES, *names]) if name not in SPECIAL)]
    drawn = {}
    for number, (title, points) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, number)
        places, labels = [work.cell.readers for work in points], [f"{work.cell.readers}" for work in points]
        if along == "nbytes":
            places = [work.cell.kind.nbytes for work in points]
            labels = [f"{work.cell.state}\n{_size(at)}" for work, at in zip(points, places, strict=True)]
            near = [before > at / 4 for before, at in zip([0, *places], places, strict=False)]
            labels = ["\n\n" * crowded + label for crowded, label in zip(near, labels, strict=True)]
        for name in names:
            costs = [(work.cost(name) or math.nan) * 1e3 for work in points]
            colour, marker = COLOURS[order.index(name) % len(COLOURS)]
            style = {"color": colour, "marker": marker, "linewidth": 1.3, "markersize": 5} | SPECIAL.get(name, {})
            drawn[name] = axes.plot(places, costs, **style)[0]
        axes.set(xscale="log", yscale="log", ylabel="median ms", xlabel="readers" if along == "readers" else "")
        axes.set_xticks(places, labels)
        axes.grid(axis="y", color="#E5E5E5")
        _plain(axes, axes.yaxis, title)
    figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=9, frameon=False, fontsize=9)


def _plain(axes: Any, logarithmic: Any, title: str) -> None:
    """Only the lines that say something, and plain numbers at them."""
    axes.set_title(title, fontsize=10, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.minorticks_off()
    axes.tick_params(labelsize=9)
    logarithmic.set_major_formatter(lambda value, _: f"{value:,.9g}")


def main() -> None:
    """Write the report of a file of results."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    write_report(json.loads(path.read_text()), path.parent)


if __name__ == "__main__":
    main()
