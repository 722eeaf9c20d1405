"""From a manifest and memory on a GPU to tensors; see ``build`` for what this has in common with the CPU."""

from __future__ import annotations

import weakref
from typing import Any, Self, cast

import torch

from busync.errors import ClosedError, HandleError
from busync.handles.build import TensorBuilder
from busync.handles.cuda import device_errors
from busync.handles.cuda_backend import CudaBackend
from busync.handles.tensors import TORCH_DTYPES
from busync.manifest import Manifest, TensorSpec


class _Span:
    """Bytes of one alias group, for torch to make tensors of. Lives as long as their storage."""

    __slots__ = ("__weakref__", "address", "keep", "nbytes")

    def __init__(self, address: int, nbytes: int, keep: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self.keep = keep

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3,
        }  # fmt: skip


class _OnDevice(TensorBuilder):
    """What builders over memory of a GPU have in common: there is no buffer of bytes."""

    def __init__(self, backend: CudaBackend, index: int, manifest: Manifest) -> None:
        self.manifest = manifest
        self.memory = {}
        self._buffer = None
        self._flat = {}
        self._slices = {}
        self._backend = backend
        self._index = index

    def _build(self, spec: TensorSpec) -> torch.Tensor:
        dtype = TORCH_DTYPES.get(spec.dtype)
        if dtype is None:
            raise HandleError(f"{spec.name!r} is {spec.dtype}, which torch {torch.__version__} does not know")
        if 0 in spec.size:
            return self._backend.allocate(self._index, 0).view(dtype).as_strided(spec.size, spec.stride)
        flat = self._bytes(spec.group).view(dtype)
        return flat.as_strided(spec.size, spec.stride, flat.storage_offset() + spec.offset)

    def _bytes(self, group: int) -> torch.Tensor:
        """The bytes of one alias group."""
        raise NotImplementedError


class CudaTensorBuilder(_OnDevice):
    """Builds tensors over ``nbytes`` bytes at an address of a device. ``keep`` lives until drop() and the last of them.

    Each alias group gets a storage of its own.
    """

    def __init__(
        self, backend: CudaBackend, index: int, address: int, nbytes: int, manifest: Manifest, *, keep: object
    ) -> None:
        super().__init__(backend, index, manifest)
        self._address = address
        self._nbytes = nbytes
        self._keep: object | None = keep

    def _bytes(self, group: int) -> torch.Tensor:
        flat, keep = self._flat.get(group), self._keep
        if keep is None:
            raise ClosedError("tensor builder")
        if flat is None:
            spec = self.manifest.groups[group]
            assert spec.offset_bytes + spec.nbytes <= self._nbytes, "a group out of the segment"
            span = _Span(self._address + spec.offset_bytes, spec.nbytes, keep)
            made = self._backend.view(span, self._index)
            flat = self._flat.setdefault(group, made)
            if flat is made:  # and not that of another thread
                self.memory[group] = cast("weakref.ref[memoryview]", weakref.ref(span))
        return flat

    def drop(self) -> None:
        """Drop the builder's own references to the memory. Nothing can be built afterwards."""
        self._keep = None
        super().drop()


class CudaLoadBuilder(_OnDevice):
    """Builds tensors to copy from, for the time of a ``with`` block; at its end every copy is done. Not for callers."""

    def __init__(self, backend: CudaBackend, device: str, index: int, flat: torch.Tensor, manifest: Manifest) -> None:
        super().__init__(backend, index, manifest)
        self._device = device
        self._whole: torch.Tensor | None = flat

    def _bytes(self, group: int) -> torch.Tensor:
        if self._whole is None:
            raise ClosedError("tensor builder")
        spec = self.manifest.groups[group]
        return self._whole[spec.offset_bytes : spec.offset_bytes + spec.nbytes]

    def drop(self) -> None:
        """Drop the builder's own references to the memory. Nothing can be built afterwards."""
        self._whole = None
        super().drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()
        with device_errors(self._device, "what was queued"):
            self._backend.synchronize(self._index)  # also after an error: what was queued still reads
