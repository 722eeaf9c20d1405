"""Copying without torch's own threads, which stall for whole scheduler quanta when actors keep the cores busy."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

import torch

#: (offset in the segment, address, bytes) of bytes that are copied as they lie.
Move = tuple[int, int, int]
Job = Callable[[], None]
_nbytes_of: Callable[[Move], int] = itemgetter(2)

PIECE_BYTES = 8 << 20  #: the most that one worker takes at a time
_WORTH_A_THREAD_BYTES = 1 << 20  # waking a second thread costs as much as copying about this
_SMALL_BYTES = 256 * 1024  # up to this, to make the pieces takes as long as to copy them
_ROW = 128  # tensors of a batch that one worker takes at a time
ONE_THREAD_ELEMENTS = 32767  #: torch copies fewer than 32,768 elements on the calling thread


@dataclass(slots=True)
class Copy:
    """Elements that torch copies: to ``offset`` bytes in the segment, there with ``stride`` (in elements)."""

    offset: int
    source: torch.Tensor
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to be written."""
        return self.source.numel() * self.source.itemsize


@dataclass(slots=True)
class Batch:
    """Many small tensors that torch copies in one call per row, which takes the GIL once and not for each of them."""

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    nbytes: int


def make_jobs(
    buffer: memoryview | mmap.mmap, moves: list[Move], copies: list[Copy], workers: int, *, keep: object,
    batch: Batch | None = None,
) -> list[Job]:  # fmt: skip
    """Jobs that together do all moves and copies into ``buffer``; see Plan.jobs. They hold ``buffer`` and ``keep``."""
    holder = torch.frombuffer(buffer, dtype=torch.uint8)
    base = holder.data_ptr()
    moved = sum(map(_nbytes_of, moves))
    if not copies and batch is None and moved <= _SMALL_BYTES:

        def one_job() -> None:
            _move(base, moves)
            _ = holder, keep  # alive until the last byte is copied

        return [one_job]
    if batch is None:
        batch = Batch([], [], 0)
    total = moved + sum(copy.nbytes for copy in copies) + batch.nbytes
    count = max(1, min(workers, total // _WORTH_A_THREAD_BYTES))
    piece = min(PIECE_BYTES, max(total // (4 * count), _WORTH_A_THREAD_BYTES // 4))
    # A list's iterator may be advanced from several threads; a generator's may not.
    large = any(nbytes > piece for _, _, nbytes in moves)
    small_moves = iter(list(_cut_moves(moves, piece)) if large else moves)
    rows = iter(range(0, len(batch.targets), _ROW))
    small_copies = iter([pair for copy in copies for pair in _pieces(buffer, copy, piece)])

    def job() -> None:
        _move(base, small_moves)
        if copies or batch.targets:
            with torch.inference_mode():
                for row in rows:
                    torch._foreach_copy_(batch.targets[row : row + _ROW], batch.sources[row : row + _ROW])
                for target, source in small_copies:
                    copy_elements(target, source)
        _ = holder, keep  # alive until the last byte is copied

    return [job] * count


def _move(base: int, moves: Iterable[Move]) -> None:
    memmove = ctypes.memmove
    for offset, address, nbytes in moves:
        memmove(base + offset, address, nbytes)


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """As ``target.copy_(source)``, on the calling thread alone. Both are CPU tensors of one size and dtype."""
    for target_piece, source_piece in _cut(target, source, ONE_THREAD_ELEMENTS):
        target_piece.copy_(source_piece)


def _cut_moves(moves: list[Move], piece: int) -> Iterator[Move]:
    for offset, address, nbytes in moves:
        for start in range(0, nbytes, piece):
            yield offset + start, address + start, min(piece, nbytes - start)


def _pieces(buffer: memoryview | mmap.mmap, copy: Copy, piece: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    source = copy.source
    span = 1 + sum((length - 1) * step for length, step in zip(source.shape, copy.stride, strict=True))
    flat = torch.frombuffer(buffer, dtype=source.dtype, offset=copy.offset, count=span)
    return _cut(flat.as_strided(source.shape, copy.stride), source, max(1, piece // source.itemsize))


def _cut(target: torch.Tensor, source: torch.Tensor, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut two tensors of one size alike, into pieces of at most ``most`` elements."""
    numel = target.numel()
    if numel <= most:
        yield target, source
        return
    dim = max((dim for dim, length in enumerate(target.shape) if length > 1), key=target.stride)  # outermost in memory
    rows = max(1, most * target.shape[dim] // numel)
    for start in range(0, target.shape[dim], rows):
        count = min(rows, target.shape[dim] - start)
        yield from _cut(target.narrow(dim, start, count), source.narrow(dim, start, count), most)
