"""States whose every element follows from the seed, the version, the tensor and its place.

They are on the CPU, or on the device that the environment names, here and in the children of a test: see the fixture
``device`` of the end-to-end tests. On a device they are filled and compared by copies alone, as the emulated CUDA
runtime has no kernels.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from tests.support.processes import DEVICE

#: About 300 KB: above what a publish or a load does inline.
SHAPES: dict[str, tuple[int, ...]] = {
    "body.weight": (256, 257),
    "body.bias": (1000,),
    "conv": (3, 4, 5),
    "empty": (0, 3),
    "scalar": (),
}
SMALL: dict[str, tuple[int, ...]] = {"weight": (7, 5), "bias": (5,), "scalar": ()}
_MASK = (1 << 22) - 1  # exact in float32


def device() -> torch.device:
    """Where states and modules are."""
    return torch.device(os.environ.get(DEVICE, "cpu"))


def put(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, on the device."""
    return tensor.to(device())


def fill(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """As ``tensor.fill_(value)``, on whatever device."""
    with torch.no_grad():
        return tensor.copy_(torch.full(tensor.shape, value, dtype=tensor.dtype))


def values(seed: int, version: int, index: int, numel: int) -> torch.Tensor:
    """float32 of shape (numel,)."""
    key = (seed * 1_000_003 + version * 7_919 + index * 104_729) & _MASK
    return (torch.arange(numel, dtype=torch.int64).mul_(40_503).add_(key) & _MASK).to(torch.float32)


def state(seed: int, version: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    """What the publisher with this seed publishes as this version."""
    return {
        name: put(values(seed, version, index, torch.Size(shape).numel()).view(shape))
        for index, (name, shape) in enumerate(sorted(shapes.items()))
    }


def check(
    tensors: Mapping[str, torch.Tensor],
    seed: int,
    version: int,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> int:
    """Insist that every element is right, and on the device; the number of elements.

    Raises:
        AssertionError: one is not.
    """
    expected = state(seed, version, shapes)
    assert sorted(tensors) == sorted(expected), f"version {version} has {sorted(tensors)}"
    for name, wanted in expected.items():
        found = tensors[name].detach()
        assert found.device.type == wanted.device.type, f"{name!r} of version {version} is on {found.device}"
        found, wanted = found.cpu(), wanted.cpu()
        assert found.shape == wanted.shape, f"{name!r} of version {version} has the shape {found.shape}"
        if not torch.equal(found, wanted):
            at = int((found != wanted).reshape(-1).nonzero()[0])
            raise AssertionError(
                f"{name!r} of version {version}, seed {seed}: element {at} is {found.reshape(-1)[at]}, "
                f"expected {wanted.reshape(-1)[at]}"
            )
    return sum(t.numel() for t in expected.values())


class Module(torch.nn.Module):
    """A module whose state dict has the names and shapes of a state."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        for name, shape in shapes.items():
            module: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, torch.nn.Parameter(put(torch.zeros(shape))))
