"""The short form of ``make faults``, and what it stands on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import pattern, points
from tests.faults.page import KINDS, Page, Slot
from tests.faults.schedule import make_round

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(120)
def test_a_round_of_faults(tmp_path: Path) -> None:
    """No wrong element, no leak, nobody stuck, and everybody gets the newest version when it is calm again."""
    figures = tmp_path / "figures.json"
    command = [
        sys.executable, "-m", "tests.faults", "--seed", "7", "--steps", "30", "--round-steps", "50",
        "--report", str(figures),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    assert found["fault_steps"] >= 30
    assert found["kills"] > 5
    assert found["adoptions"] > 5
    assert found["elements"] > 1000
    assert (found["wrong"], found["leaks"], found["failures"]) == (0, 0, [])


def test_a_seed_gives_the_same_schedule() -> None:
    assert make_round(3, 4) == make_round(3, 4)
    assert make_round(3, 4) != make_round(3, 5)
    assert make_round(3, 4).child(7).random() == make_round(3, 4).child(7).random()


def test_a_schedule_has_every_kind_of_step() -> None:
    kinds = {step.kind for number in range(20) for step in make_round(1, number).steps}
    assert len(kinds) == 17
    traps = {step.trap.action for number in range(20) for step in make_round(1, number).steps if step.trap}
    assert traps == set(points.ACTIONS)


def test_every_point_is_a_function_of_busync() -> None:
    for point in {*points.PUBLISHER, *points.SUBSCRIBER}:
        owner, name = points.find(point)
        assert callable(getattr(owner, name)), point
    assert {*points.PUBLISHER, *points.SUBSCRIBER} > points.NO_FORK_INSIDE


def test_a_page_keeps_what_is_counted() -> None:
    page = Page()
    for kind in KINDS:
        page.fault(kind)
    page.add(Slot.ADOPTED, 3)
    assert page.most(Slot.SLOWEST_OP, 5)
    assert not page.most(Slot.SLOWEST_OP, 4)
    assert page.faults() == dict.fromkeys(KINDS, 1)
    assert page[Slot.ADOPTED] == 3
    page.close()


def test_patterns_differ_by_incarnation_topic_and_version() -> None:
    """A version of another time, topic or publisher cannot pass for the right one."""
    right = pattern.state(5, "t0", 2, 1)
    assert pattern.check(right, 5, "t0", 2, 1) == 66_853
    for incarnation, topic, version in ((6, "t0", 2), (5, "t1", 2), (5, "t0", 3)):
        with pytest.raises(AssertionError):
            pattern.check(right, incarnation, topic, version, 1)
    right["conv"].view(-1)[7] += 1
    with pytest.raises(AssertionError, match="element 7"):
        pattern.check(right, 5, "t0", 2, 1)
