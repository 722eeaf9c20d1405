"""Results as a page to read: ``python -m bench.report [results.json]`` writes it again, beside the file."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, Final

from bench.extras import beside, memory, waits, where_time_went
from bench.pictures import pictures
from bench.systems import MODULES, find
from bench.targets import targets
from bench.works import BOUNDS, NOTHING, OURS, Results, Work, line, number, size, table

ON_GPU: Final = """\
Weights, readers and the limit are on one GPU. **limit** is one copy there, waited for; **floor** makes as many views of
one buffer that each reader has opened once, and reads as much. A loan has no floor of its own: compare it with that of
the view of as much to as many. Every reader's process uses the device before the first version, and all that is queued
there is waited for before the clock starts. The values of the proof are brought to the host with one wait. What the run
had no time for is left out."""
RESULTS: Final = Path(__file__).parent / "results" / "results.json"
WORK: Final = """\
A learner holds new weights in private memory. The clock starts when it hands them over, and stops when every
subscriber process has said that it can use them, having read the first and the last value of every 8th tensor.

- **view**: readable tensors are enough.
- **read**: every subscriber has read every byte.
- **load**: every subscriber has copied them into its own module.
- **loan**: they were written in place beforehand, off the clock.
- **limit** is one copy of the bytes, without subscribers; **floor** is a round of wake-up, views and answer, without
  bytes. Neither delivers weights. A load has no floor; a loan copies nothing on the clock: compare it with the floor.
- **busy**: meanwhile the readers' processes multiply matrices, one single-threaded loop for each core.

The systems take turns, and a turn is a block of rounds. Median, p90 and max are over the rounds of all blocks; a ratio
is taken between the medians of blocks of the same turn, and the median of these is shown: what drifts between turns
cancels, and a ratio may differ a little from that of the medians. In a short run a peer whose first turn takes long
gets no second, and busy cells have one turn. What cannot do a cell's work is not in its table."""


def write_report(results: dict[str, Any], directory: Path) -> None:
    """Write ``README.md`` and pictures. Earlier pictures go."""
    run = Results.of(results)
    works = run.works
    parts = ["# Benchmark results", *_summary(works)] if works else ["# Benchmark results"]
    if not (works or run.memory or run.loops):
        parts.append("Nothing was measured.")
    parts += ["## What it must show", *_targets(run)]
    parts += [*pictures(works, directory), *beside(run), *memory(run), *waits(run)]
    gpu = any(work.cell.kind.on_device for work in works)
    parts += [
        "## What was measured",
        WORK,
        ON_GPU if gpu else "",
        _machine(results, works),
        *(p for work in works for p in _detail(work)),
    ]
    parts += where_time_went(run)
    (directory / "README.md").write_text("\n\n".join(filter(None, parts)) + "\n")


def _targets(run: Results) -> list[str]:
    """Each bound, what was measured, and whether that is enough."""
    found = targets(run)
    verdicts = {True: "met", False: "**not met**", None: NOTHING}
    met = [target.met for target in found if target.met is not None]
    rows = [[target.what, target.bound, target.measured, verdicts[target.met]] for target in found]
    head = ("what", "bound", "measured", "verdict")
    return [f"{sum(met)} of {len(met)} bounds that were measured are met.", table(head, rows)]


def _summary(works: list[Work]) -> list[str]:
    rivalled = [work for work in works if work.peers()]
    behind = [f"- {work.cell}: {_peers(work)}" for work in rivalled if work.ahead()]
    verdict = f"busync is the fastest in {len(rivalled) - len(behind)} of {len(rivalled)} cells in which a peer ran."
    verdict = verdict if rivalled else "No peer ran: there is nothing to compare busync with but the machine."
    head = ("cell", "limit ms", "floor ms", "busync ms", "busync / (limit + floor)", "busync / floor", "fastest peer")
    rows = []
    for work in works:
        ratios = [number(work.ratio(OURS, *BOUNDS)), number(work.ratio(OURS, "floor"))]
        rows.append([str(work.cell), *(work.shown(name) for name in (*BOUNDS, OURS)), *ratios, _peers(work)])
    return [verdict, "\n".join(behind), table(head, rows)]


def _peers(work: Work) -> str:
    """Who is ahead, or who comes next."""
    if ahead := work.ahead():
        shown = [name if ratio is None else f"{name} ({number(ratio)} of busync)" for name, ratio in ahead]
        why = {"failed": " (busync failed)", NOTHING: " (no busync)"}.get(work.shown(OURS).split()[-1], "")
        return f"**ahead: {', '.join(shown)}**{why}"
    known = [f"{name} ({number(ratio)} times as long as busync)" for name, ratio in work.peers() if ratio is not None]
    return known[0] if known else NOTHING


def _machine(results: dict[str, Any], works: list[Work]) -> str:
    """The systems, how each is used, and where all this was."""
    names = dict.fromkeys(name for work in works for name in work.rows)
    lines = [f"- **{name}**: {find(name).note}" for name in names if name in MODULES]
    lines += [f"- **{name}** was not measured: {line(why)}" for name, why in results.get("missing", {}).items()]
    if machine := results.get("machine"):
        lines += [f"- GPU: {line(machine['device'])}"] if "device" in machine else []
        lines += [
            f"- Machine: {line(machine['cpu'])}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.1f} GiB",
            f"- System: Linux {machine['kernel']}, Python {machine['python']}",
            "- Versions: " + ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
            f"- Commit {machine['commit']}, measured on {machine['date']} in {results.get('seconds', 0):.0f} s",
            f"- Load when it began: {machine['load']:.2f} (average of a minute)",
        ]
    return "\n".join(lines)


def _detail(work: Work) -> list[str]:
    """A cell's heading, table and failures."""
    cell, kind = work.cell, work.cell.kind
    about = f"{kind.what[0].upper()}{kind.what[1:]}: {kind.tensors:,} tensors, {size(kind.nbytes)}."
    about += f" Readers: {cell.readers}. busync / (limit + floor): {number(work.ratio(OURS, *BOUNDS))}."
    head = ("system", "median ms", "p90 ms", "max ms", "rounds", "first ms", "of limit", "of floor", "of busync")
    order = sorted(work.rows, key=lambda name: (name not in BOUNDS, work.cost(name) or math.inf))
    failures = [f"- {name} failed: {line(work.rows[name].failed)}" for name in order if work.rows[name].failed]
    return [f"## {cell}", about, table(head, (_row(work, name) for name in order)), "\n".join(failures)]


def _row(work: Work, name: str) -> list[str]:
    rounds, first = work.rows[name].rounds, work.rows[name].first or math.nan
    shown = f"**{name}**" if name == OURS else name
    p90, most = (rounds[at] * 1e3 if rounds else None for at in (math.ceil(0.9 * len(rounds)) - 1, -1))
    ratios = [number(work.ratio(name, base)) for base in (*BOUNDS, OURS)]
    return [shown, work.shown(name), number(p90), number(most), str(len(rounds)), number(first * 1e3), *ratios]


def main() -> None:
    """Write the report of a file of results."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    write_report(json.loads(path.read_text()), path.parent)


if __name__ == "__main__":
    main()
