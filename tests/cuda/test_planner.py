"""Planning a source on the CPU and on GPUs again: as the first time, and without keeping it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from busync.errors import DeviceError
from busync.handles import Planner
from busync.handles import mixed as mixed_module
from busync.handles.cuda_memory import CudaExporter
from busync.handles.layout import Plan
from busync.handles.source import Flat
from tests.cuda.fake import FakeGpu, FakeProcess
from tests.support.mutants import Mutant

PLANNER = "busync/handles/planner.py"
MUTANTS = {
    "test_a_source_that_moves_is_planned_anew": Mutant(
        PLANNER, "    if last.devices:\n        return None\n", "", "tensors on a GPU are read where they were"
    ),
    "test_the_last_source_is_not_kept": Mutant(
        PLANNER, "[weakref.ref(tensor) for tensor in tensors]", "[(lambda t=tensor: t) for tensor in tensors]",
        "the planner keeps the learner's weights",
    ),
}  # fmt: skip


class Bench:
    """A planner, and how often it had to plan."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.process: FakeProcess = FakeGpu().process()
        self.planner = Planner(CudaExporter(self.process))
        self.planned = 0
        plan = mixed_module.plan_mixed

        def count(flat: Flat, cuda: CudaExporter) -> Plan:
            self.planned += 1
            return plan(flat, cuda)

        monkeypatch.setattr("busync.handles.planner.plan_mixed", count)

    def put(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        flat = self.process.allocate(index, tensor.nbytes)
        return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    def plan(self, source: dict[str, torch.Tensor]) -> Plan:
        """The planner's plan, which equals a fresh one."""
        _, planned = self.planner.plan(source, {})
        fresh = mixed_module.plan_mixed(Flat(source), CudaExporter(self.process))
        assert planned.manifest == fresh.manifest
        assert planned.moves == fresh.moves
        assert planned.devices.keys() == fresh.devices.keys()
        for device, part in planned.devices.items():
            assert part.manifest == fresh.devices[device].manifest
            assert part.places == fresh.devices[device].places
            assert [t.data_ptr() for t in part.sources] == [t.data_ptr() for t in fresh.devices[device].sources]
        return planned


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def source(bench: Bench) -> dict[str, torch.Tensor]:
    weight = torch.arange(12.0).reshape(3, 4)
    tied = bench.put(weight, 0)
    return {"host": weight, "a": tied, "b": bench.put(weight.t(), 1), "tied": tied, "none": torch.zeros(0, 2)}


def test_the_same_source_is_planned_once(bench: Bench) -> None:
    state = source(bench)
    for _ in range(3):
        bench.plan(state)
    assert bench.planned == 1


def test_a_source_that_moves_is_planned_anew(bench: Bench) -> None:
    state = source(bench)
    bench.plan(state)
    state["b"].data = bench.put(state["b"], 1)
    bench.plan(state)
    assert bench.planned == 2
    state["host"].data = torch.ones(3, 4)
    bench.plan(state)
    assert bench.planned == 3
    state["a"] = bench.put(torch.ones(3, 4), 1)
    bench.plan(state)
    assert bench.planned == 4


def test_the_last_source_is_not_kept(bench: Bench) -> None:
    state = source(bench)
    bench.plan(state)
    seen = [weakref.ref(tensor) for tensor in state.values()]
    state.clear()
    gc.collect()
    assert [reference() for reference in seen] == [None] * 5
    assert bench.process.allocated == 0


def test_a_source_of_copies_is_planned_each_time(bench: Bench) -> None:
    state = {"sliced": bench.put(torch.arange(12.0).reshape(3, 4), 0)[:, :2]}
    for _ in range(2):
        bench.plan(state)
    assert bench.planned == 2


def test_a_device_that_this_process_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    process = FakeGpu().process()
    exporter = CudaExporter(process)
    tensor = process.allocate(1, 64)
    process.visible.pop()
    monkeypatch.setattr(process, "index_of", lambda _: 1)
    with pytest.raises(DeviceError, match="cuda:1"):
        Planner(exporter).plan({"w": tensor}, {})
