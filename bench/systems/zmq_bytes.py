"""Raw bytes over ZeroMQ PUB/SUB: one message with one frame for each tensor, and nothing copied that need not be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import zmq
from torch import Tensor

from bench.states import State
from bench.systems.base import Answers, Cell, Learner, Reader, System

BUFFER_BYTES: Final = 4_000_000  #: of each connection; a large frame then takes fewer writes


class ZmqLearner(Learner):
    """Publishes to all who have subscribed."""

    def __init__(self, cell: Cell, directory: str, tickets: list[Any]) -> None:
        super().__init__(cell, directory, tickets)
        self._context = zmq.Context(io_threads=2)  # one has to write to all readers by itself
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # tells of every subscription, not only of the first
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.SNDBUF, BUFFER_BYTES)
        self._socket.bind(f"ipc://{directory}/zmq")

    def attach(self) -> None:
        """PUB drops what comes before a subscription."""
        for _ in range(self.cell.readers):
            self._socket.recv()

    def hand_over(self, state: State, answers: Answers) -> None:
        """Send the tensors' own memory; nobody changes it before all have answered."""
        frames: list[Any] = [tensor.view(-1).view(torch.uint8).numpy() for tensor in state.values()]
        self._socket.send_multipart(frames, copy=False)
        answers.take(self.cell.readers)

    def close(self) -> None:
        """Close the socket and its context."""
        self._socket.close(0)
        self._context.term()


class ZmqReader(Reader):
    """Receives frames, and makes tensors over them."""

    def __init__(self, ticket: Any, cell: Cell, directory: str, number: int) -> None:
        super().__init__(ticket, cell, directory, number)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RCVBUF, BUFFER_BYTES)
        self._socket.connect(f"ipc://{directory}/zmq")
        self._socket.subscribe(b"")
        self._shapes = cell.kind.shapes()
        self._frames: list[Any] = []

    def receive(self) -> Mapping[str, Tensor]:
        """One message."""
        self._frames = self._socket.recv_multipart(copy=False)
        dtype = self.cell.kind.dtype
        return {
            name: torch.frombuffer(frame.buffer, dtype=dtype).view(shape)
            for (name, shape), frame in zip(self._shapes, self._frames, strict=True)
        }


SYSTEM = System(
    name="zmq", learner=ZmqLearner, reader=ZmqReader, warm=1, copies=2,
    page="https://pyzmq.readthedocs.io/en/latest/howto/serialization.html",
    note="PUB/SUB over ipc, a frame per tensor, sent and received without copies in Python",
)  # fmt: skip
