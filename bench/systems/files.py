"""safetensors files in a RAM disk, and a bare message when there is a new one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import zmq
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.states import State
from bench.systems.base import Answers, Cell, Learner, Reader, System


class FileLearner(Learner):
    """Writes beside, renames, tells, and removes what all have left behind."""

    def __init__(self, cell: Cell, directory: str, tickets: list[Any]) -> None:
        super().__init__(cell, directory, tickets)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # tells of every subscription, not only of the first
        self._socket.bind(f"ipc://{directory}/word")
        self._version = 0

    def attach(self) -> None:
        """PUB drops what comes before a subscription."""
        for _ in range(self.cell.readers):
            self._socket.recv()

    def hand_over(self, state: State, answers: Answers) -> None:
        """One file."""
        self._version += 1
        path = f"{self.directory}/{self._version}.safetensors"
        save_file(state, f"{path}.part")
        os.replace(f"{path}.part", path)
        self._socket.send(path.encode())
        answers.take(self.cell.readers)

    def prepare(self, state: State) -> None:
        """Off the clock: the file before the last is nobody's any more."""
        if self._version > 1:
            os.unlink(f"{self.directory}/{self._version - 1}.safetensors")

    def kept(self) -> int:
        """Files that have not been removed."""
        return sum(entry.stat().st_size for entry in os.scandir(self.directory) if entry.name.endswith(".safetensors"))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(0)


class FileReader(Reader):
    """Maps the file, which costs least."""

    def __init__(self, ticket: Any, cell: Cell, directory: str, number: int) -> None:
        super().__init__(ticket, cell, directory, number)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(f"ipc://{directory}/word")
        self._socket.subscribe(b"")
        self._held: Mapping[str, Tensor] = {}

    def receive(self) -> Mapping[str, Tensor]:
        """The newest file."""
        self._held = load_file(self._socket.recv().decode())
        return self._held


SYSTEM = System(
    name="files", learner=FileLearner, reader=FileReader, needs=("safetensors",),
    page="https://huggingface.co/docs/safetensors/api/torch",
    note="save_file to a RAM disk and a rename; a bare ZeroMQ message; load_file",
)  # fmt: skip
