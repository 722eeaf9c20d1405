"""Plans for a GPU segment: the same layout as on the CPU, filled by copies of tensors."""

from __future__ import annotations

import pytest
import torch

from busync.errors import ExportError
from busync.handles import Flat, plan
from busync.handles.cuda_layout import plan_cuda
from tests.cuda.fake import FakeGpu
from tests.cuda.worlds import NBYTES, PublisherSide, ReaderSide, settle

base = torch.arange(24.0).reshape(4, 6)
ints = torch.arange(16, dtype=torch.int32)
STATES: dict[str, dict[str, torch.Tensor]] = {
    "plain": {"a": base, "b": ints},
    "tied": {"a": base, "b": base, "c": base.view(-1)},
    "turned": {"a": base.t(), "b": base.reshape(2, 2, 6).permute(2, 0, 1)},
    "sliced": {"a": base[:, 1:3]},
    "interleaved": {"a": base[:, ::2], "b": base[:, 1::2]},
    "part of another": {"a": base, "b": base[1:3]},
    "overlapping": {"a": base[:3], "b": base[1:]},
    "expanded": {"a": torch.tensor([1.0, 2.0]).expand(3, 2)},
    "conjugated": {"a": torch.complex(base, base).conj()},
    "two dtypes": {"a": ints, "b": ints.view(torch.int16)},
    "scalar": {"a": torch.tensor(5)},
    "empty": {"a": torch.zeros(0, 3), "b": base},
    "nothing": {"a": torch.zeros(0, 3)},
}


@pytest.mark.parametrize("name", STATES)
def test_a_gpu_segment_has_the_layout_and_the_bytes_of_a_cpu_segment(name: str) -> None:
    flat = Flat(STATES[name])
    planned, expected = plan_cuda(flat), plan(flat)
    assert planned.manifest == expected.manifest
    publisher = PublisherSide(FakeGpu().process())
    segment = publisher.segment(NBYTES)
    segment.flat.zero_()
    segment.write(planned, []).synchronize()
    memory = bytearray(NBYTES)
    for job in expected.jobs(memoryview(memory), 1):
        job()
    assert bytes(segment.flat.tolist()) == bytes(memory)


@pytest.mark.parametrize("name", STATES)
def test_what_was_tied_comes_back_tied(name: str) -> None:
    gpu = FakeGpu()
    publisher, side = PublisherSide(gpu.process()), ReaderSide(gpu.process())
    planned, segment = plan_cuda(Flat(STATES[name])), publisher.segment(NBYTES)
    segment.write(planned, []).synchronize()
    side.receive(1, segment.export(side.reader))
    builder = side.map(1, 1, planned.manifest)
    built = {spec.name: builder.build(spec) for spec in planned.manifest.tensors}
    for tensor_name, tensor in STATES[name].items():
        assert torch.equal(built[tensor_name], tensor.resolve_conj())
    storages = {spec.group: built[spec.name].untyped_storage()._cdata for spec in planned.manifest.tensors}
    assert len(set(storages.values())) == len(storages)
    for spec in planned.manifest.tensors:
        assert built[spec.name].untyped_storage()._cdata == storages[spec.group] or 0 in spec.size
    del built, tensor
    builder.drop()
    settle(lambda: side.released == [1])
    side.close()


def test_what_cannot_be_carried_is_refused_by_name() -> None:
    with pytest.raises(ExportError, match="'a' cannot be published"):
        plan_cuda(Flat({"a": torch.eye(3).to_sparse()}))
    with pytest.raises(ExportError, match="zero tensor"):
        plan_cuda(Flat({"a": torch._efficientzerotensor(3)}))
