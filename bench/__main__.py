"""busync and others at the same work, in one run: ``python -m bench [--gpu] [--full] [--only TEXT] ...``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from bench.cells import FULL, GPU, GPU_SMOKE, QUICK, SLOW, SMOKE, Group
from bench.loops import measure_loops
from bench.memory import measure_memory
from bench.one import NO_DEVICE, Effort, Measured, measure, raise_limits
from bench.report import write_report
from bench.systems import MODULES, find
from bench.systems.base import Cell, System
from bench.works import BOUNDS, OURS

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "bench" / "results"
GPU_RESULTS: Final = ROOT / "bench" / "results-gpu"
ENOUGH: Final = 4.0  #: seconds of a turn, starts and ends included, after which a peer gets no other, but in a full run
BUDGET: Final = 480.0  #: seconds of a short run; where it is behind them, peers get one turn
GPU_BUDGET: Final = 330.0  #: the same on a GPU; there nobody gets another turn then, and peers get none
BEHIND: Final = "left out, for the run was behind its pace (--full leaves out nothing)"
SLOWLY: Final = "left to --full"
VERSIONS: Final = ("torch", "pyzmq", "msgpack", "msgspec", "uvloop", "safetensors", "torchrl", "ray")


def main() -> int:
    """Measure, print as it goes, and write results and report."""
    options = _options()
    raise_limits()
    if options.gpu and not torch.cuda.is_available():
        say(f"NOT RUN: {NO_DEVICE}, so nothing was measured.")
        return 1
    chosen, budget = _chosen(options)
    found = (tuple(cell for cell in group if options.only in str(cell)) for group in chosen)
    groups = [cells for cells in found if cells]
    names = options.systems.split(",") if options.systems else list(MODULES)
    systems, missing = _installed(names, groups)
    for name, why in missing.items():
        say(f"{name} is skipped: {why}")
    results: dict[str, Any] = {"machine": _machine(options.gpu), "missing": missing}
    results |= {key: [] for key in ("cells", "memory", "loops")}
    begun = time.monotonic()
    for number, cells in enumerate(groups, 1):
        say(f"[{number}/{len(groups)}, {time.monotonic() - begun:.0f} s] {', '.join(map(str, cells))}")
        mode = cells[0].mode
        if mode == "memory":
            results["memory"] += [_memory(cell, systems, options) for cell in cells]
        elif mode == "loops":
            results["loops"] += [_loops(cell, options) for cell in cells if any(system.can(cell) for system in systems)]
        else:
            results["cells"] += _timed(cells, systems, options, due=begun + budget * number / len(groups))
    results["seconds"] = round(time.monotonic() - begun, 1)
    directory = Path(options.results or (GPU_RESULTS if options.gpu else RESULTS))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    write_report(results, directory)
    say(f"{results['seconds']:.0f} s; see {directory / 'README.md'}")
    return 0


def _chosen(options: argparse.Namespace) -> tuple[tuple[Group, ...], float]:
    """The cells, and the seconds that they may take."""
    if options.gpu:
        return GPU_SMOKE if options.smoke else GPU, GPU_BUDGET
    return FULL if options.full else SMOKE if options.smoke else QUICK, BUDGET


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="weights on a GPU, and nothing else; in some six minutes")
    parser.add_argument(
        "--full", action="store_true", help="every cell; takes hours. On a GPU: all turns of all systems"
    )
    parser.add_argument("--smoke", action="store_true", help="the smallest pieces, to see that everything works")
    parser.add_argument("--only", default="", metavar="TEXT", help="the cells whose name contains this, as 'view gpt2'")
    parser.add_argument("--systems", default="", metavar="A,B", help=f"of {','.join(MODULES)}")
    parser.add_argument("--blocks", type=int, default=2, help="how often each system has its turn at a cell")
    parser.add_argument("--seconds", type=float, default=0.7, help="of measuring in a turn")
    parser.add_argument("--results", default="", help="where results and report go")
    return parser.parse_args()


def _timed(cells: Group, systems: list[System], options: argparse.Namespace, due: float) -> list[dict[str, Any]]:
    """All systems at all of these cells in turn, so that what drifts drifts for all."""
    runs: dict[tuple[Cell, str], list[Measured]] = {}
    took: dict[tuple[Cell, str], float] = {}
    for _ in range(options.blocks):
        for cell, system in itertools.product(cells, systems):
            key = cell, system.name
            before = runs.setdefault(key, []) if system.can(cell) else None
            if before is None or (before and before[-1].failed):
                continue
            if not options.full and system.name in SLOW.get(str(cell), ()):
                before.append(Measured(failed=SLOWLY))
                took[key] = 0.0
                continue
            if before and not options.full and _enough(*key, took[key], due):
                continue
            if not before and not options.full and _hopeless(*key, due):
                before.append(Measured(failed=BEHIND))
                took[key] = 0.0
                continue
            begun = time.monotonic()
            before.append(measure(system, cell, Effort(seconds=options.seconds)))
            took[key] = took.get(key, 0.0) + time.monotonic() - begun
    shown: list[dict[str, Any]] = []
    for cell in cells:
        done = {name: blocks for (of, name), blocks in runs.items() if of == cell}
        rows = {name: _row(blocks) | {"took": round(took[cell, name], 2)} for name, blocks in done.items()}
        shown.append({**asdict(cell), "systems": rows})
        say(f"  {cell}")
        for name, row in rows.items():
            flat = sorted(seconds for block in row["blocks"] for seconds in block)
            text = f"median {flat[len(flat) // 2] * 1e3:.3f} ms of {len(flat)}" if flat else ""
            text += f", the first {row['first'] * 1e3:.3f}" if row["first"] is not None else ""
            say(f"    {name:12} {text} {'FAILED: ' + row['failed'] if row['failed'] else ''}")
    return shown


def _enough(cell: Cell, name: str, took: float, due: float) -> bool:
    """Does one turn of this system do? A slow one is far behind, and a second would tell little more."""
    behind = time.monotonic() > due
    return cell.busy or (cell.kind.on_device and behind) or (_is_peer(name) and (took > ENOUGH or behind))


def _hopeless(cell: Cell, name: str, due: float) -> bool:
    """Is there no time for even one turn? Only asked on a GPU, which may be lent for some minutes."""
    return cell.kind.on_device and _is_peer(name) and time.monotonic() > due


def _is_peer(name: str) -> bool:
    return name not in (*BOUNDS, OURS)


def _row(blocks: list[Measured]) -> dict[str, Any]:
    """One system at one cell."""
    firsts = [block.first for block in blocks if block.first is not None]
    failed = next((block.failed for block in blocks if block.failed), "")
    return {
        "blocks": [block.seconds for block in blocks], "first": median(firsts) if firsts else None, "failed": failed,
    }  # fmt: skip


def _memory(cell: Cell, systems: list[System], options: argparse.Namespace) -> dict[str, Any]:
    """What the processes of each system take."""
    rows: dict[str, Any] = {}
    for system in systems:
        slow = not options.full and system.name in SLOW.get(str(cell), ())
        if system.can(cell) and not slow:
            begun = time.monotonic()
            row = measure_memory(system, cell)
            rows[system.name] = row | {"took": round(time.monotonic() - begun, 2)}
            text = f"FAILED: {row['failed']}" if row["failed"] else (
                f"{row['pss'] / 1e6:.1f} MB beyond idle, {row['kept'] / 1e6:.1f} kept for versions; "
                f"a reader: {row['dirty'] / 1e6:.2f} MB written of its own"
            )  # fmt: skip
            say(f"    {system.name:12} {text}")
    return {**asdict(cell), "systems": rows}


def _loops(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """How late callbacks come on busync's users' loops."""
    begun = time.monotonic()
    row = measure_loops(cell, 3 * options.seconds)
    row["took"] = round(time.monotonic() - begun, 2)
    if row["failed"]:
        say(f"    FAILED: {row['failed']}")
    else:
        for role in ("learner", "actor"):
            late = row[role]
            say(f"    {role:12} {late['callbacks']} callbacks late by p99 {late['p99'] * 1e3:.2f}, "
                f"at most {late['max'] * 1e3:.2f} ms")  # fmt: skip
    return {**asdict(cell), "systems": {OURS: row}}


def _installed(names: list[str], groups: list[Group]) -> tuple[list[System], dict[str, str]]:
    """Of those that have something to do."""
    systems, missing = [], {}
    for name in names:
        system = find(name)
        if not any(system.can(cell) for group in groups for cell in group):
            continue
        if any(importlib.util.find_spec(module) is None for module in system.needs):
            missing[name] = f"{', '.join(system.needs)} is not installed (make bench-peers)"
        else:
            systems.append(system)
    return systems, missing


def _machine(gpu: bool) -> dict[str, Any]:
    about = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in about if "model name" in line), platform.machine())
    commit = subprocess.run(
        ("git", "describe", "--always", "--dirty"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    device = {"device": f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"} if gpu else {}
    return {
        **device,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": _versions(),
        "commit": commit.stdout.strip(),
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def _versions() -> dict[str, str]:
    """Of what is installed."""
    versions = {}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


if __name__ == "__main__":
    multiprocessing.get_context("forkserver").set_forkserver_preload(["bench.preload"])
    sys.exit(main())
