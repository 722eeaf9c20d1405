from __future__ import annotations

import copy
import gc
import io
import mmap
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from busync.errors import ClosedError, HandleError
from busync.handles import (
    LoanBuffer,
    PrivateMappings,
    TensorBuilder,
    create_segment,
    flatten,
    like_plan,
    open_segment,
    plan,
)
from busync.handles.tensors import TORCH_DTYPES
from busync.manifest import GroupSpec, Manifest, TensorSpec

PAGE = mmap.PAGESIZE


def published() -> tuple[TensorBuilder, weakref.ref[Any], dict[str, TensorSpec]]:
    """A builder over a private mapping with a, b (tied) and c; nothing else refers to the mapping."""
    weight = torch.arange(6.0).view(2, 3)
    planned = plan(flatten({"a": weight, "b": weight, "c": torch.ones(4), "empty": torch.empty(0)}))
    segment = create_segment(open_segment("busync-test"), PAGE)
    for job in planned.jobs(segment.mapping, 1):
        job()
    memory = PrivateMappings(segment.fd, PAGE).map()  # without prepare(): nothing is kept
    segment.fd.close()
    builder = TensorBuilder(memory, planned.manifest)
    return builder, weakref.ref(memory.obj), {spec.name: spec for spec in planned.manifest.tensors}


def test_the_mapping_lives_as_long_as_any_tensor() -> None:
    builder, mapping, specs = published()
    tensor = builder.build(specs["a"])
    builder.drop()
    del builder
    part = tensor[1].detach().t()
    del tensor
    gc.collect()
    assert mapping() is not None
    assert part.tolist() == [3, 4, 5]
    del part
    gc.collect()
    assert mapping() is None


def test_the_mapping_lives_as_long_as_a_module_uses_it() -> None:
    builder, mapping, specs = published()
    module = nn.Linear(3, 2, bias=False)
    module.load_state_dict({"weight": builder.build(specs["a"])}, assign=True)
    builder.drop()
    gc.collect()
    assert builder.live_names() == ["a", "b"]
    assert mapping() is not None
    module.weight = nn.Parameter(torch.zeros(2, 3))
    gc.collect()
    assert builder.live_names() == []
    assert mapping() is None


def test_the_names_of_what_is_still_used_are_known() -> None:
    builder, _, specs = published()
    kept = [builder.build(specs[name]) for name in ("a", "c", "empty")]
    storage = kept[1].untyped_storage()
    builder.drop()
    assert builder.live_names() == ["a", "b", "c"]
    del kept
    assert builder.live_names() == ["c"]
    del storage
    assert builder.live_names() == []


def test_a_dropped_builder_builds_no_more() -> None:
    builder, _, specs = published()
    builder.drop()
    with pytest.raises(ClosedError):
        builder.build(specs["a"])


def test_each_group_has_a_storage_of_its_own() -> None:
    builder, _, specs = published()
    a, b, c = (builder.build(specs[name]) for name in "abc")
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert (a.untyped_storage().nbytes(), c.untyped_storage().nbytes()) == (24, 16)
    saved = io.BytesIO()
    torch.save(c, saved)
    assert saved.tell() < 2 * PAGE
    assert copy.deepcopy(c).tolist() == [1, 1, 1, 1]


def test_what_a_reader_writes_is_seen_by_tied_tensors_alone() -> None:
    builder, _, specs = published()
    again, _, _ = published()
    builder.build(specs["a"]).zero_()
    assert builder.build(specs["b"]).sum() == 0
    assert again.build(specs["b"]).sum() == 15


def test_a_tensor_can_be_trained() -> None:
    builder, _, specs = published()
    with torch.inference_mode():
        weight = builder.build(specs["a"])
    weight.requires_grad_()
    (gradient,) = torch.autograd.grad((weight * 2).sum(), [weight])
    assert torch.equal(gradient, torch.full((2, 3), 2.0))


def test_an_unknown_dtype_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TensorSpec("w", "float32", (1,), (1,), 0, 0, False, False)
    builder = TensorBuilder(bytearray(4), Manifest(b"", 4, (GroupSpec(0, 4),), (spec,)))
    monkeypatch.delitem(TORCH_DTYPES, "float32")
    with pytest.raises(HandleError, match=r"float32.*does not know"):
        builder.build(spec)


def test_a_default_device_does_not_matter() -> None:
    builder, _, specs = published()
    with torch.device("meta"):
        assert all(builder.build(spec).is_cpu for spec in specs.values())


# Loans


def loan() -> LoanBuffer:
    segment = create_segment(open_segment("busync-test"), PAGE)
    segment.fd.close()
    module = nn.Linear(3, 2)
    return LoanBuffer(TensorBuilder(segment.mapping, like_plan(module)))


def test_a_loan_is_written_in_place() -> None:
    segment = create_segment(open_segment("busync-test"), PAGE)
    segment.fd.close()
    manifest = like_plan({"w": ("float32", (2,))})
    buffer = LoanBuffer(TensorBuilder(segment.mapping, manifest))
    buffer.tensors["w"].copy_(torch.tensor([1.0, 2.0]))
    assert bytes(segment.mapping[:8]) == bytes(torch.tensor([1.0, 2.0]).view(torch.uint8).tolist())
    assert not buffer.tensors["w"].requires_grad


def test_a_loan_that_nobody_uses_is_free() -> None:
    buffer = loan()
    for tensor in buffer.tensors.values():
        tensor.zero_()
    del tensor
    buffer.drop()
    assert buffer.in_use() == []
    assert buffer.tensors == {}


def test_a_loan_names_what_is_still_used() -> None:
    buffer = loan()
    view = buffer.tensors["weight"][0].numpy()
    kept = buffer.tensors
    buffer.drop()
    assert buffer.in_use() == ["weight"]
    assert kept == {}
    del view
    assert buffer.in_use() == []
