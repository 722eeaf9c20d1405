"""examples/quickstart: two programs whose output is that of the README."""

from __future__ import annotations

import re

import pytest

from tests.examples.runs import Run, promised

ACTOR_LINE = re.compile(r"version (\d+) \((?:untrained|step (\d+))\): -?\d\.\d{3}")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("actors", [1, 3])
def test_it_prints_what_its_readme_says(actors: int) -> None:
    """The learner's lines are exactly those; an actor may skip versions, but never the last, and never goes back."""
    *_, learned, seen = promised("quickstart")
    running = [Run("examples/quickstart/actor.py") for _ in range(actors)]
    with Run("examples/quickstart/learner.py", str(actors)) as learner:
        try:
            assert learner.end(90) == (0, "")
            assert learner.lines == learned
            for actor in running:
                assert actor.end(20) == (0, "")
                matches = [ACTOR_LINE.fullmatch(line) for line in actor.lines]
                assert all(matches), actor.lines
                versions = [int(match[1]) for match in matches if match]
                assert versions == sorted(set(versions))
                assert versions == [int(match[2] or 0) + 1 for match in matches if match]
                assert actor.lines[-1] == seen[-1]
        finally:
            for actor in running:
                actor.__exit__()
