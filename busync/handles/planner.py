"""Planning one source after another: a layout that stays the same is planned once."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter, call, is_

import torch

from busync.handles import gpus
from busync.handles.copying import ONE_THREAD_ELEMENTS, Move
from busync.handles.cuda_layout import CudaPlan
from busync.handles.cuda_memory import CudaExporter
from busync.handles.layout import Batched, Plan
from busync.handles.mixed import plan_mixed
from busync.handles.source import Flat, Source, flatten
from busync.manifest import Manifest
from busync.wire import Value

#: Weak references are seen by the garbage collector: very many new ones set off a full collection.
MOST_REMEMBERED = 16_384
MANY_MOVES = 512  #: from which on small ones are copied in batches

# The same object may be another tensor by now: to assign to its ``data`` changes everything but its class. These are
# looked up by loops in C, which take half as long as one in Python.
_facts = attrgetter("shape", "dtype", "device", "requires_grad")
_stride, _address = torch.Tensor.stride, torch.Tensor.data_ptr
_is_conj, _is_neg = torch.Tensor.is_conj, torch.Tensor.is_neg
_storage, _storage_nbytes = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes
_offset, _is_zero = torch.Tensor.storage_offset, torch.Tensor._is_zerotensor


@dataclass(slots=True, eq=False)
class _Last:
    """The last source, without a reference to it that would keep it. Its tensors were all copied as they lie."""

    names: list[str]
    parameters: set[str]
    tensors: list[weakref.ref[torch.Tensor]]
    facts: list[object]
    strides: list[object]
    spans: list[int]  #: bytes of each tensor
    itemsizes: list[int]
    moves_of: list[int]  #: the number of the move that copies it; tied tensors have one together. -1: no element
    batched: Batched | None
    addresses: list[int]
    manifest: Manifest
    moves: list[Move]
    devices: dict[str, _OnDevice]

    def plan(self, tensors: list[torch.Tensor]) -> Plan:
        """The plan for tensors that are where they were."""
        devices = {device: part.plan(tensors) for device, part in self.devices.items()}
        return Plan(self.manifest, self.moves, [], tensors, self.batched, devices)


@dataclass(slots=True, eq=False)
class _OnDevice:
    """The part of the last source that was on one GPU."""

    manifest: Manifest
    places: list[tuple[int, int]]
    numbers: list[int]  #: of its tensors, in the source

    def plan(self, tensors: list[torch.Tensor]) -> CudaPlan:
        return CudaPlan(self.manifest, self.places, [], [tensors[number] for number in self.numbers])


class Planner:
    """Plans the sources of one topic. When the tensors are those of the last source, only their addresses are read.

    A trainer changes its weights in place, and publishes the same tensors again and again. Belongs to one thread at a
    time.
    """

    def __init__(self, cuda: CudaExporter | None = None) -> None:
        self._last: _Last | None = None
        self._cuda = cuda if cuda is not None else gpus.exporter()

    def plan(self, source: Source, values: Mapping[str, Value]) -> tuple[Flat, Plan]:
        """As ``flatten`` and ``layout.plan``, which it equals in every respect."""
        last, self._last = self._last, None
        flat = _same(last, source, values) if last is not None else None
        if flat is None:
            flat = flatten(source, values)
            if last is not None and not (flat.parameters == last.parameters and _are(last, flat.tensors)):
                last = None
        planned = _again(last, flat) if last is not None else None
        if planned is None:
            planned = plan_mixed(flat, self._cuda)
            last = _remember(flat, planned)
        self._last = last
        return flat, planned


def _same(last: _Last, source: Source, values: Mapping[str, Value]) -> Flat | None:
    """A source that is a plain mapping of the last tensors, flattened; None if it is anything else."""
    if not isinstance(source, dict) or type(source) not in (dict, OrderedDict) or list(source) != last.names:
        return None
    tensors = dict(source)  # another thread may change the source
    if not _are(last, tensors):
        return None
    flat = Flat(tensors, last.parameters)
    if values:
        flat.values = flatten({}, values).values
    return flat if flat.values.keys().isdisjoint(tensors) else None


def _are(last: _Last, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether these are the last tensors, and named as those."""
    return list(tensors) == last.names and all(map(is_, tensors.values(), map(call, last.tensors)))


def _again(last: _Last, flat: Flat) -> Plan | None:
    """The last plan for the last tensors, wherever their bytes are now; None if anything else has changed."""
    tensors = list(flat.tensors.values())
    if list(map(_facts, tensors)) != last.facts or list(map(_stride, tensors)) != last.strides:
        return None
    if any(map(_is_conj, tensors)) or any(map(_is_neg, tensors)):
        return None
    if any(map(_is_zero, tensors)):
        return None
    addresses = list(map(_address, tensors))
    rooms = map(_storage_nbytes, map(_storage, tensors))
    for room, offset, itemsize, span in zip(rooms, map(_offset, tensors), last.itemsizes, last.spans, strict=True):
        if offset * itemsize + span > room and span:
            return None
    if addresses == last.addresses:
        return last.plan(tensors)
    if last.devices:
        return None
    moves = _moved(last, addresses)
    if moves is None or _overlap(moves):
        return None
    last.moves, last.addresses = moves, addresses
    return Plan(last.manifest, moves, [], tensors, last.batched)


def _moved(last: _Last, addresses: list[int]) -> list[Move] | None:
    """The moves from other addresses; None if tensors that were tied are not any more."""
    sources = [0] * len(last.moves)
    for move, address in zip(last.moves_of, addresses, strict=True):
        if move >= 0:
            if sources[move] not in (0, address):
                return None
            sources[move] = address
    return [(at, address, nbytes) for (at, _, nbytes), address in zip(last.moves, sources, strict=True)]


def _remember(flat: Flat, planned: Plan) -> _Last | None:
    """What ``_again`` needs; None if some tensors overlap, or are not copied as they lie."""
    manifest, moves = planned.manifest, planned.moves
    if planned.devices:
        return _remember_mixed(flat, planned)
    if planned.copies or _overlap(moves) or len(flat.tensors) > MOST_REMEMBERED:
        return None
    stored = [index for index, group in enumerate(manifest.groups) if group.nbytes]
    places = [(manifest.groups[index].offset_bytes, manifest.groups[index].nbytes) for index in stored]
    if places != [(at, nbytes) for at, _, nbytes in moves]:
        return None
    number = {group: move for move, group in enumerate(stored)}
    moves_of = [number.get(spec.group, -1) for spec in manifest.tensors]
    tensors = list(flat.tensors.values())
    spans = [tensor.numel() * tensor.itemsize for tensor in tensors]
    for spec, move, span in zip(manifest.tensors, moves_of, spans, strict=True):
        if move >= 0 and (spec.offset or span != moves[move][2]):
            return None
    return _last(flat, planned, spans, moves_of, _batched(moves, moves_of, tensors))


def _remember_mixed(flat: Flat, planned: Plan) -> _Last | None:
    """As ``_remember``, for a source with tensors on GPUs: good only as long as every tensor stays where it is."""
    parts = planned.devices
    if planned.copies or any(part.copies for part in parts.values()) or len(flat.tensors) > MOST_REMEMBERED:
        return None
    number = {id(tensor): at for at, tensor in enumerate(flat.tensors.values())}
    spans = [_span(tensor) for tensor in flat.tensors.values()]
    last = _last(flat, planned, spans, [], None)
    for device, part in parts.items():
        numbers = [number[id(tensor)] for tensor in part.sources]
        last.devices[device] = _OnDevice(part.manifest, part.places, numbers)
    return last


def _span(tensor: torch.Tensor) -> int:
    """Bytes over which a tensor with elements reaches."""
    if not tensor.numel():
        return 0
    reach = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.itemsize


def _last(flat: Flat, planned: Plan, spans: list[int], moves_of: list[int], batched: Batched | None) -> _Last:
    tensors = list(flat.tensors.values())
    return _Last(
        list(flat.tensors), flat.parameters, [weakref.ref(tensor) for tensor in tensors],
        list(map(_facts, tensors)), list(map(_stride, tensors)), spans, [tensor.itemsize for tensor in tensors],
        moves_of, batched, list(map(_address, tensors)), planned.manifest, planned.moves, {},
    )  # fmt: skip


def _batched(moves: list[Move], moves_of: list[int], tensors: list[torch.Tensor]) -> Batched | None:
    """The moves that torch copies on the calling thread, if they are many."""
    first = {move: index for index, move in reversed(list(enumerate(moves_of)))}
    small = [move for move in range(len(moves)) if tensors[first[move]].numel() <= ONE_THREAD_ELEMENTS]
    if len(small) < MANY_MOVES:
        return None
    alone = sorted(set(range(len(moves))).difference(small))
    return Batched(small, [first[move] for move in small], alone, sum(moves[move][2] for move in small))


def _overlap(moves: list[Move]) -> bool:
    end = 0
    for address, nbytes in sorted((address, nbytes) for _, address, nbytes in moves):
        if address < end:
            return True
        end = address + nbytes
    return False
