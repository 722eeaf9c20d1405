"""examples/cartpole in short form: it learns over both buses, loses actors, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.examples.runs import Run

GOAL = 150.0
SECONDS = 90.0


def train(*arguments: str) -> tuple[dict[str, Any], list[str]]:
    """Run to the end; the last line, and those before it."""
    with Run("-m", "examples.cartpole", *arguments) as run:
        assert run.end(SECONDS + 30) == (0, ""), run.lines
        report: dict[str, Any] = json.loads(run.lines[-1])
        return report, run.lines[:-1]


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("bus", ["busync", "queue"])
def test_it_learns(bus: str, tmp_path: Path) -> None:
    picture = tmp_path / "run.png"
    report, lines = train(
        "--bus", bus, "--seed", "3", "--goal", f"{GOAL}", "--seconds", f"{SECONDS}", "--plot", str(picture)
    )  # fmt: skip
    assert (report["bus"], report["seed"], report["goal"], report["actors"]) == (bus, 3, GOAL, 4)
    assert report["mean_return"] >= GOAL
    assert 0 < report["seconds_to_goal"] <= report["seconds"] < SECONDS + 5
    assert report["versions"] > 3
    assert report["steps"] >= 256 * (report["versions"] - 1) / 2
    assert 0 < report["publish_latency_ms"]["median"] <= report["publish_latency_ms"]["p95"]
    assert 0 <= report["lag"]["median"] <= report["lag"]["max"] < report["versions"]
    assert (report["killed"], report["added"]) == (0, 0)
    assert any("actor-4:" in line for line in lines)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(90)
def test_actors_are_killed_and_added(tmp_path: Path) -> None:
    picture = tmp_path / "run.png"
    report, lines = train(
        "--chaos", "--keep-on", "--goal", "25", "--seconds", "30", "--actors", "5", "--plot", str(picture)
    )  # fmt: skip
    assert report["killed"] >= 3
    assert 2 <= report["added"] <= report["killed"]
    assert sum("killed" in line for line in lines) == report["killed"]
    assert report["mean_return"] >= 25
    assert picture.stat().st_size > 10_000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_it(number: int, runtime_dir: Path) -> None:
    """The fixture that checks for what is left behind sees actors too: they are in this process's tree."""
    with Run("-m", "examples.cartpole") as run:
        run.wait_for("version [2-9]", 40)
        run.interrupt(number)
        assert run.end(20) == (130, "cartpole: stopped\n")
    assert [name for name in os.listdir(runtime_dir / "cartpole") if name != "lock"] == []
