"""How late callbacks of event loops come while busync publishes, adopts and releases on them."""

from __future__ import annotations

import asyncio
import gc
import math
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch
from torch import Tensor

import busync
from bench.one import END, PATIENCE, raise_limits
from bench.states import prove, proved, read_all, stamp
from bench.systems.base import Cell, SystemFailed

PERIOD: Final = 0.001  #: seconds from one callback to the next
QUIET: Final = 0.5  #: seconds without a version, to know what the machine does by itself
LAST: Final = "last"  #: the label of the last version


class Ticker:
    """Has itself called every millisecond of a loop, and notes how late it is.

    The times are fixed beforehand. Whatever holds the loop for 30 ms so makes 30 callbacks late, and not one.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.late: list[float] = []  #: seconds, of each callback
        self._due = self._loop.time() + PERIOD
        self._handle = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self.late.append(self._loop.time() - self._due)
        self._due += PERIOD
        self._handle = self._loop.call_at(self._due, self._tick)

    def stop(self) -> list[float]:
        """No more; what was noted, with the wait that is not over yet."""
        self._handle.cancel()
        while (late := self._loop.time() - self._due) > 0:
            self.late.append(late)
            self._due += PERIOD
        return self.late


def measure_loops(cell: Cell, seconds: float, least: int = 12) -> dict[str, Any]:
    """Publish for a while. For ``learner`` and ``actor``: callbacks, median, p99 and maximum of seconds that they came
    late, while versions went round and (``quiet``) before. Never raises for what cannot be done.
    """
    context = multiprocessing.get_context("forkserver")
    directory = tempfile.mkdtemp(prefix="bench-", dir="/dev/shm")
    processes: list[BaseProcess] = []
    links: list[Connection] = []
    try:
        for life in (_learn, *[_act] * cell.readers):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_live, args=(life, cell, directory, seconds, least, theirs)))
            links.append(ours)
            processes[-1].start()
            theirs.close()
        learner, *actors = [_hear(link) for link in links]
    except SystemFailed as error:
        return {"failed": str(error)}
    finally:
        for link in links:
            link.close()
        for process in processes:
            process.join(END if processes[0].exitcode is None else 1)
            process.kill()
            process.join()
        shutil.rmtree(directory, ignore_errors=True)
    return {
        "failed": "",
        "versions": learner["versions"],
        "learner": summary(learner["late"]),
        "actor": summary(late for actor in actors for late in actor["late"]),
        "quiet": {
            "learner": summary(learner["quiet"]),
            "actor": summary(late for actor in actors for late in actor["quiet"]),
        },
    }


def summary(late: Iterable[float]) -> dict[str, float]:
    """Of the callbacks of a loop."""
    ordered = sorted(late)
    if not ordered:
        return {"callbacks": 0}
    p50, p99 = (ordered[math.ceil(part * len(ordered)) - 1] for part in (0.5, 0.99))
    return {"callbacks": len(ordered), "p50": p50, "p99": p99, "max": ordered[-1]}


def _hear(link: Connection) -> dict[str, Any]:
    if not link.poll(PATIENCE):
        raise SystemFailed(f"not done within {PATIENCE:g} s")
    try:
        said: dict[str, Any] = link.recv()
    except EOFError:
        raise SystemFailed("a process died") from None
    if said.get("failed"):
        raise SystemFailed(said["failed"])
    return said


Life = Callable[[Cell, str, float, int], Coroutine[Any, Any, dict[str, Any]]]


def _live(life: Life, cell: Cell, directory: str, seconds: float, least: int, link: Connection) -> None:
    raise_limits()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or a collection over all that torch has made holds every thread for 100 ms, with or without busync
    try:
        link.send(asyncio.run(life(cell, os.path.join(directory, "bus"), seconds, least)))
    except Exception as error:
        traceback.print_exc()
        link.send({"failed": f"{type(error).__name__}: {error}"})


async def _learn(cell: Cell, endpoint: str, seconds: float, least: int) -> dict[str, Any]:
    """A learner that publishes without a pause, and waits each time until all have acknowledged."""
    state = cell.kind.make()
    stamped = {name: state[name] for name in proved(state)}  # to write into all would hold the loop for milliseconds
    versions = 0
    async with busync.Publisher(endpoint) as publisher:
        while sum(one["state"] != "joining" for one in publisher.status()["subscribers"]) < cell.readers:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        ticker = Ticker()
        await asyncio.sleep(QUIET)
        quiet = ticker.stop()
        ticker = Ticker()
        stop_at, label = time.monotonic() + seconds, ""
        while label != LAST:
            versions += 1
            label = LAST if time.monotonic() > stop_at and versions >= least else ""
            stamp(stamped, versions)
            report = await publisher.publish(state, label=label, wait="all", timeout=120)
            if len(report.acked) != cell.readers:
                raise SystemFailed(f"{len(report.acked)} of {cell.readers} acknowledged: {report}")
        late = ticker.stop()
    return {"versions": versions, "late": late, "quiet": quiet}


async def _act(cell: Cell, endpoint: str, seconds: float, least: int) -> dict[str, Any]:
    """An actor that has each version in place until the next, and reads all of it on a thread."""
    names = proved(name for name, _ in cell.kind.shapes())
    held: Mapping[str, Tensor] = {}
    version = 0
    async with busync.Subscriber(endpoint, connect_timeout=60) as subscriber:
        ticker = Ticker()
        await asyncio.sleep(QUIET / 2)
        quiet = ticker.stop()
        ticker = Ticker()
        async for snapshot in subscriber:
            version += 1
            held = snapshot.tensors  # and the version before is let go of
            prove(held, names, version)
            await asyncio.to_thread(read_all, held)
            await snapshot.ack()
            if snapshot.label == LAST:
                break
        late = ticker.stop()
    return {"late": late, "quiet": quiet}
