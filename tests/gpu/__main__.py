"""python -m tests.gpu: every test marked ``gpu`` on a real GPU, and the figures of the run in a file.

The figures are those of the handles alone: what an export, an import and a copy cost on this device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
TESTS = ["tests/gpu", "tests/e2e", "tests/field_reports"]
TESTS_TIMEOUT, FIGURES_TIMEOUT = 380, 90  #: seconds; together less than 8 minutes


def main() -> int:
    if not torch.cuda.is_available():
        print(  # noqa: T201
            f"NOT RUN: torch {torch.__version__} finds no CUDA device here, so nothing about GPUs was tested.\n"
            "Run this where there is one, with a CUDA build of torch (make test-gpu GPU_PYTHON=...).",
            file=sys.stderr,
        )
        return 1
    out = Path(os.environ.get("GPU_FIGURES") or "gpu-figures.json").resolve()
    emulated = "cudaemu" in os.environ.get("LD_PRELOAD", "")
    begun = time.monotonic()
    junit = out.with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *TESTS, f"--junit-xml={junit}"]
    try:
        code = subprocess.run(command, cwd=ROOT, check=False, timeout=TESTS_TIMEOUT).returncode
    except subprocess.TimeoutExpired:
        code = 124
    figures = {
        "device": "emulated: no figure means anything" if emulated else torch.cuda.get_device_name(0),
        "devices": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "exit_code": code,
        "seconds": round(time.monotonic() - begun, 1),
        "handles": measure(),
    }
    out.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"figures in {out}, each test in {junit}")  # noqa: T201
    return code


def measure() -> dict[str, float]:
    """In processes of their own: microseconds, and gigabytes per second of one device-to-device publish."""
    code = "import json; from tests.gpu.figures import measure; print(json.dumps(measure()))"
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=FIGURES_TIMEOUT)
    except subprocess.TimeoutExpired:
        return {}
    if done.returncode:
        print(done.stderr, file=sys.stderr)  # noqa: T201
        return {}
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main())
