"""The demo, small: it ends well, it notices a wrong value, and it ends its processes when it is interrupted."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from busync.handles import content_digest

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "demo" / "demo.py"
WEIGHTS = {"a.weight": torch.arange(1000.0).reshape(10, 100), "positions": torch.arange(5)}


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The demo with one subscriber and a small checkpoint."""
    spec = importlib.util.spec_from_file_location("busync_demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "busync_demo", module)
    spec.loader.exec_module(module)
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    for name, value in {"SUBSCRIBERS": 1, "VERSIONS": 2, "PAUSE": 0.0}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "find_checkpoint", lambda: tmp_path / "model.safetensors")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield module
    for number, handler in before.items():
        signal.signal(number, handler)


def test_it_ends_well(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main() == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "1 subscribers adopted 2 versions in all, each equal to the file it came from" in output.out


def test_a_wrong_value_is_noticed(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "file_digest", lambda path: "0" * 64)
    assert demo.main() == 1
    assert capsys.readouterr().err == "demo: actor-1 has wrong values in version 1\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_ends_everything(
    number: int, demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = demo.Demo._change_repeatedly

    async def interrupted(self: object) -> None:
        asyncio.get_running_loop().call_later(0.3, os.kill, os.getpid(), number)
        await started(self)

    monkeypatch.setattr(demo.Demo, "_change_repeatedly", interrupted)
    assert demo.main() == 130
    assert capsys.readouterr().err == "demo: stopped\n"


def test_its_own_digest_is_the_documented_one(demo: ModuleType, tmp_path: Path) -> None:
    assert demo.file_digest(tmp_path / "model.safetensors") == content_digest(WEIGHTS).hex()
    target = tmp_path / "changed.safetensors"
    assert demo.change(tmp_path / "model.safetensors", target, 1) == content_digest(WEIGHTS).hex()
    assert demo.change(tmp_path / "model.safetensors", target, 2) != content_digest(WEIGHTS).hex()
