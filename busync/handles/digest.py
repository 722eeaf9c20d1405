"""A digest over the content of a version, whichever way it is laid out."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from busync.handles.tensors import check_kind, check_tensor

if TYPE_CHECKING:
    from hashlib import _Hash

PIECE_BYTES = 16 << 20


def content_digest(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """SHA-256 (32 bytes) over names, dtypes, shapes and elements. Blocks, but gives up the GIL.

    Tensors on a GPU are copied to the host, 16 MiB at a time.

    For each name, in the order of sorted() on the names, these bytes are hashed:

    1. the name in UTF-8, one byte 0, the dtype's name in ASCII ("float32"), one byte 0, the lengths of the dimensions
       in decimal with "," between them (nothing for a scalar), one byte 0;
    2. the elements in row-major order, each in its little-endian bytes: what ``tensor.contiguous()`` holds in memory.

    Strides, aliasing and gradients do not matter, so the digest of a version equals that of a file with its tensors.

    Raises:
        ExportError: a tensor is of a kind that cannot be published.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = check_kind(name, tensor) if tensor.is_cuda else check_tensor(name, tensor)
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{name}\0{dtype}\0{shape}\0".encode())
        with torch.no_grad():
            for piece in _rows(tensor.detach()):
                _update(digest, piece)
    return digest.digest()


def _rows(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut into pieces in row-major order: dense as they are, others copied, at most PIECE_BYTES at a time."""
    if tensor.numel() == 0:
        return
    nbytes = tensor.numel() * tensor.itemsize
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        yield tensor
    elif nbytes <= PIECE_BYTES:
        yield tensor.resolve_conj().resolve_neg().contiguous()
    else:
        dim = next(dim for dim, length in enumerate(tensor.shape) if length > 1)
        rows = max(1, PIECE_BYTES * tensor.shape[dim] // nbytes)
        for start in range(0, tensor.shape[dim], rows):
            yield from _rows(tensor.narrow(dim, start, min(rows, tensor.shape[dim] - start)))


def _update(digest: _Hash, tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        flat, step = tensor.view(-1), PIECE_BYTES // tensor.itemsize
        for start in range(0, flat.numel(), step):
            _update(digest, flat[start : start + step].cpu())
        return
    nbytes = tensor.numel() * tensor.itemsize
    data = memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")
    for start in range(0, nbytes, PIECE_BYTES):
        digest.update(data[start : start + PIECE_BYTES])
