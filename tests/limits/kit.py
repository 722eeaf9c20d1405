"""What the kernel says about the processes under test, and the models that they pass around."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

MB = 1_000_000
SEGMENT = "memfd:busync-"
BOARD = "memfd:busync-board"


def model_of(nbytes: int, layers: int = 25) -> nn.Module:
    """A float32 model of about ``nbytes`` bytes, on the meta device: an empty shell to assign tensors to."""
    width = int((nbytes / layers / 4) ** 0.5)
    with torch.device("meta"):
        return nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))


def filled(model: nn.Module, value: float) -> dict[str, torch.Tensor]:
    """A state for ``model``, every element ``value``."""
    return {name: torch.full(tensor.shape, value) for name, tensor in model.state_dict().items()}


def check_filled(model: nn.Module, value: float) -> None:
    """Touch every page of the model, and insist that all that was looked at is ``value``."""
    for name, parameter in model.named_parameters():
        seen = parameter.detach().view(-1)[::512]
        assert bool((seen == value).all()), f"{name} is not all {value}"


# /proc


def private_bytes(pid: int) -> int:
    """Memory that is this process's own: private pages, those of its copy-on-write mappings included."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Private_"))


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def limit_open_files(limit: int) -> None:
    """Set the soft limit of this process, and leave the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def mappings(pid: int, named: str = "") -> int:
    """Mapped regions whose line in /proc/PID/maps contains ``named``."""
    with open(f"/proc/{pid}/maps") as lines:
        return sum(named in line for line in lines)


def segment_bytes(pids: Iterable[int]) -> int:
    """Bytes of all busync segments that any of the processes maps or has open, each counted once."""
    found: dict[int, int] = {}
    for pid in pids:
        try:
            found |= _mapped_segments(pid)
            found |= _open_segments(pid)
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return sum(found.values())


def _mapped_segments(pid: int) -> dict[int, int]:
    """Sizes by inode. Every mapping of a segment covers all of it."""
    found: dict[int, int] = {}
    with open(f"/proc/{pid}/maps") as lines:
        for line in lines:
            if SEGMENT in line and BOARD not in line:
                addresses, _, _, _, inode, _ = line.split(maxsplit=5)
                start, end = (int(address, 16) for address in addresses.split("-"))
                found[int(inode)] = end - start
    return found


def _open_segments(pid: int) -> dict[int, int]:
    found: dict[int, int] = {}
    directory = f"/proc/{pid}/fd"
    for number in os.listdir(directory):
        try:
            link = os.readlink(f"{directory}/{number}")
            if SEGMENT in link and BOARD not in link:
                status = os.stat(f"{directory}/{number}")
                found[status.st_ino] = status.st_size
        except FileNotFoundError:  # it was closed meanwhile
            continue
    return found


class Peak:
    """The most that a measure says while the block runs, sampled on a thread every ``interval`` seconds."""

    def __init__(self, measure: Callable[[], int], interval: float = 0.02) -> None:
        self.value = 0
        self._measure = measure
        self._interval = interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak")

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            self.look()

    def look(self) -> None:
        self.value = max(self.value, self._measure())

    def __enter__(self) -> Self:
        self.look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if error is None:
            self.look()


class Ticker:
    """The longest time for which a loop was held while the block ran: how late a timer of 5 ms was at most."""

    INTERVAL = 0.005

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.worst = 0.0
        self._loop = loop
        self._due = 0.0
        self._over = False

    def __enter__(self) -> Self:
        self._loop.call_soon_threadsafe(self._next)
        return self

    def _next(self) -> None:
        self._due = time.monotonic() + self.INTERVAL
        self._loop.call_later(self.INTERVAL, self._tick)

    def _tick(self) -> None:
        self.worst = max(self.worst, time.monotonic() - self._due)
        if not self._over:
            self._next()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        if self._due:  # what holds the loop up to here counts as well
            self.worst = max(self.worst, time.monotonic() - self._due)
