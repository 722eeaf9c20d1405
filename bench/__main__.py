"""busync and others at the same work, in one run: ``python -m bench [--full] [--only TEXT] [--systems A,B]``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.cells import FULL, QUICK, SMOKE
from bench.one import Effort, Measured, measure
from bench.report import write_report
from bench.systems import MODULES, find
from bench.systems.base import Cell, System

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "bench" / "results"
VERSIONS: Final = ("torch", "pyzmq", "msgpack", "msgspec", "uvloop", "safetensors", "torchrl", "ray")


def main() -> int:
    """Measure, print as it goes, and write results and report."""
    options = _options()
    chosen = FULL if options.full else SMOKE if options.smoke else QUICK
    cells = [cell for cell in chosen if options.only in str(cell)]
    names = options.systems.split(",") if options.systems else list(MODULES)
    systems, missing = _installed(names)
    for name, why in missing.items():
        say(f"{name} is skipped: {why}")
    results: dict[str, Any] = {"machine": _machine(), "missing": missing, "cells": []}
    begun = time.monotonic()
    for number, cell in enumerate(cells, 1):
        say(f"[{number}/{len(cells)}, {time.monotonic() - begun:.0f} s] {cell}")
        results["cells"].append(_run_cell(cell, systems, options))
    results["seconds"] = round(time.monotonic() - begun, 1)
    directory = Path(options.results)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    write_report(results, directory)
    say(f"{results['seconds']:.0f} s; see {directory / 'README.md'}")
    return 0


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--full", action="store_true", help="every cell; takes hours")
    parser.add_argument("--smoke", action="store_true", help="the smallest pieces, to see that everything works")
    parser.add_argument("--only", default="", metavar="TEXT", help="the cells whose name contains this, as 'view gpt2'")
    parser.add_argument("--systems", default="", metavar="A,B", help=f"of {','.join(MODULES)}")
    parser.add_argument("--blocks", type=int, default=2, help="how often each system has its turn at a cell")
    parser.add_argument("--seconds", type=float, default=0.7, help="of measuring in a turn")
    parser.add_argument("--results", default=str(RESULTS), help="where results and report go")
    return parser.parse_args()


def _run_cell(cell: Cell, systems: list[System], options: argparse.Namespace) -> dict[str, Any]:
    """All systems in turn, so that what drifts drifts for all."""
    runs: dict[str, list[Measured]] = {}
    for _ in range(options.blocks):
        for system in systems:
            if cell.mode not in system.modes and system.name != "limit":
                continue
            if cell.processes and not system.spread and system.name != "limit":
                continue
            before = runs.setdefault(system.name, [])
            if before and before[-1].failed:
                continue
            before.append(measure(system, cell, Effort(seconds=options.seconds)))
    shown: dict[str, Any] = {}
    for name, blocks in runs.items():
        seconds = [block.seconds for block in blocks]
        failed = next((block.failed for block in blocks if block.failed), "")
        shown[name] = {"blocks": seconds, "first": blocks[0].first, "failed": failed}
        flat = sorted(s for block in seconds for s in block)
        text = f"median {flat[len(flat) // 2] * 1e3:.3f} ms of {len(flat)}" if flat else ""
        say(f"    {name:10} {text} {'FAILED: ' + failed if failed else ''}")
    return {**asdict(cell), "systems": shown}


def _installed(names: list[str]) -> tuple[list[System], dict[str, str]]:
    systems, missing = [], {}
    for name in names:
        system = find(name)
        if any(importlib.util.find_spec(module) is None for module in system.needs):
            missing[name] = f"{', '.join(system.needs)} is not installed (make bench-peers)"
        else:
            systems.append(system)
    return systems, missing


def _machine() -> dict[str, Any]:
    about = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in about if "model name" in line), platform.machine())
    commit = subprocess.run(
        ("git", "describe", "--always", "--dirty"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
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
