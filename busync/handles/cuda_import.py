"""Segments on a GPU in a reader: opened once per process, and used by one version after another.

The opening (*import*) stays as long as a session may be granted the segment again. Each version's tensors are made
through an object of that version, which torch keeps alive until the last of them is gone. Its death is the end of that
version here: everything that was queued on the device is waited for, on a thread of its own, and then ``on_release`` is
called. Only when no session and no version needs it any more is the import itself closed, by which torch counts the
export down.

There is no copy-on-write on a GPU: an edit in place is seen by everybody.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Self, cast

import torch
from msgspec import Struct

from busync.errors import AttachError, ClosedError, DeviceError, HandleError
from busync.forks import ForkAware, ensure_same_process, fork_lock, immortal, register
from busync.handles.build import TensorBuilder
from busync.handles.cuda import CANARY_BYTES, CudaHandle, canary_offset, torch_arguments
from busync.handles.cuda_backend import CudaBackend
from busync.handles.cuda_memory import CudaExporter, CudaSegment, find_device
from busync.handles.tensors import TORCH_DTYPES
from busync.manifest import Manifest, TensorSpec

logger = logging.getLogger("busync")


class Import:
    """One opened segment, or one of this process's own. Closed with the last reference to it, and to ``flat``."""

    __slots__ = ("__weakref__", "address", "flat", "foreign", "index", "nbytes")

    def __init__(self, flat: torch.Tensor, index: int, nbytes: int, *, foreign: bool = False) -> None:
        self.flat = flat
        self.index = index
        self.nbytes = nbytes
        self.foreign = foreign  #: opened on another device than it lies on: good for copies only
        self.address = flat.data_ptr()


class _Use(Struct, gc=False, eq=False):
    """One version's use of an import. Dies with the last tensor, perhaps inside the garbage collector.

    The collector does not see it: a version that hangs on a cycle ends when the cycle is taken apart, after its
    finalizers, and not before them. It takes no lock; what can block is done by the queue's thread.
    """

    opened: Import
    on_release: Callable[[], object]
    queue: SimpleQueue[tuple[Import, Callable[[], object]]]
    pid: int

    def __del__(self) -> None:
        if not sys.is_finalizing() and os.getpid() == self.pid:
            self.queue.put((self.opened, self.on_release))


class _Span:
    """Bytes of one alias group, for torch to make tensors of. Lives as long as their storage."""

    __slots__ = ("__weakref__", "nbytes", "offset", "use")

    def __init__(self, use: _Use, offset: int, nbytes: int) -> None:
        self.use = use
        self.offset = offset
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,), "typestr": "|u1", "data": (self.use.opened.address + self.offset, False),
            "strides": None, "version": 3,
        }  # fmt: skip


class _CudaBuilder(TensorBuilder):
    """Builds tensors over an import. Until drop() it keeps ``_opened``."""

    def __init__(self, backend: CudaBackend, opened: Import, manifest: Manifest) -> None:  # there is no buffer of bytes
        assert opened.nbytes >= manifest.nbytes
        self.manifest = manifest
        self.memory = {}
        self._buffer = None
        self._flat = {}
        self._slices = {}
        self._backend = backend
        self._opened: Import | None = opened

    def _build(self, spec: TensorSpec) -> torch.Tensor:
        dtype, opened = TORCH_DTYPES.get(spec.dtype), self._opened
        if dtype is None:
            raise HandleError(f"{spec.name!r} is {spec.dtype}, which torch {torch.__version__} does not know")
        if opened is None:
            raise ClosedError("tensor builder")
        if 0 in spec.size:
            return self._backend.allocate(opened.index, 0).view(dtype).as_strided(spec.size, spec.stride)
        flat = self._bytes(opened, spec.group).view(dtype)
        return flat.as_strided(spec.size, spec.stride, flat.storage_offset() + spec.offset)

    def _bytes(self, opened: Import, group: int) -> torch.Tensor:
        """The bytes of one alias group."""
        raise NotImplementedError

    def address(self) -> int:
        """Where the segment is, for the device; good until drop()."""
        if self._opened is None:
            raise ClosedError("tensor builder")
        return self._opened.address

    def drop(self) -> None:
        """Drop the builder's own references to the memory. Nothing can be built afterwards."""
        self._opened = None
        super().drop()


class CudaTensorBuilder(_CudaBuilder):
    """Builds the tensors of one version on a GPU. The version ends here with the last of them, after drop()."""

    def __init__(self, backend: CudaBackend, use: _Use, manifest: Manifest) -> None:
        super().__init__(backend, use.opened, manifest)
        self._use: _Use | None = use

    def _bytes(self, opened: Import, group: int) -> torch.Tensor:
        flat, use = self._flat.get(group), self._use
        if use is None:  # dropped by another thread, just now
            raise ClosedError("tensor builder")
        if flat is None:
            spec = self.manifest.groups[group]
            span = _Span(use, spec.offset_bytes, spec.nbytes)
            made = self._backend.view(span, opened.index)
            flat = self._flat.setdefault(group, made)
            if flat is made:  # and not that of another thread
                self.memory[group] = cast("weakref.ref[memoryview]", weakref.ref(span))
        return flat

    def drop(self) -> None:
        """Drop the builder's own references to the memory. Nothing can be built afterwards."""
        self._use = None
        super().drop()


class CudaLoadBuilder(_CudaBuilder):
    """Builds tensors to copy from, for the time of a ``with`` block; at its end every copy is done. Not for callers."""

    def _bytes(self, opened: Import, group: int) -> torch.Tensor:
        spec = self.manifest.groups[group]
        return opened.flat[spec.offset_bytes : spec.offset_bytes + spec.nbytes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        opened = self._opened
        self.drop()
        if opened is not None:
            self._backend.synchronize(opened.index)  # also after an error: what was queued still reads


class ReceivedSegment:
    """A segment that a publisher has sent to one session: an export, opened when it is first needed.

    ``on`` is the UUID of the one device that the reader uses. If the segment lies on another, it is opened through that
    one, so that the process gets no context on a device that it does not use; its tensors can then only be copied.
    """

    def __init__(
        self, importer: CudaImporter, segment: int, handle: CudaHandle, nbytes: int, on: str | None = None
    ) -> None:
        self.segment = segment
        self.nbytes = nbytes
        self.handle = handle
        self._on = on if on is not None else handle.device
        self._importer = importer
        self._opened: Import | None = None
        self._error: AttachError | None = None
        self._over = False

    def open(self) -> Import:
        """Open it, or the error with which that failed before: there is no second try. Blocks for some milliseconds.

        Raises:
            AttachError: it cannot be opened, or does not show what the publisher has written.
            ClosedError: it was closed.
        """
        if self._error is not None:
            raise self._error
        if self._opened is None:
            if self._over:
                raise ClosedError("segment")
            self._over = True
            try:
                self._opened = self._importer.open(self.segment, self.handle, self.nbytes, self._on)
            except AttachError as error:
                self._error = error
                raise
        return self._opened

    def map(self, manifest: Manifest, on_release: Callable[[], object]) -> CudaTensorBuilder:
        """A builder of one version's tensors. ``on_release`` is called when nothing can read the version any more.

        It is called once, on another thread, after the last tensor is gone and the device has done what was queued.

        Raises:
            AttachError: see ``open``; or it lies on a device that the reader does not use.
        """
        opened = self.open()
        if opened.foreign:
            reason = f"it is on {self.handle.device}, and this reader uses {self._on}"
            raise AttachError(self.segment, reason, "copy it with load_into")
        use = self._importer.use(opened, on_release)
        return CudaTensorBuilder(self._importer.backend, use, manifest)

    def load(self, manifest: Manifest) -> CudaLoadBuilder:
        """What to copy one version from, under its lease, in a ``with`` block.

        Raises:
            AttachError: see ``open``.
        """
        return CudaLoadBuilder(self._importer.backend, self.open(), manifest)

    def close(self) -> None:
        """The session needs it no more. Versions that are still in use keep it open; one never opened is given back."""
        if not self._over:
            self._over = True
            self._importer.give_back(self.handle)
        self._opened = None


class CudaImporter(ForkAware):
    """What a process has opened, by one backend. Methods may be called from any thread."""

    def __init__(self, exporter: CudaExporter) -> None:
        self.backend: CudaBackend = exporter.backend
        self._exporter = exporter  #: of this process
        self._pid = os.getpid()
        self._lock = threading.Lock()
        #: by the device that opened it, memory and offset
        self._imports: weakref.WeakValueDictionary[tuple[str, bytes, int], Import] = weakref.WeakValueDictionary()
        self._ended: SimpleQueue[tuple[Import, Callable[[], object]]] = SimpleQueue()
        self._uses = 0  #: whose on_release has not been called
        self._thread: threading.Thread | None = None
        register(self)

    def open(self, segment: int, handle: CudaHandle, nbytes: int, on: str) -> Import:
        """Open an export on a device, or count it down if its memory is open here already. The handle has been checked.

        Raises:
            AttachError: it cannot be opened here; the export was given back.
        """
        ensure_same_process(self._pid, "CUDA importer")
        with self._lock:
            key = (on, handle.memory, handle.offset)
            known = self._imports.get(key)
            own = self._exporter.exported_here(handle)
            if known is not None or own is not None:  # torch counts openings, and this is none
                self.give_back(handle)
            if known is not None:
                if known.nbytes != nbytes:
                    raise AttachError(segment, f"it is open here with {known.nbytes} bytes, not {nbytes}")
                return known
            try:
                with fork_lock:
                    opened = self._open(segment, handle, nbytes, on) if own is None else self._share(segment, own)
                    self._imports[key] = opened
            except BaseException:
                self.give_back(handle)
                raise
            return opened

    def _open(self, segment: int, handle: CudaHandle, nbytes: int, on: str) -> Import:
        problem = self.backend.problem()
        if problem:
            raise AttachError(segment, problem, "subscribe where the publisher's GPU can be used")
        try:
            index = find_device(self.backend, on)
        except DeviceError as error:
            raise AttachError(segment, error.text, error.remedy) from error
        foreign = on != handle.device
        if not foreign and handle.offset + handle.nbytes > self.backend.total_bytes(index):
            raise AttachError(segment, f"cuda:{index} has no {handle.offset + handle.nbytes} bytes")
        try:
            flat = self.backend.rebuild(torch_arguments(handle, index))
        except (RuntimeError, ValueError, TypeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise AttachError(segment, f"cuda:{index} cannot open it ({reason})", _OPEN_REMEDY) from error
        start = canary_offset(nbytes)
        if self.backend.read(flat[start : start + CANARY_BYTES]) != handle.canary:
            del flat
            raise AttachError(segment, f"cuda:{index} does not show what the publisher wrote", _OPEN_REMEDY)
        return Import(flat, index, nbytes, foreign=foreign)

    def _share(self, segment: int, own: CudaSegment) -> Import:
        """The memory of this very process, without opening anything."""
        if own.dropped:
            raise AttachError(segment, "this process, which published it, has dropped it")
        return Import(own.flat, own.index, own.nbytes)

    def give_back(self, handle: CudaHandle) -> None:
        """Count an export down that was not opened, and will not be."""
        with suppress(RuntimeError):  # the publisher's counters are gone
            if self.backend.count(handle.counter, handle.slot) == 1:
                self.backend.release(handle.counter, handle.slot)

    def use(self, opened: Import, on_release: Callable[[], object]) -> _Use:
        """One version's use of an import; see ``ReceivedSegment.map``."""
        ensure_same_process(self._pid, "CUDA importer")
        with self._lock:
            self._uses += 1
            if self._thread is None:  # here and not when something ends, which may be inside the collector
                self._thread = threading.Thread(target=self._release, name="busync-release", daemon=True)
                self._thread.start()
        return _Use(opened, on_release, self._ended, self._pid)

    def _release(self) -> None:
        more = True
        while more:
            opened, on_release = self._ended.get()
            try:
                self.backend.synchronize(opened.index)
                del opened  # the session's end waits for no version
                on_release()
            except Exception:  # without the device's word nothing is released: the lease ends with the session
                logger.exception("a version on a GPU could not be released")
            opened = on_release = None  # type: ignore[assignment]
            with self._lock:
                self._uses -= 1
                more = self._uses > 0
                if not more:
                    self._thread = None

    def after_fork_in_child(self) -> None:
        """Close nothing in the child that is the parent's."""
        for opened in list(self._imports.values()):
            immortal(opened.flat)
        self._imports.clear()


_OPEN_REMEDY = "let both processes share their IPC and PID namespaces and use the same driver"
