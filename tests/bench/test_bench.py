"""Every system of the benchmarks does its work, on the smallest pieces: here nothing is timed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.__main__ import _enough
from bench.busy import share
from bench.cells import FULL, QUICK
from bench.loops import Ticker, summary
from bench.memory import Size, allowed_bytes
from bench.states import KINDS, Holder, prove, stamp
from bench.systems import MODULES, find
from bench.systems.base import Cell

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120)  # it takes 20 s, and a busy machine is no reason to fail
def test_everything_once(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "bench", "--smoke", "--blocks", "1", "--seconds", "0", "--results", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    cells = results["cells"]
    failed = {(cell["mode"], name): row["failed"] for cell in cells for name, row in cell["systems"].items()}
    assert set(failed.values()) == {""}, failed
    assert {name for _, name in failed} == set(MODULES) - set(results["missing"]) - {"staging"}
    assert set(results["missing"]) <= {"torchrl", "ray"}
    for cell in cells:
        assert all(2 <= len(block) <= 5 for row in cell["systems"].values() for block in row["blocks"])
        assert "busync" in cell["systems"]
    assert {cell["busy"] for cell in cells} == {True, False}
    (memory,), (loops,) = results["memory"], results["loops"]
    assert {row["failed"] for row in memory["systems"].values()} == {""}, memory
    assert all(row["pss"] > 0 for row in memory["systems"].values())
    assert set(memory["systems"]) == set(MODULES) - set(results["missing"]) - {"limit", "floor", "ray", "staging"}
    row = loops["systems"]["busync"]
    assert not row["failed"]
    assert row["versions"] >= 12
    assert all(row[role]["callbacks"] > 0 for role in ("learner", "actor"))
    text = (tmp_path / "README.md").read_text()
    headings = ("What it must show", "Memory", "How late callbacks come", "Where the time went", "read cartpole 2 busy")
    for heading in (*headings, "view cartpole 5 in 2 processes"):
        assert f"## {heading}\n" in text


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


def test_a_loop_that_is_held_makes_every_callback_late_that_was_due() -> None:
    async def hold() -> list[float]:
        ticker = Ticker()
        await asyncio.sleep(0.01)
        time.sleep(0.05)  # noqa: ASYNC251
        return ticker.stop()

    late = asyncio.run(hold())
    assert sum(seconds > 0.025 for seconds in late) >= 20
    assert max(late) >= 0.045


def test_percentiles_are_of_all_callbacks() -> None:
    assert summary([0.001] * 98 + [0.5, 0.7]) == {"callbacks": 100, "p50": 0.001, "p99": 0.5, "max": 0.7}
    assert summary([]) == {"callbacks": 0}


def test_a_process_has_the_size_of_what_it_wrote() -> None:
    before = Size.of(os.getpid())
    block = bytearray(b"x" * 30_000_000)
    grown = Size.of(os.getpid()) - before
    del block
    assert grown.pss == pytest.approx(30e6, rel=0.2)
    assert grown.dirty == pytest.approx(30e6, rel=0.2)


def test_what_may_be_taken_follows_from_the_pool_and_the_views() -> None:
    cell = Cell(mode="memory", state="gpt2", readers=16)
    each = 2e6 + 148 * 1e3 + 0.002 * cell.kind.nbytes
    assert allowed_bytes(cell, 10**9) == pytest.approx(1e9 + 17 * each)


@pytest.mark.parametrize(("threads", "processes"), [(2, 4), (8, 4), (9, 4), (1, 1)])
def test_there_is_one_busy_thread_for_each_core(threads: int, processes: int) -> None:
    shares = [share(threads, processes, number) for number in range(processes)]
    assert sum(shares) == threads
    assert max(shares) - min(shares) <= 1


def test_what_readers_have_of_their_own_is_counted_before_it_is_taken() -> None:
    view, load = (Cell(mode=mode, state="lm", readers=16) for mode in ("view", "load"))
    least = view.kind.nbytes * 16
    assert find("busync").needs_bytes(view) < least < find("gloo").needs_bytes(view) < find("zmq").needs_bytes(view)
    assert find("busync").needs_bytes(load) > least


def test_the_bounds_can_be_measured_from_the_cells() -> None:
    """Else a line of the table of bounds would stay empty for ever."""
    for groups in (QUICK, FULL):
        names = {str(cell) for group in groups for cell in group}
        assert names >= {
            "view gpt2 4", "view gpt2 4 busy", "loan cartpole 4", "loan lm 4", "view many 4", "view cartpole 16",
            "view cartpole 64", "view cartpole 64 in 8 processes", "view cartpole 1000 in 8 processes",
            "memory gpt2 16", "loops lm 1",
        }  # fmt: skip
        assert sum(len(group) for group in groups) == len(names), "a cell is there twice"


@pytest.mark.parametrize(
    ("name", "took", "behind", "enough"),
    [("gloo", 4.0, False, False), ("gloo", 6.0, False, True), ("gloo", 4.0, True, True), ("busync", 6.0, True, False)],
)
def test_a_slow_peer_gets_no_second_turn(name: str, took: float, behind: bool, enough: bool) -> None:
    due = time.monotonic() + (-1 if behind else 60)
    assert _enough(Cell(mode="view", state="gpt2", readers=4), name, took, due) is enough
    assert _enough(Cell(mode="view", state="gpt2", readers=4, busy=True), name, took, due)
