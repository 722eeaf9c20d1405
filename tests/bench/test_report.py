from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.report import write_report
from bench.works import Work

Systems = dict[str, dict[str, Any]]

MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None

PLAIN: Systems = {
    "limit": {"blocks": [[0.001] * 3, [0.002] * 3], "first": 0.004, "failed": ""},
    "floor": {"blocks": [[0.003] * 3, [0.006] * 3], "first": 0.005, "failed": ""},
    "busync": {"blocks": [[0.008] * 3, [0.016] * 3], "first": 0.02, "failed": ""},
    "slow": {"blocks": [[0.024] * 3, [0.048] * 3], "first": None, "failed": ""},
}
FAILED: Systems = {"broken": {"blocks": [[]], "first": None, "failed": "OSError: no | more\n<room>"}}
MACHINE = {
    "cpu": "A_cpu", "cores": 2, "memory_bytes": 8 << 30, "kernel": "6.1", "python": "3.11.8",
    "versions": {"torch": "2.6.0"}, "commit": "abc1234", "load": 0.5, "date": "2025-01-02",
}  # fmt: skip


def cell(systems: Systems, mode: str = "view", state: str = "cartpole", readers: int = 4) -> dict[str, Any]:
    return {"mode": mode, "state": state, "readers": readers, "processes": 0, "systems": systems}


def steady(seconds: float) -> dict[str, Any]:
    return {"blocks": [[seconds] * 3] * 2, "first": seconds, "failed": ""}


@pytest.fixture(autouse=True)
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def report(directory: Path, *cells: dict[str, Any], **more: Any) -> str:
    write_report({"cells": list(cells), **more}, directory)
    return (directory / "README.md").read_text()


def line(text: str, start: str) -> list[str]:
    found = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return found.strip("| ").split(" | ")


def test_ratios_are_taken_block_by_block() -> None:
    drifting = {
        "a": {"blocks": [[1.0, 1.0, 9.0], [10.0], [100.0]], "first": 1.0, "failed": ""},
        "b": {"blocks": [[2.0], [20.0, 20.0], [400.0] * 50], "first": 1.0, "failed": ""},
    }
    work = Work.of(**cell(drifting))
    assert work.ratio("b", "a") == 2.0  # 2, 2 and 4; that of the medians over all is 400 / 9.5
    assert work.ratio("b", "a", "b") == pytest.approx(2 / 3)


def test_a_turn_that_one_of_two_missed_is_left_out_of_their_ratio() -> None:
    works = {"a": {"blocks": [[1.0], []], "first": 1.0, "failed": "gone"}, "b": steady(3.0)}
    assert Work.of(**cell(works)).ratio("b", "a") == 3.0


def test_a_cell_has_a_row_for_each_system(tmp_path: Path) -> None:
    text = report(tmp_path, cell(PLAIN))
    assert line(text, "**busync**") == ["**busync**", "12.0", "16.0", "16.0", "6", "20.0", "8.00", "2.67", "1.00"]
    assert line(text, "slow") == ["slow", "36.0", "48.0", "48.0", "6", "–", "24.0", "8.00", "3.00"]
    assert "busync / (limit + floor): 2.00." in text


def test_the_summary_comes_first_and_names_the_fastest_peer(tmp_path: Path) -> None:
    text = report(tmp_path, cell(PLAIN | {"slower": steady(1.0)}), machine=MACHINE, missing={"ray": "not installed"})
    expected = ["view cartpole 4", "1.50", "4.50", "12.0", "2.00", "2.67", "slow (3.00 times as long as busync)"]
    assert line(text, "view cartpole 4") == expected
    assert text.index("| view cartpole 4") < text.index("What was measured") < text.index("## view cartpole 4")
    assert "busync is the fastest in 1 of 1 cells" in text
    assert "**ray** was not measured: not installed" in text
    assert "A\\_cpu, 2 cores, 8.0 GiB" in text


def test_peers_ahead_are_named(tmp_path: Path) -> None:
    quick: Systems = {name: {"blocks": [[at], [at * 2]], "first": at, "failed": ""} for name, at in
                      (("quick", 0.004), ("quicker", 0.002))}  # fmt: skip
    text = report(tmp_path, cell(PLAIN | quick), cell(PLAIN, state="gpt2"))
    assert "busync is the fastest in 1 of 2 cells" in text
    assert "- view cartpole 4: **ahead: quicker (0.250 of busync), quick (0.500 of busync)**" in text
    assert line(text, "view cartpole 4")[-1].startswith("**ahead: quicker")


def test_a_failed_system_is_shown_with_its_text(tmp_path: Path) -> None:
    late = {"late": {"blocks": [[0.1], []], "first": 0.1, "failed": "not done within 240 s"}}
    text = report(tmp_path, cell(PLAIN | FAILED | late))
    assert line(text, "broken") == ["broken", "failed", "–", "–", "0", "–", "–", "–", "–"]
    assert "- broken failed: OSError: no \\| more \\<room\\>" in text
    assert line(text, "late")[1] == "100, then failed"
    assert "- late failed: not done within 240 s" in text


@pytest.mark.parametrize("name", ["limit", "floor"])
def test_without_a_bound_there_is_no_ratio_to_it(tmp_path: Path, name: str) -> None:
    text = report(tmp_path, cell({key: value for key, value in PLAIN.items() if key != name}))
    assert line(text, "view cartpole 4")[4] == "–"
    assert "busync / (limit + floor): –." in text
    assert line(text, "slow")[6:] == (["–", "8.00", "3.00"] if name == "limit" else ["24.0", "–", "3.00"])


def test_where_busync_failed_a_peer_is_ahead(tmp_path: Path) -> None:
    failed = {"busync": {**PLAIN["busync"], "blocks": [[]], "failed": "no room"}}
    assert line(report(tmp_path, cell(PLAIN | failed)), "view cartpole 4")[3:] == (
        ["failed", "–", "–", "**ahead: slow** (busync failed)"]
    )
    late = {"busync": {**PLAIN["busync"], "failed": "no room"}}
    text = report(tmp_path, cell(PLAIN | late))
    assert "busync is the fastest in 0 of 1 cells" in text
    assert line(text, "view cartpole 4")[-1] == "**ahead: slow (3.00 of busync)** (busync failed)"


def test_without_peers_it_says_so(tmp_path: Path) -> None:
    text = report(tmp_path, cell({name: PLAIN[name] for name in ("limit", "floor", "busync")}))
    assert "No peer ran" in text
    assert line(text, "view cartpole 4")[-1] == "–"


def test_nothing_at_all(tmp_path: Path) -> None:
    assert "Nothing was measured." in report(tmp_path)
    write_report({}, tmp_path)
    assert "Nothing was measured." in (tmp_path / "README.md").read_text()


def test_without_matplotlib_it_says_so_and_earlier_pictures_go(tmp_path: Path) -> None:
    for name in ("bars-view.png", "size.png", "of-somebody-else.png"):
        (tmp_path / name).touch()
    assert "matplotlib is not installed" in report(tmp_path, cell(PLAIN))
    assert [path.name for path in tmp_path.glob("*.png")] == ["of-somebody-else.png"]


def test_it_is_written_again_from_a_file_with_pictures_of_what_there_is(tmp_path: Path) -> None:
    """In a process of its own, for matplotlib keeps its fonts open."""
    cells = [cell(PLAIN | FAILED), cell(PLAIN, state="atari"), cell(PLAIN, readers=16), cell(FAILED, mode="load")]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"cells": cells, "machine": MACHINE}))
    subprocess.run((sys.executable, "-m", "bench.report", str(path)), check=True, cwd=Path(__file__).parents[2])
    text = (tmp_path / "README.md").read_text()
    assert "abc1234" in text
    expected = {"bars-view.png", "readers.png", "size.png"} if MATPLOTLIB else set()
    assert {path.name for path in tmp_path.glob("*.png")} == expected
    assert all(f"]({name})" in text for name in expected)
