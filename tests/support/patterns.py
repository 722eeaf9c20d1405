"""States whose every element follows from the seed, the version, the tensor and its place."""

from __future__ import annotations

from collections.abc import Mapping

import torch

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


def values(seed: int, version: int, index: int, numel: int) -> torch.Tensor:
    """float32 of shape (numel,)."""
    key = (seed * 1_000_003 + version * 7_919 + index * 104_729) & _MASK
    return (torch.arange(numel, dtype=torch.int64).mul_(40_503).add_(key) & _MASK).to(torch.float32)


def state(seed: int, version: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    """What the publisher with this seed publishes as this version."""
    return {
        name: values(seed, version, index, torch.Size(shape).numel()).view(shape)
        for index, (name, shape) in enumerate(sorted(shapes.items()))
    }


def check(
    tensors: Mapping[str, torch.Tensor],
    seed: int,
    version: int,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> int:
    """Insist that every element is right; the number of elements.

    Raises:
        AssertionError: one is not.
    """
    expected = state(seed, version, shapes)
    assert sorted(tensors) == sorted(expected), f"version {version} has {sorted(tensors)}"
    for name, wanted in expected.items():
        found = tensors[name].detach()
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
            module.register_parameter(leaf, torch.nn.Parameter(torch.zeros(shape)))
