"""GPU handles: export, open, close, on the fake device. Between real processes: tests/gpu/test_bus.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import busync
from busync.errors import AttachError
from tests.cuda.test_bus import Machine, on_gpu, same, until, weights
from tests.support.mutants import Mutant

MUTANTS = {
    "test_b29_memory_comes_back_however_many_readers_there_are": Mutant(
        "busync/handles/cuda_import.py",
        "if known is not None or own is not None:  # torch counts openings, and this is none",
        "if False:",
        "an export is counted for ever by a process that has the segment open already",
    ),
    "test_b31_two_components_of_one_process_open_a_segment_once": Mutant(
        "busync/handles/cuda_import.py",
        "                self.give_back(handle)\n            if known is not None:\n",
        "                pass\n            if known is not None:\n",
        "opened once, counted twice, closed once",
    ),
    "test_b32_nothing_piles_up_without_a_call": Mutant(
        "busync/server.py",
        "                if self.pool.drop(segment_id):\n",
        "                if self.pool.drop(segment_id) and False:\n",
        "nobody has torch look whether what was dropped is free",
    ),
    "test_b42_a_device_that_is_not_seen_is_an_error_with_both_sides": Mutant(
        "busync/handles/cuda_memory.py",
        'f"this process does not see it; it sees {there}"',
        '"this process does not see it"',
        "only one side is named",
    ),
    "test_b46_memory_that_shows_something_else_is_never_a_version": Mutant(
        "busync/handles/cuda_import.py",
        "!= handle.canary:",
        "== b'':",
        "what was opened is not looked at",
    ),
}
pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("runtime_dir")]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(monkeypatch)
    yield made
    made.finished()


async def test_b29_memory_comes_back_however_many_readers_there_are(machine: Machine) -> None:
    source = on_gpu(machine, weights(1))
    own = machine.publisher.allocated
    async with busync.Publisher("p", max_segments=3) as pub:
        readers = [busync.Subscriber("p") for _ in range(4)]
        for reader in readers:
            await reader.__aenter__()
        allocated = []
        for version in range(1, 21):
            await pub.publish(source)
            for reader in readers:
                snapshot = await reader.next(timeout=5)
                assert snapshot.version == version
                assert same(snapshot.tensors, weights(1))
                del snapshot
            gc.collect()
            allocated.append(machine.publisher.allocated)
        assert allocated[4] == allocated[19]
        for reader in readers:
            await reader.close()
        await until(lambda: machine.exporter.outstanding() == [])
    await until(lambda: machine.publisher.allocated == own)
    source.clear()


async def test_b31_two_components_of_one_process_open_a_segment_once(machine: Machine) -> None:
    source = on_gpu(machine, weights(1))
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="target") as target:
        async with busync.Subscriber("p", name="draft") as draft:
            await pub.publish(source)
            held, other = (await target.next(timeout=5)).tensors, (await draft.next(timeout=5)).tensors
            assert held["w"].data_ptr() == other["w"].data_ptr()
            counts = [machine.publisher.count(e.handle.counter, e.handle.slot) for e in machine.exporter.outstanding()]
            assert counts == [1, 0], "one is open, and the other was given back"
            del other
        assert same(held, weights(1))
        del held
    source.clear()


async def test_b32_nothing_piles_up_without_a_call(machine: Machine) -> None:
    """Every version has another layout, so that each needs a fresh segment; the reader's session goes on."""
    async with busync.Publisher("p", max_segments=2) as pub, busync.Subscriber("p") as sub:
        for version in range(1, 13):
            source = on_gpu(machine, {"w": torch.ones(1000 * 3 ** (version % 3), version)})
            await pub.publish(source)
            assert len((await sub.next(timeout=5)).tensors) == 1
            source.clear()
        newest = sum(pub.status()["topics"]["default"]["devices"].values())
        await until(lambda: machine.publisher.allocated <= newest + 4 * 4096)
        await until(lambda: pub.status()["exports"] <= 2)


async def test_b42_a_device_that_is_not_seen_is_an_error_with_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, visible=[1])  # the reader calls its only device 0, as the publisher calls its own
    source = on_gpu(machine, weights(1))
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="blind") as sub:
        await pub.publish(source)
        snapshot = await sub.next(timeout=5)
        with pytest.raises(AttachError) as caught:
            snapshot.tensors  # noqa: B018
        assert all(device in str(caught.value) for device in machine.gpu.devices[:2])
        await until(lambda: machine.gpu.devices[0] in pub.status()["subscribers"][0]["reason"])
        del snapshot, caught
    source.clear()
    machine.finished()


async def test_b46_memory_that_shows_something_else_is_never_a_version(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = on_gpu(machine, weights(1))
    monkeypatch.setattr(machine.reader, "read", lambda tensor: bytes(tensor.numel()))
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        await pub.publish(source)
        snapshot = await sub.next(timeout=5)
        with pytest.raises(AttachError, match="does not show what the publisher wrote"):
            snapshot.tensors  # noqa: B018
        with pytest.raises(busync.WaitTimeout):
            await sub.next(timeout=0.05)
        assert pub.status()["subscribers"][0]["version"] is None
        del snapshot
    source.clear()
