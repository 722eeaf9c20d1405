"""The weights that are sent, and how a reader proves that it can use them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

Shapes = list[tuple[str, tuple[int, ...]]]
State = dict[str, Tensor]

PROVED_EVERY: Final = 8  #: of so many tensors one is looked at
STAMPS: Final = 100  #: versions are told apart by numbers below this, which every dtype can hold


@dataclass(frozen=True, slots=True)
class Kind:
    """A model's weights: names, shapes, one dtype, one place."""

    name: str
    what: str
    dtype: torch.dtype
    shapes: Callable[[], Shapes]
    device: str = "cpu"  #: where the learner has them, and where readers want them

    @property
    def on_device(self) -> bool:
        """Are they on a GPU?"""
        return self.device != "cpu"

    @property
    def tensors(self) -> int:
        """How many there are."""
        return len(self.shapes())

    @property
    def nbytes(self) -> int:
        """Of all tensors together."""
        return sum(math.prod(shape) for _, shape in self.shapes()) * self.dtype.itemsize

    def make(self) -> State:
        """Weights in private memory, every page of it touched. On a GPU, which has no cold pages, of any value."""
        if self.on_device:
            return {name: torch.empty(shape, dtype=self.dtype, device=self.device) for name, shape in self.shapes()}
        return {name: torch.full(shape, 0.5, dtype=self.dtype) for name, shape in self.shapes()}

    def module(self) -> nn.Module:
        """A module of its own memory whose state dict has these names."""
        return Holder(self.make())


class Holder(nn.Module):
    """A module with the parameters of a state, dotted names included."""

    def __init__(self, state: State) -> None:
        super().__init__()
        for name, value in state.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                inner = module._modules[part]
                assert inner is not None, "just added"
                module = inner
            module.register_parameter(last, nn.Parameter(value, requires_grad=False))


def _linear(name: str, rows: int, columns: int, bias: bool = True) -> Shapes:
    shapes: Shapes = [(f"{name}.weight", (rows, columns))]
    return [*shapes, (f"{name}.bias", (rows,))] if bias else shapes


def _cartpole() -> Shapes:
    return [*_linear("0", 64, 4), *_linear("2", 64, 64), *_linear("4", 2, 64)]


def _atari() -> Shapes:
    convolutions: Shapes = []
    for name, shape in (("0", (32, 4, 8, 8)), ("2", (64, 32, 4, 4)), ("4", (64, 64, 3, 3))):
        convolutions += [(f"{name}.weight", shape), (f"{name}.bias", shape[:1])]
    return [*convolutions, *_linear("7", 512, 3136), *_linear("9", 6, 512)]


def _gpt2() -> Shapes:
    shapes: Shapes = [("wte.weight", (50257, 768)), ("wpe.weight", (1024, 768))]
    for i in range(12):
        for norm in ("ln_1", "ln_2"):
            shapes += [(f"h.{i}.{norm}.weight", (768,)), (f"h.{i}.{norm}.bias", (768,))]
        for name, rows, columns in (
            ("attn.c_attn", 768, 2304), ("attn.c_proj", 768, 768), ("mlp.c_fc", 768, 3072), ("mlp.c_proj", 3072, 768),
        ):  # fmt: skip
            shapes += [(f"h.{i}.{name}.weight", (rows, columns)), (f"h.{i}.{name}.bias", (columns,))]
    return [*shapes, ("ln_f.weight", (768,)), ("ln_f.bias", (768,))]


def _lm() -> Shapes:
    shapes: Shapes = [("embed.weight", (151936, 896))]
    for i in range(24):
        shapes += _linear(f"layers.{i}.q", 896, 896)
        shapes += [*_linear(f"layers.{i}.k", 128, 896), *_linear(f"layers.{i}.v", 128, 896)]
        shapes += [(f"layers.{i}.o.weight", (896, 896)), (f"layers.{i}.down.weight", (896, 4864))]
        shapes += [(f"layers.{i}.{name}.weight", (4864, 896)) for name in ("gate", "up")]
        shapes += [(f"layers.{i}.{name}.weight", (896,)) for name in ("norm_1", "norm_2")]
    return [*shapes, ("norm.weight", (896,))]


def _many() -> Shapes:
    return [(f"block_{i // 10}.part_{i % 10}", (100, 100)) for i in range(5000)]


def _blocks(tensors: int, columns: int) -> Shapes:
    """As many equal tensors, of 1,024 rows."""
    return [(f"block_{i // 10}.part_{i % 10}", (1024, columns)) for i in range(tensors)]


def _on_gpu(name: str, tensors: int, columns: int) -> Kind:
    return Kind(
        name, f"bfloat16 on a GPU, {tensors:,} tensors", torch.bfloat16, partial(_blocks, tensors, columns), "cuda:0"
    )


KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("cartpole", "a policy for CartPole", torch.float32, _cartpole),
        Kind("atari", "the convolutional network of Atari agents", torch.float32, _atari),
        Kind("gpt2", "GPT-2 small", torch.float32, _gpt2),
        Kind("lm", "a language model of half a billion parameters", torch.bfloat16, _lm),
        Kind("many", "5,000 tensors", torch.float32, _many),
        _on_gpu("g0", 12, 1),  # to try the harness with
        _on_gpu("g1", 300, 1628),
        _on_gpu("g4", 1000, 1953),
        _on_gpu("g16", 3000, 2604),
    )
}


def stamp(state: Mapping[str, Tensor], version: int) -> None:
    """Write the version into the first and the last value of every tensor, by copies: an emulated GPU has no others."""
    for tensor in state.values():
        flat, mark = tensor.view(-1), torch.tensor(version % STAMPS, dtype=tensor.dtype)
        flat[0].copy_(mark)
        flat[-1].copy_(mark)


def proved(names: Iterable[str]) -> list[str]:
    """The names of the tensors that a reader looks at."""
    return list(names)[::PROVED_EVERY]


def prove(tensors: Mapping[str, Tensor], names: Iterable[str], version: int) -> None:
    """Insist that the tensors named are those of a version: their first and last values are read."""
    expected = float(version % STAMPS)
    for name in names:
        flat = tensors[name].view(-1)
        if flat[0].item() != expected or flat[-1].item() != expected:
            raise AssertionError(f"{name} holds {flat[0].item():g} and {flat[-1].item():g}, not {expected:g}")


def fetched(tensors: Mapping[str, Tensor], names: Iterable[str]) -> State:
    """Of the tensors named, which are on a GPU, the first and the last value, on the host: all are waited for at once.

    To wait for each by itself would take longer than most of what is measured.
    """
    wanted = [tensors[name].view(-1) for name in names]
    found = torch.empty(len(wanted), 2, dtype=wanted[0].dtype, pin_memory=True)
    ends = (flat[at] for flat in wanted for at in (0, -1))
    for place, end in zip(found.view(-1).unbind(), ends, strict=True):
        place.copy_(end, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return dict(zip(names, found, strict=True))


def read_all(tensors: Mapping[str, Tensor]) -> None:
    """Read every byte."""
    for tensor in tensors.values():
        flat = tensor.detach().view(-1).view(torch.uint8).numpy()
        whole = len(flat) // 8 * 8
        np.bitwise_xor.reduce(flat[:whole].view(np.int64))
        np.bitwise_xor.reduce(flat[whole:])
