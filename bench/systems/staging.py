"""Weights on a GPU by way of the host: copied there, published there by busync, copied to the device by each reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bench.states import State
from bench.systems.base import Answers, Cell, System
from bench.systems.busync_ import BusyncLearner, BusyncReader


class StagingLearner(BusyncLearner):
    """Copies from the device straight into a loan: the host's memory is written once."""

    def __init__(self, cell: Cell, directory: str, tickets: list[Any]) -> None:
        super().__init__(cell, directory, tickets)
        self._like = {name: torch.empty(shape, dtype=cell.kind.dtype) for name, shape in cell.kind.shapes()}

    def hand_over(self, state: State, answers: Answers) -> None:
        """Copy, publish, and wait for all."""
        self.write_loan(self._like, state)
        super().hand_over(state, answers)


class StagingReader(BusyncReader):
    """A subscriber with memory of its own on the device."""

    def __init__(self, ticket: Any, cell: Cell, directory: str, number: int) -> None:
        self._own = cell.kind.make()
        super().__init__(ticket, cell, directory, number)

    def receive(self) -> Mapping[str, Tensor]:
        """The next version, copied to the device."""
        for name, tensor in super().receive().items():
            self._own[name].copy_(tensor)
        return self._own


SYSTEM = System(
    name="staging", learner=StagingLearner, reader=StagingReader, warm=4, copies=1, staged=True,
    modes=frozenset(), gpu_modes=frozenset(("view",)), page="README.md",
    note="for weights on a GPU: copied into a loan in the host's memory, published from there by busync, and copied to "
    "the device by each reader",
)  # fmt: skip
