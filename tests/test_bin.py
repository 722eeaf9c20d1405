"""``bin/busync-pub`` and ``bin/busync-sub`` of a checkout, as processes."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ["busync-pub", "busync-sub"]


@pytest.mark.parametrize("command", COMMANDS)
def test_it_runs_from_any_directory_through_a_link(command: str, tmp_path: Path) -> None:
    (tmp_path / command).symlink_to(ROOT / "bin" / command)
    run = subprocess.run(
        [sys.executable, tmp_path / command, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(f"Usage: {command} ")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_python_without_the_dependencies_says_what_to_do(command: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "bin" / command, tmp_path / "bin")
    run = subprocess.run(
        [sys.executable, "-S", tmp_path / "bin" / command], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert run.stderr.startswith(f"{command}: ")
    assert run.stderr.endswith(f"lacks busync's dependencies; run `make venv` in {tmp_path}\n")
    assert run.stderr.count("\n") == 1


def test_a_python_without_the_dependencies_hands_over_to_the_venv(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "bin" / "busync-pub", tmp_path / "bin")
    stand_in = tmp_path / ".venv" / "bin" / "python"
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o755)
    run = subprocess.run(
        [sys.executable, "-S", tmp_path / "bin" / "busync-pub", "a", "b c"], capture_output=True, text=True, check=True
    )
    assert run.stdout == f"{tmp_path}/bin/busync-pub a b c\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_is_still_starting_is_a_tidy_end(number: int, tmp_path: Path) -> None:
    (tmp_path / "w.pt").touch()
    arguments = [str(tmp_path / "bus"), str(tmp_path / "w.pt"), "--watch"]
    process = subprocess.Popen(
        [sys.executable, ROOT / "bin" / "busync-pub", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:  # until it handles the signal; importing torch takes long after that
            caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
            if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
                break
            time.sleep(0.01)
        time.sleep(0.2)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert b"serving" not in out
