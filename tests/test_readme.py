"""The README's example runs as it stands, as two programs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def programs() -> dict[str, str]:
    """The README's python blocks that follow a file name, by that name."""
    text = (ROOT / "README.md").read_text()
    return dict(re.findall(r"`(\w+\.py)`[^\n]*\n\n```python\n(.*?)```", text, re.DOTALL))


def test_the_example_runs(tmp_path: Path) -> None:
    """A learner and an actor, started by hand, end by themselves with the last version adopted."""
    files = programs()
    assert set(files) == {"learner.py", "actor.py"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "BUSYNC_RUNTIME_DIR": str(tmp_path / "run"), "PYTHONWARNINGS": "error"}
    running = [
        subprocess.Popen(
            [sys.executable, tmp_path / name],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("actor.py", "learner.py")
    ]
    try:
        ended = [process.communicate(timeout=40) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0, 0], ended
    assert [errors for _, errors in ended] == ["", ""]
    versions = [line.split() for line in ended[0][0].splitlines()]
    assert versions[-1] == ["100", "step-99", "99.0"]
    numbers = [int(version) for version, _, _ in versions]
    assert numbers == sorted(set(numbers))
    assert all(float(weight) == int(number) - 1 for number, _, weight in versions)


def test_the_second_example_is_valid_python() -> None:
    """The in-place line parses."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for block in blocks:
        compile(block, "README.md", "exec")
