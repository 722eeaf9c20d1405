"""Files of weights: which is complete, how to read them without a second copy in memory, how to write one.

A ``.safetensors`` file is read straight into given memory. A ``.pt``, ``.pth`` or ``.bin`` file is what ``torch.save``
writes, and only weights are taken from it. All functions block; run them off the loop.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import re
import stat
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple

from busync.errors import BusyncError
from busync.manifest import DTYPES

if TYPE_CHECKING:
    import torch

    from busync.handles import Flat

SAFETENSORS: Final = ".safetensors"
PICKLED: Final = (".pt", ".pth", ".bin")
#: Bytes per read; between two of them a read can be told to stop.
PIECE_BYTES: Final = 16 * 1024 * 1024
MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit

#: The format's names of dtypes that can be published.
_DTYPES: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip

#: Files that trainers put beside weights, and parts of a model that is no checkpoint on its own.
_NOT_WEIGHTS: Final = re.compile(
    r"^(\.|optimizer|scheduler|scaler|rng_state|random_states|training_args)|-\d{5}-of-\d{5}\."
)


class CheckpointError(BusyncError):
    """A file cannot be used as a checkpoint (now)."""

    def __init__(self, path: Path, reason: str, remedy: str = "") -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}", remedy)


class Stamp(NamedTuple):
    """Tells one state of a file from another."""

    mtime_ns: int
    inode: int
    nbytes: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """The stamp in a stat result."""
        return cls(status.st_mtime_ns, status.st_ino, status.st_size)


def candidates(source: Path) -> list[tuple[Path, Stamp]]:
    """The files that ``source`` stands for, newest first: itself, or the checkpoints in a directory, complete or not.

    Left out in a directory: hidden files, the parts of a checkpoint that is split into several files, and what
    trainers put beside weights (optimizer.pt and the like).

    Raises:
        OSError: the path cannot be read, or is not there.
        CheckpointError: the file's name has no known suffix, or it is not a file.
    """
    status = source.stat()
    if not stat.S_ISDIR(status.st_mode):
        if source.suffix not in (SAFETENSORS, *PICKLED):
            known = ", ".join((SAFETENSORS, *PICKLED))
            raise CheckpointError(source, f"the suffix {source.suffix!r} is not known", f"use one of {known}")
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(source, "not a file", "give a checkpoint file or a directory of them")
        return [(source, Stamp.of(status))]
    found = []
    with os.scandir(source) as entries:
        for entry in entries:
            if Path(entry.name).suffix in (SAFETENSORS, *PICKLED) and not _NOT_WEIGHTS.search(entry.name):
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue  # gone between the two calls
                if stat.S_ISREG(status.st_mode):
                    found.append((source / entry.name, Stamp.of(status)))
    return sorted(found, key=lambda item: (item[1].mtime_ns, item[0].name), reverse=True)


def newest(source: Path) -> Path:
    """The newest complete checkpoint that ``source`` stands for.

    Raises:
        OSError: the path cannot be read, or is not there.
        CheckpointError: there is none. Of several reasons it gives that of the newest file.
    """
    first: CheckpointError | None = None
    for path, _ in candidates(source):
        try:
            check(path)
        except CheckpointError as error:
            first = first or error
        else:
            return path
    suffixes = ", ".join((SAFETENSORS, *PICKLED))
    raise first or CheckpointError(
        source, "no checkpoint in this directory", f"put a file there ({suffixes}), or --watch"
    )


def check(path: Path) -> None:
    """See whether a file is complete, without reading its weights.

    Raises:
        CheckpointError: it is not, or it is damaged, or it cannot be read.
    """
    if path.suffix == SAFETENSORS:
        SafetensorsFile(path).close()
        return
    try:
        with zipfile.ZipFile(path) as archive:  # its directory is at the end of the file and is written last
            complete = any(name.rpartition("/")[2] == "data.pkl" for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise _unreadable(path, error, "incomplete, or not written by torch.save") from error
    if not complete:
        raise CheckpointError(path, "a zip file, but not written by torch.save")


def load_pickled(path: Path, *, mapped: bool) -> Flat:
    """What a file that ``torch.save`` wrote holds, by flat dotted names: tensors and plain values, nothing else.

    ``mapped`` reads it by mapping it. That needs no memory, but a process dies when a file that it maps is cut short,
    so use it only where nobody writes to the file.

    Raises:
        CheckpointError: it cannot be read, holds more than weights, or changed meanwhile.
        ExportError: a name or value in it cannot be published.
    """
    import torch

    from busync.handles import flatten

    try:
        before = Stamp.of(path.stat())
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        after = Stamp.of(path.stat())
    except pickle.UnpicklingError as error:
        remedy = "save only a state dict, or a .safetensors file"
        raise CheckpointError(path, "holds other things than tensors and plain values", remedy) from error
    except MemoryError:
        raise
    except Exception as error:  # torch.load has no common root: RuntimeError, ValueError, KeyError, EOFError, OSError
        raise _unreadable(path, error, "damaged, or not written by torch.save") from error
    if before != after:
        raise _changed(path)
    return flatten(content)


class SafetensorsFile:
    """An open ``.safetensors`` file whose header was found to fit its size.

    ``layout`` maps each name to dtype name and size, in the order of the file; ``nbytes`` is the sum of the tensors.

    Raises:
        CheckpointError: the file is incomplete, damaged, cannot be read, or holds a dtype that cannot be published.
    """

    layout: dict[str, tuple[str, tuple[int, ...]]]
    nbytes: int

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK: a pipe in place of a file must not stop us.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            self._stamp = Stamp.of(os.fstat(self._fd))
            self.layout = self._read_header()
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, OSError):
                raise _unreadable(path, error) from error
            raise
        self.nbytes = sum(map(_nbytes, self.layout.values()))

    def _read_header(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Let the safetensors package judge the header, on a copy that has the file's size but only its header.

        The package maps what it opens, and a mapped file that a trainer cuts short kills its reader with SIGBUS.
        """
        from safetensors import SafetensorError, safe_open

        nbytes = self._stamp.nbytes
        head = os.pread(self._fd, 8, 0)
        header_nbytes = int.from_bytes(head, "little")
        if len(head) < 8 or header_nbytes > nbytes - 8:
            raise CheckpointError(self.path, "incomplete, or not a safetensors file: shorter than its header says")
        if header_nbytes > MAX_HEADER_BYTES:
            raise CheckpointError(self.path, f"a header of {header_nbytes} bytes is more than the format allows")
        try:
            with open(os.memfd_create("header", os.MFD_CLOEXEC), "wb") as copy:
                copy.write(head + os.pread(self._fd, header_nbytes, 8))
                copy.truncate(nbytes)
                with safe_open(f"/proc/self/fd/{copy.fileno()}", framework="pt", backend="pread") as file:
                    slices = {name: file.get_slice(name) for name in file.offset_keys()}
                    kinds = {name: (view.get_dtype(), tuple(view.get_shape())) for name, view in slices.items()}
        except SafetensorError as error:
            raise CheckpointError(self.path, f"incomplete or damaged: {error}") from error
        for name, (dtype, _) in kinds.items():
            if dtype not in _DTYPES:
                raise CheckpointError(self.path, f"tensor {name!r} has dtype {dtype}, which cannot be published")
        return {name: (_DTYPES[dtype], size) for name, (dtype, size) in kinds.items()}

    def read_into(
        self, tensors: Mapping[str, torch.Tensor], advance: Callable[[int], None], stop: threading.Event
    ) -> None:
        """Read every tensor of the file into the memory of the one with its name; contiguous, of equal dtype and size.

        ``advance`` is told of every piece in bytes. Ends early, with the rest left as it was, when ``stop`` is set.

        Raises:
            CheckpointError: the file changed meanwhile, or cannot be read. What was read is worth nothing then.
        """
        # The format leaves no gaps, and the header was found to fit the size: the tensors are the end of the file.
        offset = self._stamp.nbytes - self.nbytes
        try:
            for name, spec in self.layout.items():
                tensor, nbytes = tensors[name], _nbytes(spec)
                assert tensor.is_contiguous()
                assert tensor.nbytes == nbytes
                if nbytes:
                    buffer = memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr()))
                    for start in range(0, nbytes, PIECE_BYTES):
                        if stop.is_set():
                            return
                        self._read(buffer[start : start + PIECE_BYTES], offset + start)
                        advance(min(PIECE_BYTES, nbytes - start))
                offset += nbytes
            now = Stamp.of(os.fstat(self._fd))
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if now != self._stamp:
            raise _changed(self.path)

    def _read(self, piece: memoryview, offset: int) -> None:
        while piece:
            count = os.preadv(self._fd, [piece], offset)
            if not count:
                raise _changed(self.path)
            piece, offset = piece[count:], offset + count

    def close(self) -> None:
        """Close the file. More than once is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def write(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a ``.safetensors`` file; ``path`` is either complete or as it was. Tied tensors are untied.

    Raises:
        OSError: it cannot be written (``filename`` is ``path``); nothing is left of the attempt.
        CheckpointError: the format has no such dtype.
    """
    from safetensors import SafetensorError, TensorSpec, serialize_file

    dense = {name: tensor.contiguous() for name, tensor in tensors.items()}  # kept alive until all is written
    try:
        specs = {
            name: TensorSpec(dtype=str(t.dtype)[6:], shape=t.shape, data_ptr=t.data_ptr(), data_len=t.nbytes)
            for name, t in dense.items()
        }
        serialize_file(specs, path, metadata=dict(metadata))  # under another name, then renamed
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise CheckpointError(path, str(error)) from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    # The package makes files that only their owner may read; this one has the mode that the umask asks for.
    umask = os.umask(0o077)  # it can only be read by setting it
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def _nbytes(spec: tuple[str, tuple[int, ...]]) -> int:
    dtype, size = spec
    return DTYPES[dtype] * math.prod(size)


def _unreadable(path: Path, error: Exception, reason: str = "") -> CheckpointError:
    if isinstance(error, OSError) and error.strerror:
        return CheckpointError(path, error.strerror.lower(), "check the path and its permissions")
    return CheckpointError(path, reason or str(error))


def _changed(path: Path) -> CheckpointError:
    return CheckpointError(path, "changed while it was read", "write to another name, then rename")
