"""One system at one piece of work: ``python -m bench.one SYSTEM MODE STATE READERS``."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import zmq

from bench.busy import keep_busy
from bench.states import KINDS, State, fetched, prove, proved, read_all, stamp
from bench.systems import find
from bench.systems.base import Answers, Cell, Learner, Reader, System, SystemFailed

PATIENCE = 240.0  #: seconds for one run of one system
END = 10.0  #: seconds in which a learner must end
RETURN = 5.0  #: seconds after which a device has the memory of processes that have ended
FILL = 0.9  #: of the memory that is there may be taken
NO_DEVICE = f"torch {torch.__version__} finds no CUDA device here"


@dataclass(slots=True)
class Measured:
    """What one run of a system at a cell gave."""

    seconds: list[float] = field(default_factory=list)  #: of each measured round
    first: float | None = None  #: seconds of the very first one
    failed: str = ""  #: why there is nothing
    kept: int = 0  #: bytes of shared memory that versions take in the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to measure."""

    most: int = 60  #: rounds
    seconds: float = 2.0  #: after which no round begins
    least: int = 5  #: rounds, however long they take
    slow: float = 0.5  #: seconds of a warm round after which 2 rounds are enough
    very_slow: float = 2.0  #: seconds of any round after which the next one is enough


@dataclass(frozen=True, slots=True)
class Play:
    """A learner and readers that have found each other and wait for the word."""

    learner: BaseProcess
    readers: list[BaseProcess]
    link: Connection

    def rounds(self) -> Measured:
        """Let them play.

        Raises:
            SystemFailed: the system cannot do it.
        """
        self.link.send("go")
        return _hear(self.link)


@contextmanager
def playing(system: System, cell: Cell, effort: Effort) -> Iterator[Play]:
    """Start a learner and readers, and end them afterwards.

    All are forks of one process that has imported everything: it is much faster than to import torch in each.

    Raises:
        SystemFailed: the system cannot do it.
    """
    _ensure_room(system, cell)
    context = multiprocessing.get_context("forkserver")
    directory = tempfile.mkdtemp(prefix="bench-", dir="/dev/shm")
    os.mkdir(os.path.join(directory, "own"))
    tickets = system.tickets(cell) if system.reader is not None else []
    ours, theirs = context.Pipe()
    learner = context.Process(target=_learn, args=(system.name, cell, effort, directory, tickets, theirs))
    readers: list[BaseProcess] = []
    try:
        _start(learner)
        theirs.close()
        _hear(ours)  # that the learner can be found
        for number, ticket in enumerate(tickets):
            arguments = (system.name, ticket, cell, directory, number)
            reader = context.Process(target=_read, args=arguments, daemon=True)
            _start(reader)
            readers.append(reader)
        _hear(ours)  # that all have attached
        yield Play(learner, readers, ours)
    finally:
        for process in readers:  # it may be inside a library that hears no other signal
            process.kill()
        for process in readers:
            process.join()
        ours.close()  # which is the learner's sign to end
        if learner.pid is not None:
            learner.join(END)
            learner.kill()
            learner.join()
            # Those of openings on a GPU, of which readers that were killed took back none.
            for counters in Path("/dev/shm").glob(f"torch_{learner.pid}_*"):
                counters.unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)


def _ensure_room(system: System, cell: Cell) -> None:
    """Start nothing that would not fit.

    Raises:
        SystemFailed: it would not, or there is no device.
    """
    if (needs := system.needs_bytes(cell)) > (there := FILL * available_bytes()):
        raise SystemFailed(f"it takes about {needs / 1e9:.1f} GB of memory, and {there / 1e9:.1f} are there")
    if not cell.kind.on_device:
        return
    if not torch.cuda.is_available():
        raise SystemFailed(NO_DEVICE)
    wants, stop_at = system.needs_device_bytes(cell), time.monotonic() + RETURN
    there, whole = torch.cuda.mem_get_info()
    while FILL * there < wants <= FILL * whole and time.monotonic() < stop_at:
        time.sleep(0.1)
        there, _ = torch.cuda.mem_get_info()
    if wants > FILL * there:
        room = f"{FILL * there / 1e9:.1f} are there"
        raise SystemFailed(f"it takes about {wants / 1e9:.1f} GB of the device's memory, and {room}")


def _start(process: BaseProcess) -> None:
    try:
        process.start()
    except ValueError as error:  # what it is given has more descriptors than multiprocessing passes on
        raise SystemFailed(f"a process cannot be started: {error}") from None


def measure(system: System, cell: Cell, effort: Effort) -> Measured:
    """Time the rounds of a system. Never raises for what the system cannot do."""
    try:
        with playing(system, cell, effort) as play:
            return play.rounds()
    except SystemFailed as error:
        return Measured(failed=str(error))


def available_bytes() -> int:
    """Memory that could be had without swapping."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def raise_limits() -> None:
    """As many descriptors as this process may have: a thousand connections, and systems that want one per tensor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _hear(learner: Connection) -> Measured:
    """What the learner says next.

    Raises:
        SystemFailed: it cannot do it, or says nothing.
    """
    if not learner.poll(PATIENCE):
        raise SystemFailed(f"not done within {PATIENCE:g} s")
    try:
        measured: Measured = learner.recv()
    except EOFError:
        raise SystemFailed("the learner's process died") from None
    if measured.failed:
        raise SystemFailed(measured.failed)
    return measured


def _learn(name: str, cell: Cell, effort: Effort, directory: str, tickets: list[Any], main: Connection) -> None:
    """The life of a learner process."""
    raise_limits()
    torch.set_num_threads(1)
    result = Measured()
    answers = Answers(_address(directory))
    try:
        state = cell.kind.make()
        system = find(name)
        with system.learner(cell, os.path.join(directory, "own"), tickets) as learner:
            main.send(result)
            learner.attach()
            answers.take(len(tickets))
            gc.collect()
            gc.freeze()
            main.send(result)
            main.recv()  # the word
            _hand_over(learner, state, answers, system.warm, effort, result)
            result.kept = learner.kept()
            main.send(result)
            main.poll(None)  # until the readers have been ended
    except Exception as error:
        if not isinstance(error, SystemFailed):
            traceback.print_exc()
        main.send(Measured(failed=f"{type(error).__name__}: {error}"))


def _hand_over(learner: Learner, state: State, answers: Answers, warm: int, effort: Effort, result: Measured) -> None:
    """Rounds without end, of which the first ``warm`` do not count."""
    stop_at, least, version = float("inf"), effort.least, 0
    while len(result.seconds) < effort.most:
        version += 1
        stamp(state, version)
        learner.prepare(state)
        if learner.cell.kind.on_device:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        learner.hand_over(state, answers)
        took = time.perf_counter() - begun
        if version == 1:
            result.first = took
        if version > warm:
            result.seconds.append(took)
            if time.perf_counter() > stop_at and len(result.seconds) >= least:
                break
        elif version == warm or took > effort.very_slow:
            warm, stop_at = version, time.perf_counter() + effort.seconds
            least = 1 if took > effort.very_slow else min(least, 2) if took > effort.slow else least


def _address(directory: str) -> str:
    return f"ipc://{directory}/answers"


def _read(name: str, ticket: Any, cell: Cell, directory: str, number: int) -> None:
    """The life of a reader process, until it is killed."""
    raise_limits()
    torch.set_num_threads(1)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(_address(directory))
    try:
        torch.empty(1, device=cell.kind.device)  # an actor on a GPU uses it already
        system = find(name)
        assert system.reader is not None, "only a system with readers starts them"
        with system.reader(ticket, cell, os.path.join(directory, "own"), number) as reader:
            gc.collect()
            gc.freeze()
            keep_busy(cell, number)
            socket.send(b"")
            reader.run(socket.send) if cell.processes else _rounds(reader, cell, socket.send)
    except Exception as error:
        traceback.print_exc()
        socket.send(f"a reader: {type(error).__name__}: {error}".encode())
        time.sleep(PATIENCE)


def _rounds(reader: Reader, cell: Cell, send: Callable[[bytes], Any]) -> None:
    names = proved(name for name, _ in cell.kind.shapes())
    module = cell.kind.module() if cell.mode == "load" else None
    version = 0
    while True:
        tensors = reader.load(module) if module is not None else reader.receive()
        version += 1
        prove(fetched(tensors, names) if cell.kind.on_device else tensors, names, version)
        if cell.mode in ("read", "memory"):
            read_all(tensors)
        reader.answer(send)
        del tensors


def main() -> int:
    """Measure one system, and print a line."""
    parser = argparse.ArgumentParser(prog="python -m bench.one", description=__doc__)
    parser.add_argument("system", help="its name in bench/systems")
    parser.add_argument("mode", choices=("view", "read", "load", "loan"))
    parser.add_argument("state", help=", ".join(KINDS))
    parser.add_argument("readers", type=int)
    parser.add_argument("--processes", type=int, default=0, help="that the readers are spread over (0: one each)")
    parser.add_argument("--busy", action="store_true", help="with a loop of matrix products per core in the readers")
    parser.add_argument("--seconds", type=float, default=2.0, help="to measure for")
    parser.add_argument("--most", type=int, default=60, help="rounds")
    options = parser.parse_args()
    cell = Cell(mode=options.mode, state=options.state, readers=options.readers, processes=options.processes,
                busy=options.busy)  # fmt: skip
    multiprocessing.get_context("forkserver").set_forkserver_preload(["bench.preload"])
    result = measure(find(options.system), cell, Effort(seconds=options.seconds, most=options.most))
    if result.seconds:
        rounds = sorted(seconds * 1e3 for seconds in result.seconds)
        middle, first = rounds[len(rounds) // 2], (result.first or 0.0) * 1e3
        print(f"{options.system:8} {cell}: median {middle:.3f} ms of {len(rounds)} rounds, {rounds[0]:.3f} to "
              f"{rounds[-1]:.3f}; the first {first:.2f}")  # fmt: skip
    if result.failed:
        print(result.failed, file=sys.stderr)
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main())
