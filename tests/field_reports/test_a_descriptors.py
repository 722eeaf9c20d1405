"""Shared CPU memory: descriptors and mappings do not grow with tensors, versions or time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import busync
from tests.field_reports.kit import bus, leases, raised, scaled, traces
from tests.limits.kit import open_files
from tests.limits.roles import Learner, Reader
from tests.support.leaks import resources
from tests.support.mutants import Mutant
from tests.support.processes import Cast
from tests.support.roles import wait_until

MUTANTS = {
    "test_b03_descriptors_do_not_grow_with_tensors_or_versions": Mutant(
        "busync/session.py",
        "self.segments.pop(segment).close()",
        "self.segments[segment].close()",
        "a reader keeps the descriptor of every segment that it ever had",
    ),
    "test_b04_a_kept_tensor_costs_memory_and_no_descriptor": Mutant(
        "busync/holds.py",
        "private.map(keep=self)",
        "private.map(keep=(self, segment.fd.dup()))",
        "each mapping in place keeps a descriptor",
    ),
    "test_b05_tensors_are_no_mappings": Mutant(
        "busync/handles/build.py",
        "made = buffer[group.offset_bytes : group.offset_bytes + group.nbytes]",
        "made = memoryview(mmap.mmap(-1, group.nbytes))\n"
        "            made[:] = buffer[group.offset_bytes : group.offset_bytes + group.nbytes]",
        "every tensor has a mapping of its own",
    ),
    "test_b06_the_sharing_strategy_of_the_program_is_its_own": Mutant(
        "busync/handles/planner.py",
        "        if flat is None:\n",
        "        [t.share_memory_() for t in source.values()]\n        if flat is None:\n",
        "tensors are shared by torch's own means, which may need a helper process",
    ),
}


class Varying(Learner):
    """A learner whose versions differ in size, so that each needs a segment of its own."""

    def publish_one(self, count: int, numel: int) -> int:
        self.version += 1
        self.state = {f"t{i}": torch.full((numel,), float(self.version)) for i in range(count)}
        report = self.runner.run(self.pub.publish(self.state, wait="all"))
        assert len(report.acked) == 3, report
        return open_files(os.getpid())


def test_b03_descriptors_do_not_grow_with_tensors_or_versions(cast: Cast) -> None:
    """With 256 descriptors for each process: far fewer are used, and no more at version 20 than at version 5."""
    count, versions, limit = scaled(300, 2000), 20, 256
    learner = cast.begin(Varying, "files", {"max_segments": 4}, limit)
    readers = [cast.begin(Reader, "files", f"reader-{i}", 0, limit) for i in range(3)]
    for actor in (learner, *readers):
        actor.finish()
    files: dict[int, list[int]] = {}
    for version in range(1, versions + 1):
        for reader in readers:
            reader.start("take_few")
        publisher = learner.call("publish_one", count, 16 * 4 ** (version % 5))  # more sizes than segments
        said = [reader.finish() for reader in readers]
        assert [number for number, _ in said] == [version] * 3
        files[version] = [publisher, *(now for _, now in said)]
    assert max(max(row) for row in files.values()) < 64
    for row in zip(*files.values(), strict=True):
        assert max(row[14:]) <= max(row[:6]), f"open files grow: {row}"


def test_b04_a_kept_tensor_costs_memory_and_no_descriptor() -> None:
    """What is kept of old versions is named on both sides and limited; it has no descriptor beyond its segment's."""
    versions, numel = scaled(60, 500), scaled(20_000, 1 << 18)
    kept: list[torch.Tensor] = []
    with bus() as (pub, (sub,)):
        files = 0
        for version in range(1, versions + 1):
            pub.publish({"big": torch.full((numel,), float(version)), "small": torch.tensor(version)})
            if len(kept) == 2:
                error = raised(busync.PinnedError, lambda: sub.next(5))
                assert isinstance(error, busync.PinnedError)
                assert error.holders == tuple(f"version {version - 2 + i}: 'small'" for i in range(2)), error
                assert leases(pub) == [version - 2, version - 1]
                kept = [tensor.clone() for tensor in kept]  # the remedy
                assert [int(tensor) for tensor in kept] == [version - 2, version - 1]
                kept.clear()
                wait_until(lambda: leases(pub) == [], timeout=2.0)
            kept.append(sub.next(5).tensors["small"])
            assert kept[-1] == version
            if version == 10:
                files = resources().fds.total()
        assert resources().fds.total() <= files
        kept.clear()
    with bus(max_held=40, max_segments=64) as (pub, (sub,)):  # who wants to keep many says so
        before = resources().fds.total()
        for version in range(1, 31):
            pub.publish({f"t{i}": torch.full((400,), float(version)) for i in range(50)})
            tensors = sub.next(5).tensors
            kept += [tensors[f"t{i}"] for i in range(50)]
            del tensors
        assert resources().fds.total() <= before + 2 * 30 + 1, "more than one descriptor of a segment on each side"
        assert leases(pub) == list(range(1, 31))
        assert [v["holders"] for v in pub.status()["topics"]["default"]["versions"]] == [["reader-0"]] * 30
        assert [float(tensor[-1]) for tensor in kept] == [float(1 + i // 50) for i in range(1500)]
        del kept[:]
        wait_until(lambda: leases(pub) == [], timeout=2.0)


def test_b05_tensors_are_no_mappings(cast: Cast) -> None:
    """Tens of thousands of tensors in one version arrive right, and hardly one mapped region more."""
    count = scaled(20_000, 70_000)
    learner = cast.begin(Learner, "many")
    reader = cast.begin(Reader, "many")
    for actor in (learner, reader):
        actor.finish()
    reader.start("take_many")
    learner.call("publish_many", count)
    unpacked = reader.finish()
    assert (unpacked.tensors, unpacked.wrong) == (count, 0)
    assert unpacked.regions < 50


sharing: Any = torch.multiprocessing  # which has no types


@pytest.fixture
def _strategy() -> Iterator[None]:
    before = sharing.get_sharing_strategy()
    yield
    sharing.set_sharing_strategy(before)


@pytest.mark.usefixtures("_strategy")
@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_b06_the_sharing_strategy_of_the_program_is_its_own(strategy: str) -> None:
    """It is neither used nor changed: no helper process, no named memory, sources stay as they were."""
    sharing.set_sharing_strategy(strategy)
    before = resources()
    for cycle in range(scaled(8, 50)):
        with bus() as (pub, (sub,)):
            source = {"w": torch.full((1000,), float(cycle))}
            pub.publish(source)
            assert not source["w"].is_shared()  # type: ignore[no-untyped-call]
            tensor = sub.next(5).tensors["w"]
            assert bool((tensor == cycle).all())
            assert resources().children == before.children
        del tensor
        assert sharing.get_sharing_strategy() == strategy
    assert traces(os.getpid()) == []
