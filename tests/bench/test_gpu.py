"""The GPU cells: that every system does its work on a tiny kind, on a GPU or the emulated runtime. Nothing is timed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.__main__ import _enough, _hopeless
from bench.cells import GPU, GPU_SMOKE
from bench.one import _ensure_room
from bench.report import write_report
from bench.states import KINDS
from bench.systems import MODULES, find
from bench.systems.base import Cell, Mode, SystemFailed
from bench.targets import Target, targets
from bench.works import Results
from tests.bench.test_targets import cell, found, row

ROOT = Path(__file__).parents[2]
ON_GPU = {name for name in MODULES if find(name).gpu_modes}

#: That a version which did not arrive is noticed: the copy that was sent holds another number.
STALE = """
import torch
from bench.states import KINDS, fetched, prove, stamp
names = ["block_0.part_0", "block_0.part_8"]
state = KINDS["g0"].make()
stamp(state, 1)
prove(fetched(state, names), names, 1)
stamp({names[1]: state[names[1]]}, 2)
try:
    prove(fetched(state, names), names, 1)
except AssertionError as error:
    print(error)
"""

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
    pytest.mark.timeout(240),  # it takes 25 s on two cores, and a busy machine is no reason to fail
]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")


def with_gpu(test: Any) -> Any:
    for mark in gpu:
        test = mark(test)
    return test


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, *arguments)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False)


@with_gpu
def test_every_system_once(tmp_path: Path) -> None:
    done = python("-m", "bench", "--gpu", "--smoke", "--full", "--blocks", "1", "--seconds", "0", "--results",
                  str(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    names: dict[tuple[str, int], set[str]] = {}
    for shown in results["cells"]:
        for name, measured in shown["systems"].items():
            assert not measured["failed"], (shown, name, measured, done.stderr)
            assert all(2 <= len(block) <= 5 for block in measured["blocks"])
            names.setdefault((shown["mode"], shown["readers"]), set()).add(name)
    views, loans = ({("view", readers): ON_GPU for readers in (1, 2)}, {("loan", n): {"busync"} for n in (1, 2)})
    assert names == views | loans
    text = (tmp_path / "README.md").read_text()
    assert f"- GPU: {torch.cuda.get_device_name(0)}" in text
    assert "## loan g0 2\n" in text


@with_gpu
def test_one_cell_by_itself() -> None:
    done = python("-m", "bench.one", "busync", "view", "g0", "2", "--seconds", "0", "--most", "3")
    assert done.returncode == 0, done.stderr
    assert "view g0 2: median" in done.stdout


@with_gpu
def test_a_value_on_the_gpu_that_is_not_the_one_expected_is_noticed() -> None:
    assert "block_0.part_8 holds 2 and 2, not 1" in python("-c", STALE).stdout


@without_gpu
@pytest.mark.timeout(120)
def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path: Path) -> None:
    done = python("-m", "bench", "--gpu", "--results", str(tmp_path))
    assert done.returncode == 1
    assert done.stdout.startswith("NOT RUN: torch")
    assert list(tmp_path.iterdir()) == []
    one = python("-m", "bench.one", "busync", "view", "g1", "4")
    assert (one.returncode, one.stdout) == (1, "")
    assert "finds no CUDA device here" in one.stderr


@pytest.mark.parametrize(("name", "tensors", "gigabytes"), [("g1", 300, 1), ("g4", 1000, 4), ("g16", 3000, 16)])
def test_states_are_what_they_are_called(name: str, tensors: int, gigabytes: float) -> None:
    kind = KINDS[name]
    assert (kind.tensors, kind.dtype, kind.on_device) == (tensors, torch.bfloat16, True)
    assert kind.nbytes / 1e9 == pytest.approx(gigabytes, rel=0.001)


def test_every_cell_is_there_once() -> None:
    cells = [str(cell) for group in GPU for cell in group]
    expected = {
        f"{mode} {state} {n}" for mode in ("view", "loan") for state in ("g1", "g4", "g16") for n in (1, 2, 4, 8)
    }
    assert (len(cells), set(cells)) == (24, expected)


def test_systems_that_know_no_gpu_are_left_out() -> None:
    view, loan = GPU_SMOKE[0]
    assert {name for name in MODULES if find(name).can(view)} == {"limit", "floor", "busync", "queues", "staging"}
    assert {name for name in MODULES if find(name).can(loan)} == {"busync"}
    assert not find("staging").can(Cell(mode="view", state="cartpole", readers=1))


@pytest.mark.parametrize(
    ("name", "readers", "fits"), [("busync", 8, True), ("staging", 4, True), ("staging", 8, False)]
)
def test_what_does_not_fit_into_the_device_is_not_started(
    monkeypatch: pytest.MonkeyPatch, name: str, readers: int, fits: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (140e9, 141e9))
    monkeypatch.setattr("bench.one.available_bytes", lambda: 128 << 30)
    monkeypatch.setattr("bench.one.RETURN", 0.2)
    work = Cell(mode="view", state="g16", readers=readers)
    if fits:
        _ensure_room(find(name), work)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (16e9, 141e9))
    with pytest.raises(SystemFailed, match=r"it takes about \d+\.\d GB of the device's memory, and \d+\.\d are there"):
        _ensure_room(find(name), work)


def test_a_device_gets_time_to_take_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter((70e9, 70e9, 140e9))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (next(free), 141e9))
    _ensure_room(find("busync"), Cell(mode="view", state="g16", readers=8))
    assert next(free, None) is None


def test_the_hosts_memory_counts_where_weights_go_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.one.available_bytes", lambda: 32 << 30)
    with pytest.raises(SystemFailed, match="GB of memory, and"):
        _ensure_room(find("staging"), Cell(mode="view", state="g16", readers=1))


@pytest.mark.parametrize("behind", [False, True])
def test_behind_its_pace_a_run_leaves_out_what_it_can(behind: bool) -> None:
    due = time.monotonic() + (-1 if behind else 60)
    modes: tuple[Mode, ...] = ("view", "loan")
    for work in (Cell(mode=mode, state="g1", readers=1) for mode in modes):
        assert _enough(work, "busync", 3.0, due) is behind
        assert _hopeless(work, "queues", due) is behind
        assert not _hopeless(work, "busync", due)
        assert not _hopeless(work, "floor", due)
    assert not _hopeless(Cell(mode="view", state="gpt2", readers=1), "queues", due)


@pytest.mark.parametrize(("ours", "met"), [(1.39, True), (1.41, False)])
def test_a_view_has_a_bound_on_the_gpu(ours: float, met: bool) -> None:
    work = cell("view g4 2", limit=row(1.0), floor=row(0.2), busync=row(ours))
    target = found("1.2 x limit", work)
    assert (target.met, target.measured) == (met, f"{ours / 1.4:.{3 if met else 2}f} (view g4 2)")


def test_a_loan_has_a_bound_whatever_its_size() -> None:
    quick, slow = (cell(f"loan {state} 2", busync=row(took)) for state, took in (("g1", 0.001), ("g16", 0.0035)))
    assert found("loan: busync, in ms", quick).met is True
    what, floors = "GPU, loan: busync, in ms", [cell("view g16 2", floor=row(0.002))]
    assert found(what, quick, slow) == Target(what, "at most 2", "3.50 (loan g16 2, the worst of 2)", False)
    assert found("less the floor", quick, slow).met is None
    beyond = found("less the floor", quick, slow, *floors)
    assert (beyond.measured, beyond.met) == ("1.50 (loan g16 2)", True)
    failed = cell("loan g16 2", busync=row(0.001, failed="no room"))
    assert found(what, failed).met is False
    assert found("less the floor", failed, *floors).met is False


def test_a_gpus_bounds_are_not_mixed_with_those_of_the_cpu() -> None:
    assert all("GPU" in target.what for target in targets(Results.of({"cells": [cell("view g1 1")]})))
    assert not any("GPU" in target.what for target in targets(Results.of({"cells": [cell("view gpt2 4")]})))


def test_the_report_says_which_gpu_it_was_and_what_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    late: dict[str, Any] = {"blocks": [[]], "first": None, "failed": "left out, for the run was behind its pace"}
    works = [cell("view g1 2", limit=row(1.0), floor=row(0.2), busync=row(1.0), queues=late)]
    machine = {
        "device": "Some_GPU, CUDA 13.0", "cpu": "cpu", "cores": 2, "memory_bytes": 8 << 30, "kernel": "6.1",
        "python": "3.11", "versions": {}, "commit": "abc", "load": 0.5, "date": "2026-01-02",
    }  # fmt: skip
    write_report({"cells": works, "machine": machine}, tmp_path)
    text = (tmp_path / "README.md").read_text()
    for part in ("- GPU: Some\\_GPU, CUDA 13.0", "- queues failed: left out, for", "are on one GPU", "1 of 1 bounds"):
        assert part in text
