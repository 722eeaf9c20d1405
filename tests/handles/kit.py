"""Round trips without sockets: publish into memory, check as a reader would, build."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from busync.handles import Plan, TensorBuilder, flatten, plan
from busync.manifest import check_part

FILLER = 0xA5


def write(plan: Plan, workers: int = 1) -> bytearray:
    """The segment of a plan, whose other bytes are FILLER."""
    buffer = bytearray([FILLER]) * max(1, plan.manifest.nbytes)
    for job in plan.jobs(memoryview(buffer), workers):
        job()
    return buffer


def build(plan: Plan, buffer: bytearray) -> dict[str, torch.Tensor]:
    manifest = plan.manifest
    check_part(manifest.nbytes, manifest.groups, manifest.tensors)
    builder = TensorBuilder(memoryview(buffer), manifest)
    return {spec.name: builder.build(spec) for spec in manifest.tensors}


def round_trip(source: Any) -> dict[str, torch.Tensor]:
    planned = plan(flatten(source))
    return build(planned, write(planned))


def raw(tensor: torch.Tensor) -> bytes:
    """The logical elements in row-major order, so that NaN equals NaN."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).tolist()) if plain.numel() else b""


def assert_equal(built: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor]) -> None:
    assert list(built) == list(source)
    for name, tensor in source.items():
        assert built[name].dtype is tensor.dtype
        assert built[name].shape == tensor.shape
        assert raw(built[name]) == raw(tensor)
        assert type(built[name]) is torch.Tensor
        assert not built[name].requires_grad


def random_of(dtype: torch.dtype, *size: int) -> torch.Tensor:
    """A tensor of any dtype with random bits."""
    count = torch.Size(size).numel() * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, size, dtype=torch.uint8).view(torch.bool)
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(size)
