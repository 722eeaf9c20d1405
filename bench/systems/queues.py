"""torch.multiprocessing queues: one per reader, a fresh copy of the state dict put into each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing import get_context

from bench.states import State
from bench.systems.base import Answers, Cell, Learner, Reader, System

PAGE: Final = "https://docs.pytorch.org/docs/stable/notes/multiprocessing.html"


def queues(cell: Cell) -> list[Any]:
    """A queue for each reader."""
    context: Any = get_context("forkserver")
    return [context.Queue() for _ in range(cell.readers)]


def end_queues(queues: Iterable[Any]) -> None:
    """Drop what was not sent, and end the queues' threads."""
    for queue in queues:
        queue.cancel_join_thread()
        queue.close()


class QueueLearner(Learner):
    """Puts one copy of the state dict into every queue, which moves its tensors into shared memory.

    The copy is needed: a queue pickles on a thread of its own after ``put`` has returned, and hands on the very memory
    that it was given, so that the learner's next step would change what readers have. It is fresh for each version.
    """

    def __init__(self, cell: Cell, directory: str, tickets: list[Any]) -> None:
        super().__init__(cell, directory, tickets)
        sharing: Any = torch.multiprocessing  # which has no types
        sharing.set_sharing_strategy("file_system")  # the default, a descriptor per tensor, takes longer and runs out
        self._sent: State = {}

    def hand_over(self, state: State, answers: Answers) -> None:
        """Copy once, put everywhere."""
        self._sent = {name: tensor.clone() for name, tensor in state.items()}
        for queue in self.tickets:
            queue.put(self._sent)
        answers.take(self.cell.readers)

    def kept(self) -> int:
        """The last version."""
        return sum(tensor.nbytes for tensor in self._sent.values())

    def close(self) -> None:
        """End the queues' threads."""
        end_queues(self.tickets)


class QueueReader(Reader):
    """Gets from its queue."""

    def __init__(self, ticket: Any, cell: Cell, directory: str, number: int) -> None:
        super().__init__(ticket, cell, directory, number)
        self._held: Mapping[str, Tensor] = {}

    def receive(self) -> Mapping[str, Tensor]:
        """The next state dict; the tensors are in shared memory already."""
        self._held = self.ticket.get()
        return self._held


SYSTEM = System(
    name="queues", learner=QueueLearner, reader=QueueReader, tickets=queues, page=PAGE,
    gpu_modes=frozenset(("view",)),
    note="one Queue per reader, and a fresh copy of the state dict put into each, which torch shares anew for each "
    "version (strategy file_system; the default one is slower). On a GPU the copy is on the device, and each of its "
    "tensors is exported once for each reader",
)  # fmt: skip
