"""The constants of the cost model in docs/PERFORMANCE.md, measured one by one: ``python -m bench.costs``."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import busync
from bench.states import KINDS, prove, proved, stamp
from busync.handles import (
    Planner,
    PrivateMappings,
    TensorBuilder,
    create_segment,
    flatten,
    open_segment,
    plan,
    unmapping,
)

VERSIONS = 400  #: of 20 KB, of which the last half counts


def main() -> None:
    """Print them all. A quiet machine, please."""
    torch.set_num_threads(1)
    directory = tempfile.mkdtemp(prefix="bench-", dir="/dev/shm")
    try:
        _planning()
        _mapping()
        _publishing(directory)
        _subscribing(directory)
    finally:
        for path in sorted(Path(directory).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        os.rmdir(directory)


def _say(what: str, value: float, unit: str) -> None:
    print(f"{what:<64} {value:9.2f} {unit}", flush=True)


def _median(call: Callable[[], Any], rounds: int) -> float:
    """Seconds of a call."""
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def _planning() -> None:
    state = KINDS["many"].make()
    count = len(state)
    planner = Planner()
    planner.plan(state, {})
    _say("to plan a layout that is new, per tensor", _median(lambda: plan(flatten(state)), 5) / count * 1e6, "us")
    _say("to plan the last layout again, per tensor", _median(lambda: planner.plan(state, {}), 9) / count * 1e6, "us")
    planned = plan(flatten(state))
    memory = memoryview(bytearray(planned.manifest.nbytes))

    def build() -> list[torch.Tensor]:
        builder = TensorBuilder(memory, planned.manifest)
        return [builder.build(spec) for spec in planned.manifest.tensors]

    _say("to make a tensor that is asked for", _median(build, 9) / count * 1e6, "us")


def _mapping() -> None:
    nbytes = 1 << 30
    segment = create_segment(open_segment("busync-costs"), nbytes)
    try:
        whole = torch.frombuffer(segment.mapping, dtype=torch.int64)
        _say("to copy 1 GiB on one thread", _median(partial(whole.copy_, torch.ones_like(whole)), 5) * 1e3, "ms")
        del whole
        held: list[memoryview] = []
        mappings = PrivateMappings(segment.fd, nbytes)
        mappings.prepare()

        def give() -> None:
            held.append(mappings.map())

        _say("to map 1 GiB", _median(give, 5) * 1e6, "us")
        held.clear()
        wait_for_unmapping()
        for edited in (False, True):
            memory = mappings.map()
            touched = torch.frombuffer(memory, dtype=torch.int64)
            touched[::512].sum()
            if edited:
                touched[0] = 1
            begun = time.perf_counter()
            del memory, touched
            what = "of which every page was read" + (" and one written to" if edited else "")
            _say(f"to drop 1 GiB {what}, for the caller", (time.perf_counter() - begun) * 1e6, "us")
            wait_for_unmapping()
            _say("the same, until its lease ends", (time.perf_counter() - begun) * 1e3, "ms")
    finally:
        segment.fd.close()


def wait_for_unmapping() -> None:
    """Until nothing is being unmapped."""
    while unmapping():
        time.sleep(0.0001)


def _publishing(directory: str) -> None:
    state = KINDS["cartpole"].make()

    async def nothing() -> None:
        return

    with busync.blocking.Publisher(f"{directory}/alone") as publisher:
        server = publisher._server
        assert server is not None, "just opened"
        _say(
            "a call into the publisher's thread and back",
            _median(lambda: server.call(nothing()).block(), 999) * 1e6,
            "us",
        )
        _say("a publish of 20 KB that nobody waits for", _median(lambda: publisher.publish(state), 999) * 1e6, "us")


def _subscribing(directory: str) -> None:
    one, many = (_rounds(f"{directory}/with-{count}", count) for count in (1, 5))
    _say("20 KB to 1 subscriber, publish to all acknowledged", one["seconds"] * 1e6, "us")
    _say("20 KB to 5 subscribers", many["seconds"] * 1e6, "us")
    thread = (many["thread"] - one["thread"]) / 4
    _say("CPU of the publisher's thread per version and further subscriber", thread * 1e6, "us")
    _say("CPU of a subscriber's process per version, its own reads included", many["reader"] * 1e6, "us")


def _rounds(endpoint: str, count: int) -> dict[str, float]:
    state = KINDS["cartpole"].make()
    context = multiprocessing.get_context("forkserver")
    readers: list[BaseProcess] = [context.Process(target=_read, args=(endpoint,), daemon=True) for _ in range(count)]
    taken = []
    with busync.blocking.Publisher(endpoint) as publisher:
        for reader in readers:
            reader.start()
        while sum(one["state"] != "joining" for one in publisher.status()["subscribers"]) < count:
            time.sleep(0.001)
        before = {}
        for version in range(1, VERSIONS + 1):
            if version == VERSIONS // 2:
                before = _cpu(readers)
            stamp(state, version)
            begun = time.perf_counter()
            publisher.publish(state, wait="all")
            taken.append(time.perf_counter() - begun)
        after = _cpu(readers)
        for reader in readers:
            reader.kill()
            reader.join()
    spent = {key: (after[key] - before[key]) / (VERSIONS // 2 + 1) for key in after}
    return {"seconds": statistics.median(taken[VERSIONS // 2 :]), "thread": spent["thread"], "reader": spent["readers"]}


def _cpu(readers: list[BaseProcess]) -> dict[str, float]:
    """Seconds so far: of the publisher's thread, and of a reader on average."""
    return {
        "thread": max(_ran(f"/proc/self/task/{task}") for task in os.listdir("/proc/self/task") if _is_server(task)),
        "readers": statistics.mean(
            sum(_ran(f"/proc/{reader.pid}/task/{task}") for task in os.listdir(f"/proc/{reader.pid}/task"))
            for reader in readers
        ),
    }


def _is_server(task: str) -> bool:
    """Every thread but the main one and libzmq's; the copy workers do nothing here."""
    name = Path(f"/proc/self/task/{task}/comm").read_text()
    return int(task) != os.getpid() and not name.startswith("ZMQ")


def _ran(task: str) -> float:
    with contextlib.suppress(FileNotFoundError):
        return int(Path(f"{task}/schedstat").read_text().split()[0]) / 1e9
    return 0.0


def _read(endpoint: str) -> None:
    torch.set_num_threads(1)
    names = proved(name for name, _ in KINDS["cartpole"].shapes())
    with busync.blocking.Subscriber(endpoint) as subscriber:
        for snapshot in subscriber:
            prove(snapshot.tensors, names, snapshot.version)


if __name__ == "__main__":
    multiprocessing.get_context("forkserver").set_forkserver_preload(["bench.preload"])
    main()
