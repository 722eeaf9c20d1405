"""The limit: one copy of the bytes into warm memory, by the faster of one and of two threads, or on the GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove
from time import perf_counter
from typing import Any

import torch

from bench.states import State
from bench.systems.base import Answers, Cell, Learner, System

PIECE_BYTES = 4 << 20


class Limit(Learner):
    """Copies in turn with one thread and with two for a while, and then with what was faster."""

    def __init__(self, cell: Cell, directory: str, tickets: list[Any]) -> None:
        super().__init__(cell, directory, tickets)
        self._target = torch.ones(cell.kind.nbytes, dtype=torch.uint8)
        self._workers = ThreadPoolExecutor(2)
        self._moves: list[tuple[int, int, int]] = []
        self._took: dict[int, list[float]] = {1: [], 2: []}

    def prepare(self, state: State) -> None:
        """Plan the moves once."""
        if not self._moves:
            at = self._target.data_ptr()
            for tensor in state.values():
                for start in range(0, tensor.nbytes, PIECE_BYTES):
                    nbytes = min(PIECE_BYTES, tensor.nbytes - start)
                    self._moves.append((at + start, tensor.data_ptr() + start, nbytes))
                at += tensor.nbytes

    def hand_over(self, state: State, answers: Answers) -> None:
        """Copy."""
        best = min(self._took, key=lambda count: min(self._took[count], default=0.0))
        begun = perf_counter()
        if best == 1:
            for move in self._moves:
                memmove(*move)
        else:
            self._copy_by_two()
        self._took[best].append(perf_counter() - begun)

    def _copy_by_two(self) -> None:
        left = iter(self._moves)

        def work() -> None:
            for move in left:
                memmove(*move)

        for future in [self._workers.submit(work) for _ in range(2)]:
            future.result()

    def close(self) -> None:
        """End the threads."""
        self._workers.shutdown()


class GpuLimit(Learner):
    """One copy from one place on the device to another, waited for."""

    def __init__(self, cell: Cell, directory: str, tickets: list[Any]) -> None:
        super().__init__(cell, directory, tickets)
        nbytes, device = cell.kind.nbytes, cell.kind.device
        self._source, self._target = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))

    def hand_over(self, state: State, answers: Answers) -> None:
        """Copy."""
        self._target.copy_(self._source)
        torch.cuda.synchronize()

    def close(self) -> None:
        """Nothing to end."""


def _limit(cell: Cell, directory: str, tickets: list[Any]) -> Learner:
    return (GpuLimit if cell.kind.on_device else Limit)(cell, directory, tickets)


SYSTEM = System(
    name="limit", learner=_limit, modes=frozenset(("view", "read", "load", "loan")), spread=True, busy=False,
    gpu_modes=frozenset(("view",)),
    note="one warm copy, the faster of one and two threads; on a GPU one copy on the device, waited for",
)  # fmt: skip
