"""A hostile place for every test: nothing may be left behind, and no callback may hold an event loop."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from tests.support.leaks import files_left, leftovers, resources
from tests.support.loops import LoopWatch
from tests.support.processes import Cast, forkserver
from tests.support.stash import FAILED

_watch = LoopWatch()
EMULATED = "cudaemu" in os.environ.get("LD_PRELOAD", "")  #: whether CUDA is


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "blocks_loop: the test holds an event loop on purpose")
    config.addinivalue_line("markers", "devices: the test runs on the CPU, and on a CUDA device where there is one")
    config.addinivalue_line("markers", "gpu: the test needs a CUDA device, real or emulated")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none: here and not by marks, which would fill pages of the summary."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch finds no CUDA device here")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """This test's own directory of endpoints, with a path that is short enough for sockets."""
    directory = tempfile.mkdtemp(prefix="busync-")
    before = os.environ.get("BUSYNC_RUNTIME_DIR")
    os.environ["BUSYNC_RUNTIME_DIR"] = directory
    yield Path(directory)
    if before is None:
        os.environ.pop("BUSYNC_RUNTIME_DIR", None)
    else:
        os.environ["BUSYNC_RUNTIME_DIR"] = before
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def context() -> Iterator[ForkServerContext]:
    """A forkserver for the session."""
    with forkserver() as context:
        yield context


@pytest.fixture
def cast(request: pytest.FixtureRequest, context: ForkServerContext, tmp_path: Path) -> Iterator[Cast]:
    """Starts children, and ends them."""
    cast = Cast(context, tmp_path)
    yield cast
    cast.end(failed=request.node.stash.get(FAILED, False))


@pytest.fixture(autouse=True)
def _hostile(request: pytest.FixtureRequest, runtime_dir: Path) -> Iterator[None]:
    """After the test no descriptor, thread, child, mapping or file is left, and no callback took 100 ms."""
    _warm_up()
    gc.collect()
    gc.freeze()  # what is there by now: to walk over all of it holds every loop for 100 ms and more
    _watch.install()
    _watch.take()
    before = resources()
    yield
    if request.node.stash.get(FAILED, False):
        return  # its traceback keeps things alive
    emulated = EMULATED and request.node.get_closest_marker("gpu")  # a copy is the work of whoever asks for it
    complaints = [] if emulated or request.node.get_closest_marker("blocks_loop") else _watch.take()
    assert not complaints, "event loops complain: " + "; ".join(complaints)
    request.node.funcargs.clear()  # pytest keeps the values of fixtures that are over
    request.node.funcargs.clear()  # pytest would keep what fixtures gave until after this
    left = leftovers(before)
    assert not left, f"the test left behind {left}"
    files = files_left(runtime_dir)
    assert not files, f"the test left behind {files}"


_warm = False


def _warm_up() -> None:
    """What torch does once per process takes longer than a callback may."""
    global _warm
    if _warm or "torch" not in sys.modules:
        return
    _warm = True
    from tests.support.warm import warm_up

    warm_up()
