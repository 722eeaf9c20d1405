"""Work that takes processor time from the readers: what actors do all day."""

from __future__ import annotations

import os
import threading
from typing import Final

import torch

from bench.systems.base import Cell

SIDE: Final = 512  #: of the matrices


def keep_busy(cell: Cell, number: int) -> None:
    """Start this reader process's part of the threads, which run until it ends; none if the cell is not a busy one.

    There is one for each core that this machine lends, dealt out to the processes in turn.
    """
    if cell.busy:
        for _ in range(share(len(os.sched_getaffinity(0)), cell.processes or cell.readers, number)):
            threading.Thread(target=_multiply, daemon=True).start()


def share(threads: int, processes: int, number: int) -> int:
    """How many of the threads a process has."""
    each, more = divmod(threads, processes)
    return each + (number < more)


def _multiply() -> None:
    torch.set_num_threads(1)
    left, right, product = (torch.ones(SIDE, SIDE) for _ in range(3))
    while True:
        torch.mm(left, right, out=product)
