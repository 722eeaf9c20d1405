"""Loading a version into modules: everything is checked first, then copied."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from msgspec import Struct
from torch import nn

from busync.errors import MismatchError
from busync.handles.build import TensorBuilder
from busync.handles.copying import copy_elements
from busync.handles.tensors import MANY_TENSORS, TORCH_DTYPES, fits_storage
from busync.manifest import GroupSpec, Manifest, TensorSpec, extent

#: Published name -> name in the module, or None to leave it out.
NameMap = Mapping[str, str | None] | Callable[[str], str | None]


class _Pair(Struct, eq=False, gc=False):  # in no cycle, and often very many: see the specs in ``manifest``
    spec: TensorSpec
    target: torch.Tensor  #: an alias of the module's tensor, so that the memory stays what was checked
    offset_bytes: int  #: of the source in the host's memory, if both lie alike, without gaps, there; or else -1
    nbytes: int


@dataclass(slots=True, eq=False)
class LoadPlan:
    """Which tensor of a version goes into which tensors of the modules. Keeps those alive, not the version.

    Good for every version of the same manifest, as long as the modules keep their tensors.
    """

    pairs: list[_Pair]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is written."""
        return [pair.target for pair in self.pairs]

    def run(self, builder: TensorBuilder) -> None:
        """Copy from the version that ``builder`` has mapped. Blocks; gives up the GIL; uses one thread on the CPU.

        What a GPU has to copy may only be queued when this returns.

        The modules' tensors stay the same objects and keep requires_grad; autograd is told that they have changed.
        """
        moved = []
        start = builder.address() if builder.manifest.nbytes else 0
        with torch.inference_mode():  # the one mode in which both normal and inference tensors can be written
            for pair in self.pairs:
                target = pair.target
                if pair.offset_bytes >= 0:
                    ctypes.memmove(target.data_ptr(), start + pair.offset_bytes, pair.nbytes)
                    moved.append(target)
                else:
                    source = builder.build(pair.spec)
                    copy = copy_elements if target.is_cpu and source.is_cpu else torch.Tensor.copy_
                    copy(target, source)
        torch.autograd.graph.increment_version([target for target in moved if not target.is_inference()])


def plan_load(
    version: int, manifest: Manifest, modules: Sequence[nn.Module], strict: bool = True, map: NameMap | None = None
) -> LoadPlan:
    """Find the target of every tensor of a version in each of ``modules`` (their state dicts), and check them all.

    Every module gets the whole version. ``map`` translates published names to the modules' own (None leaves a tensor
    out; names that a mapping lacks stay as they are). Without ``strict``, what only one side has is passed over.
    Entries of a state dict that are not tensors are passed over in any case. Nothing is written.

    Raises:
        MismatchError: names, shapes or dtypes do not fit, or a target cannot be written to; lists every problem.
    """
    translate = _translator(map)
    many = len(manifest.tensors) > MANY_TENSORS
    pairs: list[_Pair] = []
    problems: list[str] = []
    for index, module in enumerate(modules):
        where = f" (module {index})" if len(modules) > 1 else ""
        targets = {
            name: tensor
            for name, tensor in module.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
        }
        live = _Live(module)
        filled: set[str] = set()
        for spec in manifest.tensors:
            name = translate(spec.name)
            if name is None:
                continue
            target = targets.get(name)
            if name in filled:
                problems.append(f"{name!r} is the target of two tensors{where}")
            elif target is None:
                if strict:
                    problems.append(f"the module has no {name!r}{where}")
            elif problem := _problem(spec, target, many=many):
                problems.append(f"{name!r} {problem}{where}")
            elif not live.has(target):
                problems.append(f"{name!r} is a copy that state_dict() made, and not what the module uses{where}")
            else:
                pairs.append(_pair(spec, target, manifest.groups[spec.group]))
            filled.add(name)
        if strict:
            problems += [f"the version has no {name!r}{where}" for name in targets if name not in filled]
    if problems:
        raise MismatchError(version, problems)
    return LoadPlan(pairs)


class _Live:
    """The memory that a module uses: what its state dict shows need not be that (a hook may have made copies)."""

    def __init__(self, module: nn.Module) -> None:
        parts = [part for m in module.modules() for part in (m._parameters, m._buffers)]
        self._tensors = [tensor for part in parts for tensor in part.values() if tensor is not None]
        self._ids = {id(tensor) for tensor in self._tensors}
        self._storages: set[int] | None = None

    def has(self, target: torch.Tensor) -> bool:
        """Whether what is written to ``target`` reaches the module."""
        if id(target) in self._ids or target.numel() == 0:
            return True
        if self._storages is None:
            self._storages = {_storage(tensor) for tensor in self._tensors} - {0}
        return _storage(target) in self._storages


def _storage(tensor: torch.Tensor) -> int:
    """Names the storage of a tensor; 0 if it has none that can be named."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse, or a wrapper
        return 0


def _translator(names: NameMap | None) -> Callable[[str], str | None]:
    if names is None:
        return lambda name: name
    if callable(names):
        return names
    return lambda name: names.get(name, name)


def _problem(spec: TensorSpec, target: torch.Tensor, *, many: bool) -> str:
    """Why the tensor cannot be loaded into ``target``; empty when it can."""
    if tuple(target.shape) != spec.size:
        return f"has the shape {list(target.shape)}, and {list(spec.size)} was published"
    if target.dtype is not TORCH_DTYPES.get(spec.dtype):
        return f"is {str(target.dtype).removeprefix('torch.')}, and {spec.dtype} was published"
    if type(target).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is a {type(target).__name__}, which has no memory of its own"
    if target.layout is not torch.strided or target.is_meta or target._is_zerotensor() or target.is_conj():
        return f"cannot be written to ({target.layout}, {target.device})"
    if 0 in spec.size:
        return ""
    stored = span = target.numel()
    injective = True
    if not target.is_contiguous():
        stored, span, injective = extent(target.shape, target.stride())
    if not injective or stored != target.numel():
        return "overlaps itself, so it cannot be written to"
    if not fits_storage(target, span, many=many):
        return "has no memory at present (is it sharded?)"
    return ""


def _pair(spec: TensorSpec, target: torch.Tensor, group: GroupSpec) -> _Pair:
    if target.is_contiguous():
        alike = _is_contiguous(spec)
    else:
        stored, span, _ = extent(spec.size, spec.stride)
        alike = stored == span and target.stride() == spec.stride
    moves = alike and target.is_cpu and not group.memory and not target.is_neg() and 0 not in spec.size
    offset_bytes = group.offset_bytes + spec.offset * target.itemsize if moves else -1
    plain = target if type(target) is torch.Tensor else target.as_subclass(torch.Tensor)
    return _Pair(spec, plain.detach(), offset_bytes, target.numel() * target.itemsize)


def _is_contiguous(spec: TensorSpec) -> bool:
    step = 1
    for length, stride in zip(reversed(spec.size), reversed(spec.stride), strict=True):
        if length != 1 and stride != step:
            return False
        step *= length
    return True
