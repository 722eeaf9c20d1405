"""Collects the figures that these tests measure: shown at the end of a run, and written to build/figures.json."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "build" / "figures.json"
Figures = Callable[[str, float, str], None]

_measured: dict[str, str] = {}


@pytest.fixture
def figures(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Figures:
    """Record a figure: its name, its value, its unit."""

    def record(name: str, value: float, unit: str) -> None:
        text = f"{value:.4g} {unit} (load {os.getloadavg()[0]:.1f})"
        record_property(name, text)
        _measured[f"{request.node.name}: {name}"] = text

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _measured:
        return
    terminalreporter.section("figures")
    for name, text in _measured.items():
        terminalreporter.write_line(f"{name} = {text}")
    FILE.parent.mkdir(exist_ok=True)
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    FILE.write_text(json.dumps(known | _measured, indent=1) + "\n")
