"""The wheel: what is in it, and that both commands run from it alone."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent


def run(*words: object, **named: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, words)), check=True, capture_output=True, text=True, **named)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout and nothing of it but the sources is seen."""
    directory = tmp_path_factory.mktemp("wheel")
    copy = directory / "source"
    shutil.copytree(ROOT / "busync", copy / "busync", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", directory, copy)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment's bin: it has the wheel, and sees the packages of this one but not the checkout."""
    target = tmp_path_factory.mktemp("clean")
    venv.create(target, symlinks=True)
    python = target / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (packages,) = target.glob("lib/python*/site-packages")
    # Only the folder joins the path: its own .pth files, and with them an editable busync, are not read.
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
    found = run(python, "-c", "import busync; print(busync.__file__)", cwd=target, env=clean_environment())
    assert Path(found.stdout.strip()).is_relative_to(packages)
    return target / "bin"


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A directory with a short path, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="busync-") as directory:
        yield Path(directory)


def clean_environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BUSYNC"))} | more


def test_the_wheel_has_every_module_the_licence_and_both_commands(wheel: Path) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "busync").rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    assert {name for name in names if ".dist-info/" not in name} == modules | {"busync/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "busync-pub = busync.daemon.pub:main" in entry_points
    assert "busync-sub = busync.daemon.sub:main" in entry_points


def test_both_commands_run_from_the_wheel(commands: Path, runtime: Path) -> None:
    weights = {"w": torch.arange(1000.0), "h": torch.ones(3, dtype=torch.bfloat16)}
    save_file(weights, runtime / "w.safetensors")
    # As on a machine without numpy, which the commands do not need.
    (runtime / "without").mkdir()
    (runtime / "without" / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")\n")
    environment = clean_environment(BUSYNC_RUNTIME_DIR=str(runtime), PYTHONPATH=str(runtime / "without"))
    publisher = subprocess.Popen(
        [commands / "busync-pub", "policy", runtime / "w.safetensors", "--json"],
        cwd=runtime, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        subscriber = run(
            commands / "busync-sub", "policy", "--verify", "--save", runtime, "--count", 1, "--timeout-s", 30, "--json",
            cwd=runtime, env=environment, timeout=50,
        )  # fmt: skip
        publisher.terminate()
        out, err = publisher.communicate(timeout=20)
    finally:
        publisher.kill()
        publisher.wait()
    assert (publisher.returncode, err, subscriber.stderr) == (0, "", "")
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["serving", "published"]
    adopted = json.loads(subscriber.stdout.splitlines()[-1])
    assert adopted["verified"] is True
    saved = load_file(runtime / "default-1.safetensors")
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())
