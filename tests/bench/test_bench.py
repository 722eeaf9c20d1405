"""Every system of the benchmarks does its work, on the smallest pieces: here nothing is timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.states import KINDS, Holder, prove, stamp
from bench.systems import MODULES

ROOT = Path(__file__).parents[2]


def test_everything_once(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "bench", "--smoke", "--blocks", "1", "--seconds", "0", "--results", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    cells = results["cells"]
    failed = {(cell["mode"], name): row["failed"] for cell in cells for name, row in cell["systems"].items()}
    assert set(failed.values()) == {""}, failed
    assert {name for _, name in failed} == set(MODULES) - set(results["missing"])
    assert set(results["missing"]) <= {"torchrl", "ray"}
    for cell in cells:
        assert all(len(block) == 5 for row in cell["systems"].values() for block in row["blocks"])
        assert "busync" in cell["systems"]
    assert "## view cartpole 5 in 2 processes" in (tmp_path / "README.md").read_text()


def test_a_state_that_is_not_the_one_expected_is_noticed() -> None:
    state = KINDS["cartpole"].make()
    stamp(state, 1)
    prove(state, ["0.weight"], 1)
    with pytest.raises(AssertionError, match=r"0\.weight holds 1 and 1, not 2"):
        prove(state, ["0.weight"], 2)


@pytest.mark.parametrize(
    ("name", "tensors", "megabytes"),
    [("cartpole", 6, 0.02), ("atari", 10, 6.7), ("gpt2", 148, 498), ("lm", 290, 988), ("many", 5000, 200)],
)
def test_states_are_what_they_are_called(name: str, tensors: int, megabytes: float) -> None:
    assert KINDS[name].tensors == tensors
    assert KINDS[name].nbytes / 1e6 == pytest.approx(megabytes, rel=0.1)


def test_a_module_has_the_names_of_its_state() -> None:
    kind = KINDS["cartpole"]
    assert list(Holder(kind.make()).state_dict()) == [name for name, _ in kind.shapes()]
