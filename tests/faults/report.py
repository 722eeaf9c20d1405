"""The figures of a run."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import zmq

from tests.faults.page import KINDS
from tests.faults.stage import Totals


def shmem_bytes() -> int:
    """Shared memory of the whole machine, memfds included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass(slots=True)
class Report:
    """What is printed, and written to a file."""

    seeds: list[int] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    rounds: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    shmem_before: int = 0
    shmem_after: int = 0

    @property
    def steps(self) -> int:
        return sum(self.totals.faults.values())

    @property
    def kills(self) -> int:
        return sum(count for kind, count in self.totals.faults.items() if "SIGKILL" in kind)

    def as_json(self) -> dict[str, Any]:
        t = self.totals
        return {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": {"cores": os.cpu_count(), "kernel": platform.release(), "root": os.geteuid() == 0},
            "versions": {
                "python": platform.python_version(), "torch": torch.__version__, "pyzmq": zmq.__version__,
                "libzmq": zmq.zmq_version(),
            },
            "seeds": self.seeds, "rounds": self.rounds, "seconds": round(self.seconds, 1),
            "fault_steps": self.steps, "kills": self.kills,
            "by_kind": {kind: t.faults[kind] for kind in KINDS},
            **{name.replace(" ", "_"): count for name, count in sorted(t.numbers.items())},
            "slowest_publish_s": round(t.slowest_publish, 4), "slowest_wait_for_a_segment_s": round(t.slowest_wait, 4),
            "most_beyond_lease_timeout_s": round(t.over_lease, 4),
            "slowest_operation": {"s": round(t.slowest_op[0], 3), "name": t.slowest_op[1]},
            "leaks": sum("left" in f or "leak" in f for f in self.failures),
            "shmem_before_bytes": self.shmem_before, "shmem_after_bytes": self.shmem_after,
            "failures": self.failures,
        }  # fmt: skip

    def text(self) -> str:
        figures = self.as_json()
        lines = [f"seeds {self.seeds}, {self.rounds} rounds, {self.seconds:.0f} s"]
        lines += [f"{count:8d}  {kind}" for kind, count in figures["by_kind"].items()]
        lines.append(f"{self.steps:8d}  fault steps, {self.kills} of them SIGKILL")
        for name in ("publishes", "attachments", "adoptions", "elements", "wrong", "leaks", "ended by libzmq"):
            lines.append(f"{figures.get(name.replace(' ', '_'), 0):8d}  {name}")
        lines.append(
            f"slowest publish {figures['slowest_publish_s']} s; longest wait for a segment "
            f"{figures['slowest_wait_for_a_segment_s']} s; most beyond lease_timeout "
            f"{figures['most_beyond_lease_timeout_s']} s"
        )
        lines.append(f"shared memory before {self.shmem_before} bytes, after {self.shmem_after}")
        lines.append(f"{len(self.failures)} failures")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(), indent=1))
