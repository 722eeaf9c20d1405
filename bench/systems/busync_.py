"""busync as its README says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import uvloop
from torch import Tensor, nn

import busync
from bench.states import State, prove, proved
from bench.systems.base import USUAL, Answers, Cell, Learner, Reader, System, SystemFailed


class BusyncLearner(Learner):
    """A publisher that waits for every acknowledgement."""

    def __init__(self, cell: Cell, directory: str, tickets: list[Any]) -> None:
        super().__init__(cell, directory, tickets)
        self._publisher = busync.blocking.Publisher(f"{directory}/bus", max_segments=4).__enter__()
        self._loan: Any = None

    def attach(self) -> None:
        """Wait until everybody counts."""
        while (
            sum(reader["state"] != "joining" for reader in self._publisher.status()["subscribers"]) < self.cell.readers
        ):
            time.sleep(0.001)

    def prepare(self, state: State) -> None:
        """Write a loan, if that is the mode."""
        if self.cell.mode == "loan":
            self.write_loan(state, state)

    def write_loan(self, like: State, state: State) -> None:
        """Where ``like`` is."""
        self._loan = self._publisher.loan(like=like).__enter__()
        for name, tensor in state.items():
            self._loan.tensors[name].copy_(tensor)

    def hand_over(self, state: State, answers: Answers) -> None:
        """Publish, and wait for all."""
        if self._loan is not None:
            report = self._loan.publish(wait="all", timeout=120)
            self._loan = None
        else:
            report = self._publisher.publish(state, wait="all", timeout=120)
        if len(report.acked) != self.cell.readers:
            raise SystemFailed(f"{len(report.acked)} of {self.cell.readers} acknowledged: {report}")

    def kept(self) -> int:
        """The pool."""
        topics = self._publisher.status()["topics"].values()
        return sum(topic["bytes"] + sum(topic["devices"].values()) for topic in topics)

    def close(self) -> None:
        """End the publisher."""
        self._publisher.close()


class BusyncReader(Reader):
    """A subscriber that uses versions in place, or loads them."""

    def __init__(self, ticket: Any, cell: Cell, directory: str, number: int) -> None:
        super().__init__(ticket, cell, directory, number)
        self._endpoint = f"{directory}/bus"
        self._snapshot: Any = None
        self._tensors: Mapping[str, Tensor] = {}
        self._before: Mapping[str, Tensor] = {}  #: dropped when the next version is acknowledged
        self._subscriber: Any = None
        if not cell.processes:
            self._subscriber = busync.blocking.Subscriber(self._endpoint, connect_timeout=60).__enter__()

    def receive(self) -> Mapping[str, Tensor]:
        """The next version. To ask for it acknowledges the one before, which was looked at by then."""
        self._snapshot = self._subscriber.next()
        if self.cell.mode == "loan":
            self._before = self._tensors
        self._tensors = self._snapshot.tensors
        return self._tensors

    def load(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Load, which acknowledges; the module is looked at before the harness goes on, and its round is over then."""
        self._snapshot = self._subscriber.next()
        self._snapshot.load_into(module)
        return module.state_dict()

    def answer(self, answers: Callable[[bytes], Any]) -> None:
        """Nothing, but for loans: acknowledge before the version before is dropped. A load has acknowledged already."""
        if self.cell.mode == "loan":
            self._snapshot.ack()
            self._before = {}

    def run(self, answers: Callable[[bytes], Any]) -> None:
        """Several subscribers on one loop."""
        share, more = divmod(self.cell.readers, self.cell.processes)
        count = share + (self.number < more)
        names = proved(name for name, _ in self.cell.kind.shapes())

        async def follow() -> None:
            version = 0
            async with busync.Subscriber(self._endpoint, connect_timeout=60) as subscriber:
                async for snapshot in subscriber:
                    version += 1
                    prove(snapshot.tensors, names, version)

        async def follow_all() -> None:
            await asyncio.gather(*(follow() for _ in range(count)))

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(follow_all())


SYSTEM = System(
    name="busync", learner=BusyncLearner, reader=BusyncReader, warm=4, modes=frozenset((*USUAL, "loan", "loops")),
    gpu_modes=frozenset(("view", "loan")), spread=True, page="README.md",
    note="publish(wait='all'); plain subscribers in a loop: to ask for the next version acknowledges the last",
)  # fmt: skip
