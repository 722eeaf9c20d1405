"""What tests on a GPU, real or emulated, have in common."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.processes import KILLED, STARTED
from tests.support.stash import FAILED

SHARED = Path("/dev/shm")
COUNTERS_START = 64  #: bytes before the first count of a file
PATIENCE = 3.0  #: seconds that leftovers get to disappear


@cache
def warm_up() -> None:
    """What CUDA, and the first publish and the first reader on a GPU, do once per process."""
    from busync.handles import gpus
    from busync.handles.cuda_reader import Reader

    exporter = gpus.exporter()
    segment = exporter.create(exporter.device(0), 4096)
    handle = segment.export(Reader.of(os.getpid()))
    gpus.importer().open(1, handle, 4096, handle.device)
    segment.drop()
    del segment
    gc.collect()
    exporter.reap()
    torch.empty(1, device="cuda").copy_(torch.ones(1))
    torch.cuda.synchronize()


def allocated(index: int = 0) -> int:
    """Bytes that this process has allocated on a device, and those that it keeps for others."""
    gc.collect()
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    return torch.cuda.memory_allocated(index)


def emulator_stat(name: str) -> int:
    """A count of the emulator's, 0 on a real device."""
    with suppress(OSError, AttributeError):
        stat = ctypes.CDLL("libcudart.so.13").cudaemu_stat
        stat.restype = ctypes.c_long
        return int(stat(name.encode()))
    return 0


def usage() -> dict[str, int]:
    """What this process uses on device 0 and must give back, or must not use more and more of."""
    made = {name: emulator_stat(name) for name in ("allocs", "imports", "ipc_events", "imported_events")}
    return {**made, "allocated": allocated(), "reserved": torch.cuda.memory_reserved()}


def left(before: int) -> str:
    """What this process has on device 0 beyond ``before`` bytes, or has given to readers; empty if nothing."""
    from busync.handles import gpus

    now, exports = allocated(), gpus.exporter().outstanding()
    imports = emulator_stat("imports")
    stop_at = time.monotonic() + PATIENCE
    while (now > before or exports or imports) and time.monotonic() < stop_at:
        time.sleep(0.01)
        gpus.exporter().reap()
        now, exports, imports = allocated(), gpus.exporter().outstanding(), emulator_stat("imports")
    if now > before or exports or imports:
        return f"{now - before} bytes of the GPU, {len(exports)} exports, {imports} imports"
    return ""


def counter_files(pids: set[int]) -> set[str]:
    """The files in which torch counts the openings of what these processes exported. (Others may use GPUs, too.)"""
    return {name for name in os.listdir(SHARED) if name.startswith("torch_") and int(name.split("_")[1]) in pids}


def remove_counter_files(pids: set[int]) -> None:
    """Remove what killed processes have left."""
    for name in counter_files(pids):
        with suppress(FileNotFoundError):
            (SHARED / name).unlink()


def counts(pids: set[int]) -> dict[str, list[int]]:
    """By file: the counts of exports that have not ended."""
    found: dict[str, list[int]] = {}
    for name in counter_files(pids):
        with suppress(FileNotFoundError):
            data = (SHARED / name).read_bytes()[COUNTERS_START:]
            found[name] = [count for count in memoryview(data).cast("Q") if count]
    return {name: waiting for name, waiting in found.items() if waiting}


@contextmanager
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """For the time of a test: afterwards this process has nothing more on device 0, and no child has exports left."""
    warm_up()
    before = allocated()
    yield
    remove_counter_files(KILLED)
    if not request.node.stash.get(FAILED, False):
        extra = left(before)
        assert not extra, f"the test left behind {extra}"
        waiting = counts(STARTED | {os.getpid()})
        assert not waiting, f"exports never ended: {waiting}"
