"""The end-to-end tests run on loops of both kinds, and those that are marked ``devices`` on the CPU and on a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import uvloop

from tests.support import gpu
from tests.support.devices import DEVICES
from tests.support.processes import DEVICE


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every asyncio test here runs on both kinds of loop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("devices"):
        metafunc.parametrize("device", DEVICES, indirect=True)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where ``patterns`` puts states, here and in children. On a GPU, nothing may be left there after the test."""
    device: str = getattr(request, "param", "cpu")
    monkeypatch.setenv(DEVICE, device)
    if device == "cpu":
        yield device
        return
    with gpu.nothing_left(request):
        yield device
