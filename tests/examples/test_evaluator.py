"""examples/evaluator beside a cartpole that goes on training."""

from __future__ import annotations

import re
import signal

import pytest

from tests.examples.runs import Run


@pytest.mark.timeout(120)
def test_a_version_stays_the_same_while_training_goes_on() -> None:
    with Run("-m", "examples.cartpole", "--keep-on", "--seconds", "100") as learner:
        learner.wait_for("version [1-9]", 40)
        with Run("-m", "examples.evaluator", "--seconds", "4") as evaluator:
            assert evaluator.end(60) == (0, ""), evaluator.lines
            joined, first, stayed, second = evaluator.lines
        learner.interrupt(signal.SIGINT)
        assert learner.end(20) == (130, "cartpole: stopped\n")
    match = re.fullmatch(r"joined cartpole at version (\d+)", joined)
    assert match
    held = int(match[1])
    assert re.fullmatch(rf"version {held}: mean return \d+ over \d+ episodes", first)
    match = re.fullmatch(
        rf"meanwhile (\d+) newer versions were published; version {held} stayed the same, element by element: "
        r"sha256 ([0-9a-f]{16}) before, ([0-9a-f]{16}) after",
        stayed,
    )
    assert match
    assert match[2] == match[3]
    newer = re.fullmatch(r"version (\d+): mean return \d+ over 20 episodes", second)
    assert newer
    assert int(newer[1]) >= held + int(match[1]) > held
