"""Pictures of the results: bars for each cell, cost against readers, cost against size."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from bench.systems import MODULES
from bench.works import BOUNDS, OURS, Work, size

PICTURES: Final = ("bars-*.png", "readers.png", "size.png")
COLOURS: Final = tuple(zip(
    ("#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#882255"), "s^Dv<PX", strict=True
))  # fmt: skip
SPECIAL: Final[dict[str, dict[str, Any]]] = {
    "limit": {"color": "#777777", "marker": "", "linestyle": "--"},
    "floor": {"color": "#777777", "marker": "", "linestyle": ":"},
    OURS: {"color": "#0072B2", "marker": "o", "linewidth": 4, "markersize": 8, "zorder": 1.7},
}


def pictures(works: list[Work], directory: Path) -> list[str]:
    """Draw what there is data for; the links. Earlier pictures go."""
    for old in (old for pattern in PICTURES for old in directory.glob(pattern)):
        old.unlink()
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
    views = [work for work in works if work.cell.mode == "view" and not work.cell.processes and not work.cell.busy]
    views.sort(key=lambda work: (work.cell.kind.nbytes, work.cell.readers))
    panels: dict[str, list[Work]] = {}
    for work in views:
        panels.setdefault(f"{work.cell.state}, {size(work.cell.kind.nbytes)}", []).append(work)
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
            axes.text(max(cost, left), place, f" {work.shown(name)}", va="center", fontsize=9, weight=weight)
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
            labels = [f"{work.cell.state}\n{size(at)}" for work, at in zip(points, places, strict=True)]
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
