"""How weights get from the learner to the actors: over busync, or over one queue per actor. The rest is the same."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from queue import Empty
from typing import Any, Self

from torch import Tensor
from torch.multiprocessing import get_context

import busync
from examples.cartpole.policy import Policy

PATIENCE = 60.0  #: seconds that an actor waits for its first weights
ARRIVAL = 0.1  #: seconds that a version which is there gets to arrive: the learner is busy with other things


@dataclass(frozen=True, slots=True)
class Adopted:
    """A version that an actor has just loaded."""

    version: int
    latency: float  #: seconds from the learner's call of ``publish`` until the weights were in the actor's module


class Inlet(ABC):
    """An actor's end. The learner makes it; the actor's process opens it with ``with``."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    @abstractmethod
    def adopt(self, policy: Policy) -> Adopted | None:
        """Load the newest weights into ``policy`` if there are newer ones. The first call waits for the first ones."""


class Outlet(ABC):
    """The learner's end."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    @abstractmethod
    def inlet(self, name: str) -> Inlet:
        """What a new actor needs."""

    @abstractmethod
    def publish(self, policy: Policy) -> int:
        """Let every actor have the weights as they are now; the number of this version."""

    @abstractmethod
    def forget(self, name: str) -> None:
        """The actor is gone."""

    @abstractmethod
    def lags(self) -> dict[str, int] | None:
        """How many versions each actor is behind now; None if the bus cannot tell."""


class BusyncOutlet(Outlet):
    """One publisher, which sees for itself who comes and goes."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._publisher = busync.blocking.Publisher(endpoint)

    def __enter__(self) -> Self:
        self._publisher.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._publisher.close()

    def inlet(self, name: str) -> Inlet:
        return BusyncInlet(self._endpoint, name)

    def publish(self, policy: Policy) -> int:
        report = self._publisher.publish(policy, values={"called_at": time.monotonic()})
        assert report.version is not None, "only a publisher that may skip skips"
        return report.version

    def forget(self, name: str) -> None:
        pass

    def lags(self) -> dict[str, int] | None:
        return {actor["name"]: actor["lag"] for actor in self._publisher.status()["subscribers"]}


class BusyncInlet(Inlet):
    """One subscriber. It asks ahead, so that the next version is there already when a stretch of play is over."""

    def __init__(self, endpoint: str, name: str) -> None:
        self._endpoint = endpoint
        self._name = name
        self._subscriber: busync.blocking.Subscriber

    def __enter__(self) -> Self:
        self._subscriber = busync.blocking.Subscriber(self._endpoint, name=self._name, prefetch=True).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._subscriber.close()

    def adopt(self, policy: Policy) -> Adopted | None:
        subscriber = self._subscriber
        snapshot = subscriber.poll(ARRIVAL) if subscriber.adopted else subscriber.next(timeout=PATIENCE)
        if snapshot is None:
            return None
        snapshot.load_into(policy)
        return Adopted(snapshot.version, time.monotonic() - snapshot.values["called_at"])


class QueueOutlet(Outlet):
    """A queue for each actor, into which every state dict is put. Torch moves the tensors into shared memory."""

    def __init__(self) -> None:
        self._context: Any = get_context("forkserver")
        self._queues: dict[str, Any] = {}
        self._newest: tuple[int, float, dict[str, Tensor]] | None = None

    def __exit__(self, *error: object) -> None:
        for name in list(self._queues):
            self.forget(name)

    def inlet(self, name: str) -> Inlet:
        queue = self._queues[name] = self._context.Queue()
        if self._newest is not None:
            queue.put(self._newest)  # nobody else gives a latecomer its weights
        return QueueInlet(queue)

    def publish(self, policy: Policy) -> int:
        called_at = time.monotonic()
        version = self._newest[0] + 1 if self._newest is not None else 1
        # A copy: the queue pickles later, on its own thread, and hands on the very memory that training would change.
        weights = {name: value.detach().clone() for name, value in policy.state_dict().items()}
        self._newest = version, called_at, weights
        for queue in self._queues.values():
            queue.put(self._newest)
        return version

    def forget(self, name: str) -> None:
        queue = self._queues.pop(name, None)
        if queue is not None:
            queue.cancel_join_thread()  # what nobody will read must not keep this process from ending
            queue.close()

    def lags(self) -> dict[str, int] | None:
        return None


class QueueInlet(Inlet):
    """The other end of one queue."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._started = False

    def __exit__(self, *error: object) -> None:
        self._queue.close()

    def adopt(self, policy: Policy) -> Adopted | None:
        newest = None if self._started else self._queue.get(timeout=PATIENCE)
        self._started = True
        while True:
            try:
                newest = self._queue.get_nowait()
            except Empty:
                break
        if newest is None:
            return None
        version, called_at, weights = newest
        policy.load_state_dict(weights)
        return Adopted(version, time.monotonic() - called_at)
