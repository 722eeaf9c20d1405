"""What a system has to offer to be measured: a learner's end and a reader's end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Self

import zmq
from torch import Tensor, nn

from bench.states import KINDS, Kind, State

Mode = Literal["view", "read", "load", "loan", "memory", "loops"]
CONTEXT_BYTES: Final = 500e6  #: of a device's memory that a process takes before it has any tensor, roughly
USUAL: Final[tuple[Mode, ...]] = ("view", "read", "load", "memory")  #: what a system with readers can do


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One piece of work."""

    mode: Mode
    state: str
    readers: int  #: that answer
    processes: int = 0  #: that they are spread over; 0: one each
    busy: bool = False  #: with as many loops of matrix products as there are cores, in the readers' processes

    @property
    def kind(self) -> Kind:
        """The weights."""
        return KINDS[self.state]

    def __str__(self) -> str:
        spread = f" in {self.processes} processes" if self.processes else ""
        return f"{self.mode} {self.state} {self.readers}{spread}{' busy' if self.busy else ''}"


class Answers:
    """Where readers say that they can use a version: one bare message each, for systems with no word for it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, 120_000)
        self._socket.bind(address)

    def take(self, count: int) -> None:
        """Wait for so many answers. An answer with text in it is a reader's last."""
        receive = self._socket.recv
        for _ in range(count):
            text = receive()
            if text:
                raise SystemFailed(text.decode())

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(0)


class SystemFailed(Exception):
    """A system could not do the work; the text says why. Shown in its cell."""


class Learner(ABC):
    """The learner's end. Made, used and closed in the learner's process; readers are started when it is made."""

    def __init__(self, cell: Cell, directory: str, tickets: list[Any]) -> None:
        self.cell = cell
        self.directory = directory  #: an empty one of its own, on a RAM disk
        self.tickets = tickets  #: those of the readers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def attach(self) -> None:  # noqa: B027
        """Called while the readers are being started, which attach meanwhile."""

    def prepare(self, state: State) -> None:  # noqa: B027
        """Off the clock, when ``state`` is the next version. For "loan": write it where it will be published from."""

    @abstractmethod
    def hand_over(self, state: State, answers: Answers) -> None:
        """Give ``state`` to every reader, and wait until each has answered. On the clock."""

    def kept(self) -> int:
        """Bytes of shared memory that versions take between two rounds. 0: readers have them in their own."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Give everything back. The readers have been ended before."""


class Reader(ABC):
    """A reader's end. Made and used in the reader's process."""

    def __init__(self, ticket: Any, cell: Cell, directory: str, number: int) -> None:
        self.ticket = ticket
        self.cell = cell
        self.directory = directory
        self.number = number  #: of this process, from 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return

    @abstractmethod
    def receive(self) -> Mapping[str, Tensor]:
        """Wait for the next version; its tensors by name, to be read. The version before may be dropped."""

    def load(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Wait for the next version and copy it into ``module``; what can be read of it."""
        module.load_state_dict(dict(self.receive()))
        return module.state_dict()

    def run(self, answers: Callable[[bytes], Any]) -> None:
        """All of this process's readers, if they are spread: rounds without end, each looked at and answered."""
        raise NotImplementedError

    def answer(self, answers: Callable[[bytes], Any]) -> None:
        """Say that the version received can be used, after it was looked at."""
        answers(b"")


def no_tickets(cell: Cell) -> list[Any]:
    """For a system whose readers need nothing but the directory."""
    return [None] * (cell.processes or cell.readers)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system under measurement."""

    name: str
    learner: Callable[[Cell, str, list[Any]], Learner]
    reader: Callable[[Any, Cell, str, int], Reader] | None = None  #: None: no readers at all
    tickets: Callable[[Cell], list[Any]] = no_tickets  #: for each reader process, and all of them for the learner
    modes: frozenset[Mode] = frozenset(USUAL)
    gpu_modes: frozenset[Mode] = frozenset()  #: what it can do with weights on a GPU
    staged: bool = False  #: weights on a GPU go through the host's memory
    needs: tuple[str, ...] = ()  #: modules that have to be installed
    spread: bool = False  #: can have several readers in one process
    busy: bool = True  #: has readers, whose processes can have other work too
    warm: int = 2  #: rounds after which it takes as long as ever
    copies: int = 0  #: of the weights that a reader has in memory of its own, where they are wanted, at most
    page: str = ""  #: the documentation that was followed
    note: str = ""  #: how it is used, in a line

    def can(self, cell: Cell) -> bool:
        """Is this work for it?"""
        modes = self.gpu_modes if cell.kind.on_device else self.modes
        return cell.mode in modes and (self.spread or not cell.processes) and (self.busy or not cell.busy)

    def needs_bytes(self, cell: Cell) -> int:
        """The host's memory that it takes, roughly: what readers have of their own, and a few versions beside."""
        if cell.kind.on_device:
            return 4 * cell.kind.nbytes * self.staged
        own = self.copies + (cell.mode == "load")
        return cell.kind.nbytes * (own * cell.readers + 4)

    def needs_device_bytes(self, cell: Cell) -> float:
        """A device's memory that it takes, roughly: the same, and what each process takes for itself."""
        versions = self.copies * cell.readers + (1 if self.staged else 4)
        return cell.kind.nbytes * versions + CONTEXT_BYTES * (cell.readers + 1)
