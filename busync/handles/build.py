"""From a manifest and mapped memory to tensors.

Each alias group gets a storage of its own over the mapping, so that ``torch.save`` or ``share_memory_()`` of one
tensor does not take the whole segment along. The storage is made from a memoryview of exactly the group's bytes, which
torch keeps alive as long as the storage lives, and which keeps the mapping alive. A weak reference to that memoryview
therefore tells whether any tensor of the group is left.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from busync.errors import ClosedError, HandleError, UsageError
from busync.handles.tensors import TORCH_DTYPES
from busync.manifest import Manifest, TensorSpec

#: By alias group: a weak reference to what lives as long as the group's storage.
Memory = dict[int, weakref.ref[memoryview]]


class TensorBuilder:
    """Builds the tensors of one version over ``buffer``, the bytes of its segment, or a copy of them.

    The manifest has passed check_part and fits the buffer, which may be empty if the manifest has no bytes. The
    builder keeps the buffer alive until drop(). ``copy``: each alias group is copied when one of its tensors is first
    asked for, and its tensors are over that copy.
    """

    def __init__(self, buffer: memoryview | mmap.mmap | bytearray, manifest: Manifest, *, copy: bool = False) -> None:
        self.manifest = manifest
        self._copy = copy
        self._buffer: memoryview | None = memoryview(buffer)
        assert len(self._buffer) >= manifest.nbytes
        self._shares = manifest.shares
        self._slices: dict[int, memoryview] = {}  # of each group that was asked for
        self._flat: dict[int, torch.Tensor] = {}  # the same, one-dimensional, if groups are shared
        #: by group: lives as long as the storage of the group's tensors, and does not keep it alive
        self.memory: Memory = {}

    def build(self, spec: TensorSpec) -> torch.Tensor:
        """The tensor of ``spec``, one of the manifest's: plain, without gradient. Takes a few microseconds.

        Tensors of one alias group share a storage. Those without an element have memory of their own.

        Raises:
            HandleError: this torch does not know the dtype.
            ClosedError: drop() was called.
        """
        if torch.is_inference_mode_enabled():  # an inference tensor could never be trained, here or by another thread
            with torch.inference_mode(False):
                return self._build(spec)
        return self._build(spec)

    def _build(self, spec: TensorSpec) -> torch.Tensor:
        dtype = TORCH_DTYPES.get(spec.dtype)
        if dtype is None:
            raise HandleError(f"{spec.name!r} is {spec.dtype}, which torch {torch.__version__} does not know")
        if self._buffer is None:
            raise ClosedError("tensor builder")
        if 0 in spec.size:
            # Not empty_strided(): torch warns when it allocates complex32.
            return torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype).as_strided(spec.size, spec.stride)
        flat = self._flat.get(spec.group) if self._shares else None
        if flat is None:
            flat = torch.frombuffer(self._group_bytes(self._buffer, spec.group), dtype=dtype)
            if self._shares:
                flat = self._flat.setdefault(spec.group, flat)  # perhaps that of another thread
        if flat.dtype is not dtype:
            flat = flat.view(dtype)
        return flat.as_strided(spec.size, spec.stride, spec.offset)

    def _group_bytes(self, buffer: memoryview, number: int) -> memoryview:
        """The bytes of a group: one object for all who ask, on whatever thread."""
        memory = self._slices.get(number)
        if memory is None:
            group = self.manifest.groups[number]
            made = buffer[group.offset_bytes : group.offset_bytes + group.nbytes]
            if self._copy:
                made = memoryview(bytearray(made))
            memory = self._slices.setdefault(number, made)
            if memory is made:
                self.memory[number] = weakref.ref(memory)
        return memory

    def address(self) -> int:
        """Where the buffer is, for copies that need no tensors; good until drop(). The buffer is not empty.

        Raises:
            ClosedError: drop() was called.
        """
        if self._buffer is None:
            raise ClosedError("tensor builder")
        return torch.frombuffer(self._buffer, dtype=torch.uint8, count=1).data_ptr()

    def drop(self) -> None:
        """Drop the builder's own references to the memory. Nothing can be built afterwards."""
        self._buffer = None
        self._flat.clear()
        self._slices.clear()

    def live_names(self) -> list[str]:
        """After drop(): the names of all tensors whose memory something outside still refers to."""
        return live_names(self.manifest, self.memory)


class MixedBuilder(TensorBuilder):
    """Builds the tensors of a version whose segment has memory in several places: a builder for each, by number."""

    def __init__(self, parts: Sequence[TensorBuilder]) -> None:
        self.manifest = parts[0].manifest
        self.memory = parts[0].memory
        for part in parts:
            part.memory = self.memory
        self._parts = parts

    def _build(self, spec: TensorSpec) -> torch.Tensor:
        return self._parts[self.manifest.groups[spec.group].memory]._build(spec)

    def address(self) -> int:
        """Where the host's memory is; see ``TensorBuilder.address``."""
        return self._parts[0].address()

    def drop(self) -> None:
        """Drop the builders' own references to the memory. Nothing can be built afterwards."""
        for part in self._parts:
            part.drop()


def live_names(manifest: Manifest, memory: Memory) -> list[str]:
    """The names of all tensors of a manifest whose memory is still referred to."""
    live = {group for group, reference in memory.items() if reference() is not None}
    return [spec.name for spec in manifest.tensors if spec.group in live]


class Tensors(Mapping[str, torch.Tensor]):
    """The tensors of one version by name, each made when it is first asked for.

    Plain tensors without gradient that keep their strides; tied names share one storage. ``keep`` lives as long as this
    mapping does.
    """

    def __init__(self, builder: TensorBuilder, keep: object = None) -> None:
        self._builder = builder
        self._keep = keep
        self._specs = builder.manifest.by_name
        self._built: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._built.get(name)
        if tensor is None:
            tensor = self._built[name] = self._builder.build(self._specs[name])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __reduce__(self) -> Any:
        raise UsageError(
            "the tensors of a snapshot or loan cannot be pickled or copied together",
            "open a subscriber there, or pass a dict() of them, which copies them",
        )

    def __repr__(self) -> str:
        return f"<{len(self._specs)} tensors, {self._builder.manifest.nbytes} bytes>"

    def drop(self) -> None:
        """Drop every reference to the memory: the mapping is empty afterwards."""
        self._built.clear()
        self._specs = {}
        self._builder.drop()


class LoanBuffer:
    """The tensors of a loan, over the publisher's own writable memory of a segment. Their content is undefined."""

    def __init__(self, builder: TensorBuilder) -> None:
        self._builder = builder
        self.tensors = Tensors(self._builder)

    def drop(self) -> None:
        """Drop the loan's own references; ``tensors`` is empty afterwards."""
        self.tensors.drop()

    def in_use(self) -> list[str]:
        """After drop(): the names of tensors that the caller still refers to, by views and storages as well."""
        return self._builder.live_names()
