"""torch.distributed over gloo: a broadcast of one flat buffer."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.states import State
from bench.systems.base import Answers, Cell, Learner, Reader, System


def _join(cell: Cell, directory: str, rank: int) -> Tensor:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # what the host's name stands for need not be loopback
    dist.init_process_group("gloo", f"file://{directory}/store", rank=rank, world_size=cell.readers + 1)
    return torch.empty(sum(math.prod(shape) for _, shape in cell.kind.shapes()), dtype=cell.kind.dtype)


class GlooLearner(Learner):
    """Rank 0. It packs all tensors into one buffer first: a broadcast for each is slower."""

    def attach(self) -> None:
        """Meet the others."""
        self._flat = _join(self.cell, self.directory, 0)

    def hand_over(self, state: State, answers: Answers) -> None:
        """Pack, broadcast."""
        torch.cat([tensor.view(-1) for tensor in state.values()], out=self._flat)
        dist.broadcast(self._flat, 0)
        answers.take(self.cell.readers)

    def close(self) -> None:
        """Leave."""
        if dist.is_initialized():
            dist.destroy_process_group()


class GlooReader(Reader):
    """Receives into a buffer of its own, of which the tensors are views."""

    def __init__(self, ticket: Any, cell: Cell, directory: str, number: int) -> None:
        super().__init__(ticket, cell, directory, number)
        self._flat = _join(cell, directory, number + 1)
        self._views: dict[str, Tensor] = {}
        at = 0
        for name, shape in cell.kind.shapes():
            count = math.prod(shape)
            self._views[name] = self._flat[at : at + count].view(shape)
            at += count

    def receive(self) -> Mapping[str, Tensor]:
        """Take part in the broadcast."""
        dist.broadcast(self._flat, 0)
        return self._views


SYSTEM = System(
    name="gloo", learner=GlooLearner, reader=GlooReader, warm=1, copies=1,
    page="https://pytorch.org/docs/stable/distributed.html",
    note="one flat buffer, packed and broadcast; readers have it in memory of their own",
)  # fmt: skip
