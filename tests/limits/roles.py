"""The child processes: publishers, and subscribers that use versions in place. One method per step."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import time
from dataclasses import dataclass
from typing import Any, Self

import torch

import busync
from busync.publishing import PublishReport
from tests.limits.kit import Ticker, check_filled, filled, limit_open_files, mappings, model_of, open_files
from tests.support.roles import Role

LAST = "last"  #: the label of the version after which a subscriber stops asking


class LimitRole(Role):
    """These tests measure by themselves how long loops are held."""

    WATCHED = False

    def thaw(self) -> None:
        """Let the garbage collector look at torch's own objects again, from which the forkserver keeps it."""
        gc.unfreeze()
        gc.collect()


class Learner(LimitRole):
    """A publisher of states in which every element is the version's number."""

    def __init__(self, endpoint: str, options: dict[str, Any] | None = None, limit: int = 0) -> None:
        super().__init__()
        if limit:
            limit_open_files(limit)
        self.runner = asyncio.Runner()
        self.pub = busync.Publisher(endpoint, **(options or {}))
        self.runner.run(self.pub.__aenter__())
        self.state: dict[str, torch.Tensor] = {}
        self.version = 0

    def stop(self) -> None:
        self.runner.run(self.pub.close())
        self.runner.close()
        del self.pub, self.runner

    def make_model(self, nbytes: int) -> None:
        """The state is that of a model."""
        self.state = filled(model_of(nbytes), 0.0)

    def make_tensors(self, count: int) -> None:
        """The state is ``count`` small tensors."""
        self.state = {f"t{i}": torch.zeros(3) for i in range(count)}

    def publish(self, **named: Any) -> PublishReport:
        """Publish the next version; arguments as for busync."""
        self.version += 1
        for tensor in self.state.values():
            tensor.fill_(self.version)
        return self.runner.run(self.pub.publish(self.state, **named))

    def status(self) -> dict[str, Any]:
        return self.pub.status()

    # Blocked

    def prepare_matmul(self, seconds: float) -> None:
        """Find matrices that take about ``seconds`` to multiply."""
        size, took = 500, 0.0
        while took < seconds / 8:
            size = size * 3 // 2
            matrix = torch.rand(size, size)
            began = time.perf_counter()
            torch.mm(matrix, matrix)
            took = time.perf_counter() - began
        size = int(size * (1.4 * seconds / took) ** (1 / 3))
        self.matrix = torch.rand(size, size)

    def block(self, how: str, seconds: float) -> Span:
        """Block the own loop with one torch operation ("matmul") or a sleep."""

        async def block() -> Span:
            began = time.monotonic()
            if how == "matmul":
                torch.mm(self.matrix, self.matrix)
            else:
                time.sleep(seconds)  # noqa: ASYNC251  # the point of it
            return Span(began, time.monotonic())

        return self.runner.run(block())

    # Very many tensors

    def publish_many(self, count: int) -> Publishing:
        """Publish one-element tensors, each of which says its number plus the version's; wait until all have them."""
        self.version += 1
        state = {f"t{i}": torch.tensor(i + self.version) for i in range(count)}
        gc.collect()  # what these objects cost the collector is not the publisher's doing

        async def publish() -> Publishing:
            assert self.pub._server is not None
            began = time.monotonic()
            with Ticker(self.pub._server.loop) as theirs:
                with Ticker(asyncio.get_running_loop()) as mine:
                    await self.pub.publish(state)
                duration = time.monotonic() - began
                await self.pub.wait(self.version)
            return Publishing(mine.worst, theirs.worst, duration)

        return self.runner.run(publish())

    # Next to a copy

    def race(self, rounds: int) -> list[Round]:
        """Publish to all-acked, and copy as many bytes from one warm place to another, by turns."""
        total = sum(tensor.nbytes for tensor in self.state.values())
        source = torch.ones(total, dtype=torch.uint8)
        target = torch.empty_like(source).copy_(source)

        async def one_round() -> Round:
            await asyncio.sleep(0.01)
            began = time.perf_counter()
            report = await self.pub.publish(self.state, wait="all")
            published = time.perf_counter()
            ctypes.memmove(target.data_ptr(), source.data_ptr(), total)
            copied = time.perf_counter()
            assert not report.pending, f"not all have acked: {report}"
            return Round(published - began, copied - published, len(report.acked))

        return [self.runner.run(one_round()) for _ in range(rounds)]


class Reader(LimitRole):
    """A subscriber that uses every version in place: ``load_state_dict(assign=True)`` into a model of ``nbytes``."""

    def __init__(self, endpoint: str, name: str = "", nbytes: int = 0, limit: int = 0, attach: bool = True) -> None:
        super().__init__()
        torch.set_num_threads(1)
        if limit:
            limit_open_files(limit)
        self.endpoint = endpoint
        self.model = model_of(nbytes) if nbytes else None
        self.version = 0
        self.kept: dict[str, torch.Tensor] = {}
        self.runner = asyncio.Runner()
        self.sub = busync.Subscriber(endpoint, name=name)
        if attach:
            self.runner.run(self.sub.__aenter__())

    def stop(self) -> None:
        self.model = None
        self.kept.clear()
        self.runner.run(self.sub.close())
        self.runner.close()
        del self.sub, self.runner

    async def _adopt(self, snapshot: busync.Snapshot, *, look: bool = True) -> None:
        assert self.model is not None
        self.model.load_state_dict(snapshot.tensors, assign=True)
        self.version = snapshot.version
        await snapshot.ack()
        if look:
            check_filled(self.model, self.version)

    def adopt_all(self, look: bool = True) -> list[int]:
        """Adopt version after version until LAST: their numbers. ``look``: touch and check every page of each."""

        async def adopt_all() -> list[int]:
            versions: list[int] = []
            async for snapshot in self.sub:
                await self._adopt(snapshot, look=look)
                versions.append(snapshot.version)
                if snapshot.label == LAST:
                    break
            return versions

        return self.runner.run(adopt_all())

    def adopt(self) -> int:
        """Adopt one version, and keep it: its number."""

        async def adopt() -> int:
            await self._adopt(await self.sub.next(timeout=10))
            return self.version

        return self.runner.run(adopt())

    def sit(self, seconds: float, steps: int) -> list[int]:
        """Work slowly with the version that is there, then adopt the newest, ``steps`` times: their numbers."""

        async def sit() -> list[int]:
            versions = []
            for _ in range(steps):
                stop_at = time.monotonic() + seconds
                while time.monotonic() < stop_at:
                    assert self.model is not None
                    check_filled(self.model, self.version)
                    await asyncio.sleep(seconds / 5)
                await self._adopt(await self.sub.next(timeout=10))
                versions.append(self.version)
            return versions

        return self.runner.run(sit())

    def come_anew(self) -> Span:
        """Be a new subscriber, from nothing until it has adopted the current version."""

        async def come_anew() -> Span:
            began = time.monotonic()
            async with busync.Subscriber(self.endpoint) as sub:
                snapshot = await sub.next(timeout=10)
                await self._adopt(snapshot, look=False)
                span = Span(began, time.monotonic())
                assert self.model is not None
                check_filled(self.model, self.version)
            return span

        return self.runner.run(come_anew())

    def take_many(self) -> Unpacking:
        """Take a version of ``publish_many``, and check every value."""

        async def take_many() -> Unpacking:
            loop = asyncio.get_running_loop()
            regions = mappings(os.getpid())
            with Ticker(loop) as waiting:
                snapshot = await self.sub.next(timeout=20)
                tensors = snapshot.tensors
            await snapshot.ack()

            def count_wrong() -> int:
                return sum(tensors[name].item() != int(name[1:]) + snapshot.version for name in tensors)

            with Ticker(loop) as building:
                wrong = await asyncio.to_thread(count_wrong)
            return Unpacking(waiting.worst, building.worst, mappings(os.getpid()) - regions, len(tensors), wrong)

        return self.runner.run(take_many())

    def take_few(self) -> tuple[int, int]:
        """Take a version of small tensors in place and check every element: its number, and open files."""

        async def take_few() -> tuple[int, int]:
            snapshot = await self.sub.next(timeout=10)
            tensors = dict(snapshot.tensors)
            wrong = [key for key, tensor in tensors.items() if not bool((tensor == snapshot.version).all())]
            assert not wrong, f"{len(wrong)} tensors are wrong, {wrong[0]} among them"
            await snapshot.ack()
            self.kept = tensors
            return snapshot.version, open_files(os.getpid())

        return self.runner.run(take_few())


# Answers. Times are seconds; points in time are of the monotonic clock.


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when something went on."""

    began: float
    ended: float

    @property
    def length(self) -> float:
        return self.ended - self.began

    def within(self, other: Self) -> bool:
        return other.began <= self.began and self.ended <= other.ended


@dataclass(frozen=True, slots=True)
class Publishing:
    """How the publish of very many tensors went."""

    caller: float  #: for which the caller's loop was held at most
    publisher: float  #: and the publisher's own, until every subscriber had the version
    duration: float


@dataclass(frozen=True, slots=True)
class Unpacking:
    """How very many tensors came."""

    waiting: float  #: for which the loop was held at most until the version was there
    building: float  #: and while a thread made all tensors
    regions: int  #: mapped regions more than before
    tensors: int
    wrong: int  #: of them


@dataclass(frozen=True, slots=True)
class Round:
    """One publish to all-acked, and one copy of as many bytes."""

    publish: float
    copy: float
    acked: int
