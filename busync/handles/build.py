"""From a manifest and mapped memory to tensors.

Each alias group gets a storage of its own over the mapping, so that ``torch.save`` or ``share_memory_()`` of one
tensor does not take the whole segment along. The storage is made from a memoryview of exactly the group's bytes, which
torch keeps alive as long as the storage lives, and which keeps the mapping alive. A weak reference to that memoryview
therefore tells whether any tensor of the group is left.
"""

from __future__ import annotations

import mmap
import weakref

import torch

from busync.errors import ClosedError, HandleError
from busync.handles.tensors import TORCH_DTYPES
from busync.manifest import Manifest, TensorSpec


class TensorBuilder:
    """Builds the tensors of one version over ``buffer``, the mapped bytes of its segment.

    The manifest has passed check_part and fits the buffer, which may be empty if the manifest has no bytes. The
    builder keeps the mapping alive until drop().
    """

    def __init__(self, buffer: memoryview | mmap.mmap | bytearray, manifest: Manifest) -> None:
        self.manifest = manifest
        self._buffer: memoryview | None = memoryview(buffer)
        assert len(self._buffer) >= manifest.nbytes
        self._flat: dict[int, torch.Tensor] = {}  # by group: one-dimensional, over all of its bytes
        #: by group: lives as long as the storage of the group's tensors, and does not keep it alive
        self.memory: dict[int, weakref.ref[memoryview]] = {}

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
        flat = self._flat.get(spec.group)
        if flat is None:
            group = self.manifest.groups[spec.group]
            memory = self._buffer[group.offset_bytes : group.offset_bytes + group.nbytes]
            made = torch.frombuffer(memory, dtype=dtype)
            flat = self._flat.setdefault(spec.group, made)
            if flat is made:  # and not that of another thread
                self.memory[spec.group] = weakref.ref(memory)
        if flat.dtype is not dtype:
            flat = flat.view(dtype)
        return flat.as_strided(spec.size, spec.stride, spec.offset)

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

    def live_names(self) -> list[str]:
        """After drop(): the names of all tensors whose memory something outside still refers to."""
        live = {group for group, memory in self.memory.items() if memory() is not None}
        return [spec.name for spec in self.manifest.tensors if spec.group in live]


class LoanBuffer:
    """The tensors of a loan, over the publisher's own writable mapping of a segment.

    ``tensors`` maps every name of the manifest to a plain tensor without gradient; its content is undefined.
    """

    def __init__(self, mapping: memoryview | mmap.mmap | bytearray, manifest: Manifest) -> None:
        self._builder = TensorBuilder(mapping, manifest)
        self.tensors: dict[str, torch.Tensor] = {spec.name: self._builder.build(spec) for spec in manifest.tensors}

    def drop(self) -> None:
        """Drop the loan's own references: empties ``tensors``."""
        self.tensors.clear()
        self._builder.drop()

    def in_use(self) -> list[str]:
        """After drop(): the names of tensors that the caller still refers to, by views and storages as well."""
        return self._builder.live_names()
