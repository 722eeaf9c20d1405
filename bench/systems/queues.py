"""torch.multiprocessing queues: one per reader, a state dict put into each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import get_context

from bench.states import State
from bench.systems.base import Answers, Cell, Learner, Reader, System


def _queues(cell: Cell) -> list[Any]:
    context: Any = get_context("forkserver")
    return [context.Queue() for _ in range(cell.readers)]


class QueueLearner(Learner):
    """Copies the state into shared memory once, and puts that into every queue: the cheapest way that is safe.

    A queue pickles on a thread of its own after ``put`` has returned, and hands on the very memory that it was given;
    without the copy the learner's next step would change what readers have. Two sets of shared tensors take turns, as
    a reader holds one version until it has the next: to make new ones for each version costs several times the copy.
    """

    def __init__(self, cell: Cell, directory: str, tickets: list[Any]) -> None:
        super().__init__(cell, directory, tickets)
        sharing: Any = torch.multiprocessing  # which has no types
        sharing.set_sharing_strategy("file_system")  # a name for each tensor is faster than a descriptor
        self._shared: State = {}  #: for the next version
        self._held: State = {}  #: what readers have

    def hand_over(self, state: State, answers: Answers) -> None:
        """Copy once, put everywhere."""
        if not self._shared:
            self._shared = {name: _share(tensor) for name, tensor in state.items()}
        for name, tensor in state.items():
            self._shared[name].copy_(tensor)
        for queue in self.tickets:
            queue.put(self._shared)
        answers.take(self.cell.readers)
        self._shared, self._held = self._held, self._shared

    def close(self) -> None:
        """End the queues' threads."""
        for queue in self.tickets:
            queue.cancel_join_thread()
            queue.close()


def _share(tensor: Tensor) -> Tensor:
    fresh: Any = torch.empty_like(tensor)
    shared: Tensor = fresh.share_memory_()
    return shared


class QueueReader(Reader):
    """Gets from its queue. It keeps the version before too, whose memory comes again and is then mapped already."""

    def __init__(self, ticket: Any, cell: Cell, directory: str, number: int) -> None:
        super().__init__(ticket, cell, directory, number)
        self._held: Mapping[str, Tensor] = {}
        self._before: Mapping[str, Tensor] = {}

    def receive(self) -> Mapping[str, Tensor]:
        """The next state dict; the tensors are in shared memory already."""
        self._before, self._held = self._held, self.ticket.get()
        return self._held


SYSTEM = System(
    name="queues", learner=QueueLearner, reader=QueueReader, tickets=_queues,
    page="https://docs.pytorch.org/docs/stable/notes/multiprocessing.html",
    note="one Queue per reader; one copy into shared memory that is used again, as the notes say; strategy file_system",
)  # fmt: skip
