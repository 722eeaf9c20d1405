"""Planning: where each tensor of a source lies in a segment, and the copies that bring it there.

Tensors are put into *alias groups* by the addresses of their bytes. Those that overlap come back overlapping; tied
tensors (the same view under several names) are the usual case. What is stored of a tensor:

    dense (any order of dimensions)      its bytes; strides are kept
    with gaps (a slice)                  what shows; packed, the dimensions keep their order in memory
    expanded (stride 0)                  its base; stride 0 is kept
    several different overlapping views  their common extent, strides kept; only covered elements are written
    conj or neg bit; self-overlapping    the resolved values, packed, a group of its own
    no element                           shape, stride and dtype

So two interleaved slices cost the extent that they span, and no byte is ever copied that no tensor shows.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, TypeGuard

import torch
from msgspec import Struct

from busync.errors import ExportError, OptionError
from busync.handles.copying import Batch, Copy, Job, Move, make_jobs
from busync.handles.source import Flat, Source, flatten
from busync.handles.tensors import (
    DTYPE_NAMES,
    MANY_TENSORS,
    TORCH_DTYPES,
    check_kind,
    check_tensor,
    fits_storage,
)
from busync.manifest import (
    ALIGNMENT,
    DTYPES,
    MAX_SEGMENT_BYTES,
    GroupSpec,
    Manifest,
    TensorSpec,
    extent,
    make_manifest,
)

if TYPE_CHECKING:
    from busync.handles.cuda_layout import CudaPlan

Dims = tuple[int, ...]
Shapes = Mapping[str, tuple[str | torch.dtype, Dims]]  #: name -> (dtype or its name, size)


# Views and groups are in no cycle. Kept from the garbage collector (gc=False), they are freed as they are dropped, and
# 70,000 of them do not set off a full collection: see the specs in ``manifest``.


class _View(Struct, eq=False, gc=False):
    """A tensor on its way into the plan."""

    name: str
    tensor: torch.Tensor
    dtype: str
    itemsize: int
    size: Dims
    stride: Dims
    start: int  #: address of the first byte
    end: int  #: address after the last byte; equal to start when the tensor has no element
    stored: int  #: elements, without those that a stride of 0 repeats
    dense: bool  #: its bytes can be copied as they lie
    shares: bool  #: it may overlap other tensors
    group: int = -1  #: which of the groups that _find_groups returns

    @property
    def shown(self) -> tuple[int, str, Dims, Dims]:
        """What tied tensors have in common."""
        return self.start, self.dtype, self.size, self.stride


class _Group(Struct, eq=False, gc=False):
    """Views that share memory; usually there is one. They do not refer back."""

    first: _View
    others: list[_View] | None = None
    index: int = -1  #: in the manifest, once placed
    start: int = 0  #: address that stands for the group's first byte

    @property
    def views(self) -> list[_View]:
        return [self.first, *(self.others or ())]

    def add(self, view: _View) -> None:
        if self.others is None:
            self.others = []
        self.others.append(view)


@dataclass(slots=True, eq=False)
class Plan:
    """A layout, and how to fill a segment with it. Keeps the source's tensors alive until it is dropped."""

    manifest: Manifest
    moves: list[Move]
    copies: list[Copy]
    sources: list[torch.Tensor]
    batched: Batched | None = None
    devices: dict[str, CudaPlan] = field(default_factory=dict)  #: by UUID; the rest is the host's

    def jobs(self, buffer: memoryview | mmap.mmap, workers: int, views: Views | None = None) -> list[Job]:
        """Work that fills ``buffer``, the writable bytes of a segment of at least ``manifest.nbytes`` bytes.

        At most ``workers`` jobs, to be run in any order on any threads; together they copy everything once all of
        them have returned. They share the pieces among each other as they go, so that one that is held up does not
        hold up the rest. A small plan gives one job; one without bytes gives none. Each runs on one core and gives
        up the GIL while it copies. ``views`` belong to the buffer; with them, many small tensors are copied faster.
        """
        assert len(buffer) >= self.manifest.nbytes
        if not self.moves and not self.copies:
            return []
        if views is None or self.batched is None:
            return make_jobs(buffer, self.moves, self.copies, workers, keep=self)
        batch = Batch(
            views.of(self, self.batched, buffer), [self.sources[tensor] for tensor in self.batched.tensors],
            self.batched.nbytes,
        )  # fmt: skip
        alone = [self.moves[move] for move in self.batched.alone]
        return make_jobs(buffer, alone, self.copies, workers, keep=self, batch=batch)


@dataclass(frozen=True, slots=True, eq=False)
class Batched:
    """Which moves are copied in batches, by torch."""

    moves: list[int]
    tensors: list[int]  #: of each of them, the number of a tensor that lies there
    alone: list[int]  #: the other moves
    nbytes: int  #: of those in batches


class Views:
    """Tensors over a segment into which the small tensors of one layout are copied. Made once, and kept with it."""

    def __init__(self) -> None:
        self._layout = b""
        self._tensors: list[torch.Tensor] = []

    def of(self, plan: Plan, batched: Batched, buffer: memoryview | mmap.mmap) -> list[torch.Tensor]:
        """Those for the batched moves of a plan; equal layouts have the same."""
        if self._layout != plan.manifest.digest:
            self._tensors = []
            for move, tensor in zip(batched.moves, batched.tensors, strict=True):
                source = plan.sources[tensor]
                flat = torch.frombuffer(
                    buffer, dtype=source.dtype, offset=plan.moves[move][0], count=source.numel()
                )  # fmt: skip
                self._tensors.append(flat.as_strided(source.shape, source.stride()))
            self._layout = plan.manifest.digest
        return self._tensors


def plan(flat: Flat) -> Plan:
    """Plan how to publish ``flat``. Reads no element. Equal layouts give equal digests.

    Raises:
        ExportError: a tensor cannot be published, or all together exceed the largest segment.
    """
    many = len(flat.tensors) > MANY_TENSORS
    with torch.no_grad():
        views = [_measure(name, tensor, check_tensor(name, tensor), many=many) for name, tensor in flat.tensors.items()]
    return _place(views, _find_groups(views), flat.parameters)


def like_plan(like: Source | Shapes) -> Manifest:
    """The layout for a loan: tensors as in ``like``, whose values are ignored.

    ``like`` is a source as for a publish, whose tensors may also be on other devices or on "meta"; in a mapping,
    (dtype or its name, size) may stand for a tensor. Dense tensors keep their strides, and those that overlap in memory
    still do; others become contiguous: every tensor can be written to. Plain values are left out.

    Raises:
        ExportError: a name or tensor cannot be published.
        OptionError: a dtype or size is not allowed.
    """
    return place_like(flatten_like(like))


def flatten_like(like: Source | Shapes) -> Flat:
    """The tensors of ``like`` by name; see ``like_plan``."""
    if isinstance(like, Mapping):
        like = {name: _shaped(*value) if _is_shape(value) else value for name, value in like.items()}
    return flatten(like)


def place_like(flat: Flat) -> Manifest:
    """The layout for tensors that will be written to; see ``like_plan``."""
    views = [_measure_like(name, tensor, check_kind(name, tensor)) for name, tensor in flat.tensors.items()]
    return _place(views, _find_groups(views), flat.parameters).manifest


def _is_shape(value: object) -> TypeGuard[tuple[str | torch.dtype, Dims]]:
    return (
        isinstance(value, tuple) and len(value) == 2
        and isinstance(value[0], (str, torch.dtype)) and isinstance(value[1], (tuple, list))
        and not any(isinstance(length, torch.Tensor) for length in value[1])
    )  # fmt: skip


def _shaped(dtype: str | torch.dtype, size: Dims) -> torch.Tensor:
    known = TORCH_DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if known not in DTYPE_NAMES:
        raise OptionError("like", dtype, f"one of the dtypes {', '.join(TORCH_DTYPES)}")
    if not all(type(length) is int and length >= 0 for length in size) or prod(size) > MAX_SEGMENT_BYTES:
        raise OptionError("like", size, "sizes of whole numbers, 0 or more")
    return torch.empty(size, dtype=known, device="meta")


def _measure(name: str, tensor: torch.Tensor, dtype: str, *, many: bool = False) -> _View:
    """Find out where the bytes of a tensor are."""
    size, stride, itemsize = tuple(tensor.shape), tensor.stride(), DTYPES[dtype]
    stored = span = tensor.numel()
    if not stored:
        return _View(name, tensor, dtype, itemsize, size, stride, 0, 0, 0, True, False)
    shares = True
    if not tensor.is_contiguous():
        stored, span, shares = extent(size, stride)
    if not fits_storage(tensor, span, many=many):
        reason = f"its storage has only {tensor.untyped_storage().nbytes()} bytes"
        raise ExportError(name, reason, "gather the parameters first if they are sharded (FSDP)")
    dense = shares and stored == span
    if tensor.is_conj() or tensor.is_neg():
        dense = shares = False
    start = tensor.data_ptr()
    return _View(name, tensor, dtype, itemsize, size, stride, start, start + span * itemsize, stored, dense, shares)


def _measure_like(name: str, tensor: torch.Tensor, dtype: str) -> _View:
    """As _measure, for memory that will be written to and needs no source."""
    size, stride, numel = tuple(tensor.shape), tensor.stride(), tensor.numel()
    stored, span, injective = extent(size, stride)
    dense = injective and stored == span == numel
    if (
        (tensor.is_cpu or tensor.is_cuda)
        and injective
        and stored == numel
        and not (tensor.is_conj() or tensor.is_neg())
    ):
        return _measure(name, tensor, dtype)
    if not dense:
        stride = _packed(size, range(len(size), 0, -1))
    return _View(name, tensor, dtype, DTYPES[dtype], size, stride, 0, numel * DTYPES[dtype], numel, True, False)


def _packed(size: Dims, stride: Sequence[int]) -> Dims:
    """Strides without gaps that keep the order of the dimensions in memory, and strides of 0."""
    packed = [0] * len(size)
    step = 1
    for dim in sorted(range(len(size)), key=lambda dim: (stride[dim], -dim)):
        if stride[dim] or size[dim] == 1:
            packed[dim] = step
            step *= size[dim]
    return tuple(packed)


def _find_groups(views: list[_View]) -> list[_Group]:
    """The alias groups, of which every view gets its number. Those without an element have one together."""
    groups: list[_Group] = []
    end = 0
    for view in sorted((view for view in views if view.shares), key=attrgetter("start")):
        if view.start < end:
            groups[-1].add(view)
        else:
            groups.append(_Group(view))
        view.group = len(groups) - 1
        end = max(end, view.end)
    empty = -1
    for view in views:
        if view.stored and not view.shares:
            view.group = len(groups)
            groups.append(_Group(view))
        elif not view.stored:
            if empty < 0:
                empty = len(groups)
                groups.append(_Group(view))
            view.group = empty
    return groups


def _place(views: list[_View], groups: list[_Group], parameters: set[str]) -> Plan:
    """Put the groups into a segment in the order of their first use."""
    moves: list[Move] = []
    copies: list[Copy] = []
    placed: list[GroupSpec] = []
    tensors: list[TensorSpec] = []
    end = 0
    for view in views:
        group = groups[view.group]
        if group.index < 0:
            group.index = len(placed)
            if view.stored:
                start = -(-end // ALIGNMENT) * ALIGNMENT
                nbytes = _fill(moves, copies, group, start)
                end = start + nbytes
                placed.append(GroupSpec(start, nbytes))
            else:
                placed.append(GroupSpec(0, 0))
        offset = (view.start - group.start) // view.itemsize if view.stored else 0
        tensors.append(
            TensorSpec(
                view.name, view.dtype, view.size, view.stride, group.index, offset,
                view.tensor.requires_grad, view.name in parameters,
            )
        )  # fmt: skip
    if end > MAX_SEGMENT_BYTES:
        raise ExportError("source", f"{end} bytes exceed the largest segment of {MAX_SEGMENT_BYTES} bytes")
    manifest = make_manifest(end, tuple(placed), tuple(tensors))
    return Plan(manifest, moves, copies, sources=[view.tensor for view in views])


def _fill(moves: list[Move], copies: list[Copy], group: _Group, offset: int) -> int:
    """Plan the copies into a group at ``offset`` bytes, settle its views' strides, and return its bytes."""
    first = group.first
    if group.others and any(view.shown != first.shown for view in group.others):
        return _fill_overlapping(moves, copies, group, offset)
    group.start = first.start
    if first.dense:
        moves.append((offset, first.start, first.end - first.start))
        return first.end - first.start
    stride = _packed(first.size, first.stride)
    for view in group.views:
        view.stride = stride
    copies.append(_copy(first, offset))
    return first.stored * first.itemsize


def _fill_overlapping(moves: list[Move], copies: list[Copy], group: _Group, offset: int) -> int:
    views = group.views
    low = min(view.start for view in views)
    high = max(view.end for view in views)
    widest = max(views, key=attrgetter("itemsize"))
    group.start = low - (low - widest.start) % widest.itemsize  # so that every offset is whole in its dtype
    for view in views:
        if (view.start - group.start) % view.itemsize:
            raise ExportError(view.name, f"it overlaps {widest.name!r} out of step with its elements", "clone it")
    distinct = list({view.shown: view for view in views}.values())
    whole = [view for view in distinct if view.dense and view.start == low and view.end == high]
    for view in whole[:1] or distinct:
        at = offset + view.start - group.start
        if view.dense:
            moves.append((at, view.start, view.end - view.start))
        else:
            copies.append(_copy(view, at))
    nbytes = high - group.start
    return nbytes if len({view.dtype for view in distinct}) == 1 else -(-nbytes // 16) * 16


def _copy(view: _View, offset: int) -> Copy:
    source = view.tensor.detach()
    for dim, step in enumerate(view.stride):
        if step == 0 and view.size[dim] > 1:
            source = source.narrow(dim, 0, 1)  # one element of what is repeated
    return Copy(offset, source, view.stride)
