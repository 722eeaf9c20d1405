"""The floor: a bare, synchronous wake-and-answer round over ZeroMQ, with the views and the reads, and nothing sent."""

from __future__ import annotations

import math
import mmap
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import zmq
from torch import Tensor

from bench.states import Kind, State, prove, proved
from bench.systems.base import Answers, Cell, Learner, Reader, System


class _Views(Mapping[str, Tensor]):
    """Views of one shared mapping, or of one buffer on a GPU, made when they are asked for."""

    def __init__(self, kind: Kind, memory: Any) -> None:
        self._memory = memory
        self._dtype = kind.dtype
        self._places: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        at = 0
        for name, shape in kind.shapes():
            count = math.prod(shape)
            self._places[name] = at, count, shape
            at += count * kind.dtype.itemsize

    def __getitem__(self, name: str) -> Tensor:
        at, count, shape = self._places[name]
        if isinstance(self._memory, Tensor):
            return self._memory[at : at + count * self._dtype.itemsize].view(self._dtype).view(shape)
        return torch.frombuffer(self._memory, dtype=self._dtype, count=count, offset=at).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _mapped(path: str, access: int) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0, access=access)


class FloorLearner(Learner):
    """Wakes every reader with one bare message, and takes as many answers."""

    def __init__(self, cell: Cell, directory: str, tickets: list[Any]) -> None:
        super().__init__(cell, directory, tickets)
        self._memory = self._make(f"{directory}/memory")
        self._views = dict(_Views(cell.kind, self._memory))
        self._router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._router.setsockopt(zmq.RCVHWM, 0)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.bind(f"ipc://{directory}/floor")
        self._tokens: list[bytes] = []

    def _make(self, path: str) -> Any:
        """The memory: a file, or a buffer on a GPU."""
        kind = self.cell.kind
        if kind.on_device:
            return torch.empty(kind.nbytes, dtype=torch.uint8, device=kind.device)
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, kind.nbytes)
        return _mapped(path, mmap.ACCESS_WRITE)

    def attach(self) -> None:
        """Wait until every reader has said who it is. What is on a GPU is shared with each, as torch does it."""
        self._tokens = [self._router.recv_multipart()[0] for _ in range(self.cell.readers)]
        if self.cell.kind.on_device:
            for token in self._tokens:
                self._router.send_multipart((token, bytes(ForkingPickler.dumps(self._memory))))

    def prepare(self, state: State) -> None:
        """The proof is written beforehand: a floor sends nothing."""
        for name, view in self._views.items():
            flat = state[name].view(-1)
            view.view(-1)[0] = flat[0]
            view.view(-1)[-1] = flat[-1]

    def hand_over(self, state: State, answers: Answers) -> None:
        """One round."""
        send, receive = self._router.send_multipart, self._router.recv_multipart
        for token in self._tokens:
            send((token, b"go"))
        for _ in self._tokens:
            receive()

    def close(self) -> None:
        """Close the socket."""
        self._router.close(0)


class FloorReader(Reader):
    """Sleeps until it is woken."""

    def __init__(self, ticket: Any, cell: Cell, directory: str, number: int) -> None:
        super().__init__(ticket, cell, directory, number)
        share, more = divmod(cell.readers, cell.processes) if cell.processes else (1, 0)
        self._dealers: list[zmq.Socket[bytes]] = []
        for _ in range(share + (number < more)):
            dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            dealer.connect(f"ipc://{directory}/floor")
            dealer.send(b"here")
            self._dealers.append(dealer)
        if cell.kind.on_device:
            memory = pickle.loads(self._dealers[0].recv())
        else:
            memory = _mapped(f"{directory}/memory", mmap.ACCESS_COPY)
        self._views = _Views(cell.kind, memory)

    def receive(self) -> Mapping[str, Tensor]:
        """Wait for the word."""
        self._dealers[0].recv()
        return self._views

    def answer(self, answers: Callable[[bytes], Any]) -> None:
        """One bare message."""
        self._dealers[0].send(b"ok")

    def run(self, answers: Callable[[bytes], Any]) -> None:
        """Several readers in this process, each with a socket of its own."""
        names = proved(self._views)
        poller = zmq.Poller()
        versions = dict.fromkeys(self._dealers, 0)
        for dealer in self._dealers:
            poller.register(dealer, zmq.POLLIN)
        while True:
            for dealer, _ in poller.poll():
                dealer.recv()
                versions[dealer] += 1
                prove(self._views, names, versions[dealer])
                dealer.send(b"ok")


SYSTEM = System(
    name="floor", learner=FloorLearner, reader=FloorReader, modes=frozenset(("view", "read", "loan")), spread=True,
    gpu_modes=frozenset(("view",)),
    note="a bare round over ZeroMQ ROUTER and DEALER, with the same views and reads, and no bytes sent; on a GPU the "
    "views are of one buffer, which each reader has opened once",
)  # fmt: skip
