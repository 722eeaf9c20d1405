"""torch.multiprocessing queues that are handed the same shared memory again, as torch's best practices say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bench.states import State
from bench.systems.base import Answers, Cell, Learner, System
from bench.systems.queues import PAGE, QueueReader, end_queues, queues


class ReuseLearner(Learner):
    """Copies the state into shared memory once, and puts that into every queue.

    A queue pickles on a thread of its own after ``put`` has returned, and hands on the very memory that it was given;
    without the copy the learner's next step would change what readers have. Two sets of shared tensors take turns, as
    a reader holds one version until it has the next: to make new ones for each version costs several times the copy.
    This is safe only while every reader answers every version, as here. A reader that lags by two has its weights
    overwritten while it uses them, and nothing tells it.
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

    def kept(self) -> int:
        """Both sets."""
        return sum(tensor.nbytes for held in (self._shared, self._held) for tensor in held.values())

    def close(self) -> None:
        """End the queues' threads."""
        end_queues(self.tickets)


def _share(tensor: Tensor) -> Tensor:
    fresh: Any = torch.empty_like(tensor)
    shared: Tensor = fresh.share_memory_()
    return shared


class ReuseReader(QueueReader):
    """Gets from its queue. It keeps the version before too, whose memory comes again and is then mapped already."""

    def __init__(self, ticket: Any, cell: Cell, directory: str, number: int) -> None:
        super().__init__(ticket, cell, directory, number)
        self._before: Mapping[str, Tensor] = {}

    def receive(self) -> Mapping[str, Tensor]:
        """The next state dict; the tensors are in shared memory already."""
        self._before, self._held = self._held, self.ticket.get()
        return self._held


SYSTEM = System(
    name="queues-reuse", learner=ReuseLearner, reader=ReuseReader, warm=4, tickets=queues,
    page=f"{PAGE}#reuse-buffers-passed-through-a-queue",
    note="one Queue per reader; one copy into one of two sets of shared tensors, which take turns, as the notes' best "
    "practices say (strategy file_system). It overwrites what readers use unless every round is answered, as here",
)  # fmt: skip
