"""TorchRL's SharedMemWeightSyncScheme: one shared buffer, an instruction to every worker, and its acknowledgement."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib import import_module
from multiprocessing import get_context
from typing import Any, Final

import torch
from torch import Tensor, nn

from bench.states import State
from bench.systems.base import Answers, Cell, Learner, Reader, System

MODEL: Final = "policy"  #: what TorchRL calls the model of a collector


def _schemes(cell: Cell) -> list[Any]:
    """The scheme with its queues, which only a process that starts others can make; the learner adds the weights."""
    scheme = import_module("torchrl.weight_update").SharedMemWeightSyncScheme()
    nothing = import_module("tensordict").TensorDict()
    scheme.init_on_sender(params_map=dict.fromkeys(range(cell.readers), nothing), ctx=get_context("forkserver"))
    return [scheme] * cell.readers


class TorchrlLearner(Learner):
    """The sender, which copies its weights into the shared ones and waits for the workers' acknowledgements."""

    def __init__(self, cell: Cell, directory: str, tickets: list[Any]) -> None:
        super().__init__(cell, directory, tickets)
        multiprocessing: Any = torch.multiprocessing
        multiprocessing.set_sharing_strategy("file_system")  # no descriptor for each tensor
        self._wrap = import_module("tensordict").TensorDict
        self._scheme = tickets[0]
        self._weights: Any = None
        shared = self._wrap(cell.kind.make()).unflatten_keys(".").share_memory_()
        self._scheme.init_on_sender(params_map=dict.fromkeys(range(cell.readers), shared))

    def attach(self) -> None:
        """Send the shared weights to every worker."""
        self._scheme.connect()

    def prepare(self, state: State) -> None:
        """Wrap the learner's weights once: the tensors are the same in every round."""
        if self._weights is None:
            self._weights = self._wrap(state).unflatten_keys(".")

    def hand_over(self, state: State, answers: Answers) -> None:
        """Copy, tell, and wait."""
        self._scheme.send(self._weights)
        answers.take(self.cell.readers)

    def close(self) -> None:
        """End the queues."""
        self._scheme.shutdown()


class TorchrlReader(Reader):
    """A worker, as a collector is one: the scheme's thread updates the policy, and then says so to this."""

    def __init__(self, ticket: Any, cell: Cell, directory: str, number: int) -> None:
        super().__init__(ticket, cell, directory, number)
        self._updated = threading.Semaphore(0)
        self._policy = cell.kind.module()
        self.worker_idx = number
        ticket.init_on_receiver(model_id=MODEL, context=self)
        ticket.connect()
        self._parameters: Mapping[str, Tensor] = self._policy.state_dict()

    def get_model(self, model_id: str) -> nn.Module:
        """The scheme asks for the model to update."""
        return self._policy

    def update_policy_weights_(self, *, model_id: str, policy_or_weights: Any) -> None:
        """The scheme has updated it."""
        self._updated.release()

    def receive(self) -> Mapping[str, Tensor]:
        """The policy's parameters, which are the shared ones."""
        self._updated.acquire()
        return self._parameters


SYSTEM = System(
    name="torchrl", learner=TorchrlLearner, reader=TorchrlReader, warm=4, tickets=_schemes,
    needs=("torchrl", "tensordict"),
    page="https://docs.pytorch.org/rl/stable/reference/generated/torchrl.weight_update.SharedMemWeightSyncScheme.html",
    note="send() of a SharedMemWeightSyncScheme; workers share one buffer, which the next version overwrites in place, "
    "and each applies it to its policy",
)  # fmt: skip
