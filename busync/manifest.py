"""What a version looks like: its tensors, and where they lie in its segment.

A segment has memory on the host, on one or several GPUs, or both. Memory 0 is the host's, memory 1 the first of the
manifest's devices, and so on.

A manifest describes a layout, not values: two versions of one model have the same manifest and the same digest.
Pure: the names of dtypes are strings here, and the torch side of them is in ``handles``.

The canonical form, which check_part insists on: the groups of each memory lie there in order, each at a multiple of
ALIGNMENT, without overlapping; they are numbered by their first use, so that a slice of the tensors needs no group that
comes after it; a group without bytes, which only tensors without elements use, has offset 0; devices have bytes, and
are named once each.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from math import prod
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

#: dtype name -> bytes per element. What is not here cannot be published.
DTYPES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip

ALIGNMENT = 64  #: bytes; every alias group starts at a multiple of it
MAX_NDIM = 32
MAX_TENSORS = 1 << 20
MAX_NAME_BYTES = 1024
MAX_SEGMENT_BYTES = 1 << 46
MAX_DEVICES = 64
DEVICE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  #: the UUID of a GPU, by which processes name it
_LIMIT = 1 << 63  # torch counts in signed 64-bit integers

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_BYTES)]
Dims = Annotated[tuple[Count, ...], Meta(max_length=MAX_NDIM)]
DeviceName = Annotated[str, Meta(pattern=f"^{DEVICE.pattern}$")]


# Specs are in no cycle. Kept from the garbage collector (gc=False), 70,000 of them do not set
# off a full collection, which would hold every thread for as long as it takes to walk all objects of torch.


class GroupSpec(Struct, frozen=True, array_like=True, gc=False):
    """One alias group: tensors that share memory. It becomes one storage on the other side."""

    offset_bytes: Count  #: from the start of its memory, a multiple of ALIGNMENT
    nbytes: Count  #: every tensor of the group lies within them
    memory: Count = 0  #: 0: the host's; or else the number of a device of the manifest, from 1


class DeviceSpec(Struct, frozen=True, array_like=True, gc=False):
    """The part of a segment that is on one GPU."""

    device: DeviceName
    nbytes: Annotated[int, Meta(ge=1, le=MAX_SEGMENT_BYTES)]  #: in use


class TensorSpec(Struct, frozen=True, array_like=True, gc=False):
    """One tensor by its flat dotted name."""

    name: Name  #: no other tensor of the manifest has it
    dtype: str  #: a key of DTYPES
    size: Dims  #: in elements
    stride: Dims  #: in elements
    group: Count  #: index into the manifest's groups
    offset: Count  #: in elements of the own dtype, from the start of the group; 0 when there is no element
    requires_grad: bool  #: as the source had it
    parameter: bool  #: a parameter, or else a buffer or plain tensor


class Manifest(Struct, frozen=True, dict=True):
    """A complete layout. ``digest`` names it; equal layouts have equal digests."""

    digest: bytes
    nbytes: int  #: bytes of the host's memory in use, 0 when no tensor there has an element
    groups: tuple[GroupSpec, ...]
    tensors: tuple[TensorSpec, ...]
    devices: tuple[DeviceSpec, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        """The tensors by name, which every version of a session asks for. Not to be changed."""
        return {spec.name: spec for spec in self.tensors}

    @cached_property
    def total_bytes(self) -> int:
        """Bytes in use, on the host and on all devices."""
        return self.nbytes + sum(spec.nbytes for spec in self.devices)

    @cached_property
    def shares(self) -> bool:
        """Whether some group has several tensors."""
        return len(self.groups) < len(self.tensors)


def extent(size: Sequence[int], stride: Sequence[int]) -> tuple[int, int, bool]:
    """How a tensor with at least one element lies in memory.

    Returns:
        Elements, not counting those that a stride of 0 repeats; elements from the first to the last, gaps included;
        whether the former all have places of their own (False may also mean that this is hard to tell).
    """
    stored = span = 1
    injective = True
    for step, length in sorted(zip(stride, size, strict=True)):
        if step and length != 1:
            injective = injective and step >= span
            stored *= length
            span += (length - 1) * step
    return stored, span, injective


def make_manifest(
    nbytes: int, groups: tuple[GroupSpec, ...], tensors: tuple[TensorSpec, ...], devices: tuple[DeviceSpec, ...] = ()
) -> Manifest:
    """The manifest of a layout. Its digest is the 16-byte blake2b over the msgpack bytes of the four arguments."""
    layout = msgspec.msgpack.encode((nbytes, groups, tensors, devices))
    return Manifest(hashlib.blake2b(layout, digest_size=16).digest(), nbytes, groups, tensors, devices)


def check_part(
    nbytes: int,
    groups: Sequence[GroupSpec],
    tensors: Sequence[TensorSpec],
    *,
    devices: Sequence[DeviceSpec] = (),
    groups_before: Sequence[GroupSpec] = (),
    names_before: AbstractSet[str] = frozenset(),
    ends: dict[int, int] | None = None,
) -> None:
    """Check one slice of a manifest from a peer: what passes can be built without reading outside the segment.

    ``groups`` and ``tensors`` are the slice's own and come from wire.decode, which has checked their types;
    ``groups_before`` and ``names_before`` are those of the slices before it, ``ends`` the ends of their groups in each
    memory, which is brought up to date (and found out unless it is given). All arithmetic is in Python integers,
    before torch sees a number. Takes less than 3 ms for 512 tensors.

    Raises:
        ValueError: the reason why the slice is not a valid layout.
    """
    if ends is None:
        ends = {group.memory: group.offset_bytes + group.nbytes for group in groups_before if group.nbytes}
    _check_groups((nbytes, *(spec.nbytes for spec in devices)), groups, ends)
    if len({spec.device for spec in devices}) != len(devices):
        raise ValueError("a device is named twice")
    if len(names_before) + len(tensors) > MAX_TENSORS:
        raise ValueError(f"more than {MAX_TENSORS} tensors")
    names = {spec.name for spec in tensors}
    if len(names) != len(tensors) or not names.isdisjoint(names_before):
        raise ValueError("two tensors have one name")
    used = before = len(groups_before)
    known = before + len(groups)
    for spec in tensors:
        if spec.group >= used:  # the next unused group, or a gap
            if spec.group > used or used == known:
                raise ValueError(f"{spec.name!r} is in group {spec.group}, which is not the next of {known}")
            used += 1
        group = groups[spec.group - before] if spec.group >= before else groups_before[spec.group]
        reason = _misfit(spec, group.nbytes)
        if reason:
            raise ValueError(f"{spec.name!r} {reason}")
    if used != known:
        raise ValueError("a group has no tensor")


def _check_groups(sizes: Sequence[int], groups: Sequence[GroupSpec], ends: dict[int, int]) -> None:
    if not 0 <= sizes[0] <= MAX_SEGMENT_BYTES:
        raise ValueError(f"{sizes[0]} bytes are not a segment")
    for group in groups:
        if group.memory >= len(sizes):
            raise ValueError(f"a group is in memory {group.memory} of {len(sizes)}")
        if group.nbytes == 0 and group.offset_bytes == 0:
            continue
        if group.nbytes <= 0 or group.offset_bytes % ALIGNMENT:
            raise ValueError("a group is empty or misaligned")
        if group.offset_bytes < ends.get(group.memory, 0):
            raise ValueError("two groups overlap or are out of order")
        end = ends[group.memory] = group.offset_bytes + group.nbytes
        if end > sizes[group.memory]:
            raise ValueError("a group reaches beyond the segment")


def _misfit(spec: TensorSpec, group_nbytes: int) -> str:
    """Why the tensor does not lie within its group of ``group_nbytes`` bytes; empty when it does."""
    if not spec.name.isprintable():
        return "is not a printable name"
    itemsize = DTYPES.get(spec.dtype)
    if itemsize is None:
        return f"has the unknown dtype {spec.dtype[:40]!r}"
    size, stride = spec.size, spec.stride
    if len(size) != len(stride) or len(size) > MAX_NDIM:
        return "has a size and stride that do not go together"
    numel = stored = 1  # elements that show, and those of them that are not repeated by a stride of 0
    last = spec.offset
    if last < 0:
        return "has a negative offset"
    for length, step in zip(size, stride, strict=True):
        if length < 0 or not 0 <= step < _LIMIT:
            return "has a negative or far too large number"
        numel *= length
        last += (length - 1) * step
        if step:
            stored *= length
    if numel == 0:
        if spec.offset or group_nbytes or prod(filter(None, size)) >= _LIMIT:
            return "has no element, but a place or an impossible size"
        return ""
    if group_nbytes % itemsize or (last + 1) * itemsize > group_nbytes:
        return "reaches beyond its group"
    if stored * itemsize > group_nbytes or numel * itemsize >= _LIMIT:
        return "has more elements than its group"
    return ""
