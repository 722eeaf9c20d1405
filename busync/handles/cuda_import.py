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
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch
from msgspec import Struct

from busync.errors import AttachError, DeviceError
from busync.forks import ForkAware, ensure_same_process, fork_lock, immortal, register
from busync.handles.cuda import CANARY_BYTES, CudaHandle, canary_offset, device_errors, first_line, torch_arguments
from busync.handles.cuda_backend import CudaBackend
from busync.handles.cuda_build import CudaLoadBuilder, CudaTensorBuilder
from busync.handles.cuda_memory import CudaExporter, CudaSegment, find_device
from busync.manifest import Manifest

logger = logging.getLogger("busync")


class Import:
    """One opened segment, or one of this process's own. Closed with the last reference to it, and to ``flat``."""

    __slots__ = ("__weakref__", "address", "flat", "index", "nbytes", "own")

    def __init__(self, flat: torch.Tensor, index: int, nbytes: int, *, own: bool = False) -> None:
        self.flat = flat
        self.index = index
        self.nbytes = nbytes
        self.own = own  #: published by this process
        self.address = flat.data_ptr()


class _Use(Struct, gc=False, eq=False):
    """One version's use of an import. Dies with the last tensor, perhaps inside the garbage collector.

    The collector does not see it: a version that hangs on a cycle ends when the cycle is taken apart, after its
    finalizers, and not before them. It takes no lock; what can block is done by the queue's thread.
    """

    opened: Import
    on_release: Callable[[], object]
    ended: deque[tuple[Import, Callable[[], object]]]
    wake: SimpleQueue[None]
    pid: int

    def __del__(self) -> None:
        if not sys.is_finalizing() and os.getpid() == self.pid:
            self.ended.append((self.opened, self.on_release))
            self.wake.put(None)


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
        self._opening = threading.RLock()  #: several threads may ask for tensors of one session
        self._opened: Import | None = None
        #: why it could not be opened. Not the error: its traceback refers to the version, whose lease it would keep
        self._refusal: tuple[Any, ...] | None = None
        self._closed = False

    @property
    def foreign(self) -> bool:
        """Whether it lies on another device than the reader's, so that its tensors can only be copied."""
        return self._on != self.handle.device

    def open(self) -> Import:
        """Open it, or the error with which that failed before: there is no second try. Blocks for some milliseconds.

        Raises:
            AttachError: it cannot be opened, does not show what the publisher has written, or was closed.
        """
        with self._opening:
            if self._refusal is not None:
                raise AttachError(*self._refusal)
            if self._opened is None:
                if self._closed:
                    raise AttachError(self.segment, "its session ended before it was opened", "take the next version")
                # First: there is no second try, whatever strikes meanwhile.
                self._refusal = self.segment, "it was interrupted while it was opened", "take the next version"
                try:
                    self._opened = self._importer.open(self.segment, self.handle, self.nbytes, self._on)
                except AttachError as error:
                    self._refusal = error.args
                    raise
                self._refusal = None
            return self._opened

    def map(self, manifest: Manifest, on_release: Callable[[], object]) -> CudaTensorBuilder:
        """A builder of one version's tensors. ``on_release`` is called when nothing can read the version any more.

        It is called once, on another thread, after the last tensor is gone and the device has done what was queued.

        Raises:
            AttachError: see ``open``.
        """
        assert not self.foreign, "used in place on another device"
        opened = self.open()
        use = self._importer.use(opened, on_release)
        backend = self._importer.backend
        return CudaTensorBuilder(backend, opened.index, opened.address, opened.nbytes, manifest, keep=use)

    def copy(self, manifest: Manifest) -> CudaTensorBuilder:
        """A builder over a copy of one version in memory of the reader's own device. Blocks until it is there.

        Raises:
            AttachError: see ``open``.
            AllocationError: the device has not that much to spare.
            DeviceError: it has failed.
        """
        opened, backend = self.open(), self._importer.backend
        with device_errors(self._on, "the copy from another device"):
            own = backend.allocate(opened.index, opened.nbytes)
            stream = backend.stream(opened.index)
            stream.wait(backend.mark(opened.index))  # the memory may be what this thread's work has just given back
            stream.copy(own, opened.flat[: opened.nbytes])
            stream.mark().synchronize()
        return CudaTensorBuilder(backend, opened.index, own.data_ptr(), opened.nbytes, manifest, keep=own)

    def load(self, manifest: Manifest) -> CudaLoadBuilder:
        """What to copy one version from, under its lease, in a ``with`` block.

        Raises:
            AttachError: see ``open``.
        """
        opened = self.open()
        return CudaLoadBuilder(self._importer.backend, self._on, opened.index, opened.flat, manifest)

    def close(self) -> None:
        """The session needs it no more. Versions that are still in use keep it open; one never opened is given back."""
        with self._opening:
            if self._opened is None and self._refusal is None and not self._closed:
                self._importer.give_back(self.handle)
            self._closed = True
            self._opened = None


class CudaImporter(ForkAware):
    """What a process has opened, by one backend. Methods may be called from any thread."""

    def __init__(self, exporter: CudaExporter) -> None:
        self.backend: CudaBackend = exporter.backend
        self._exporter = exporter  #: of this process
        self._pid = os.getpid()
        self._lock = threading.RLock()  #: a finalizer may ask for tensors of its own
        #: by the device that opened it, memory and offset
        self._imports: weakref.WeakValueDictionary[tuple[str, bytes, int], Import] = weakref.WeakValueDictionary()
        self._ended: deque[tuple[Import, Callable[[], object]]] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._uses = 0  #: whose on_release has not been called
        self._busy = False  #: the thread is at one of them
        self._lost: list[object] = []  #: what the device may still read, for ever: it has failed
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
            with fork_lock:
                opened = self._open(segment, handle, nbytes, on) if own is None else self._share(segment, own)
                self._imports[key] = opened
            return opened

    def _open(self, segment: int, handle: CudaHandle, nbytes: int, on: str) -> Import:
        try:
            index = self._usable(segment, handle, on)
        except BaseException:
            self.give_back(handle)
            raise
        # From here on torch counts it down, when the memory goes. What strikes inside, as Ctrl-C may, must not do it
        # once more: a count below zero would keep the publisher's memory for ever.
        try:
            flat = self.backend.rebuild(torch_arguments(handle, index))
        except (RuntimeError, ValueError, TypeError) as error:
            self.give_back(handle)
            raise AttachError(segment, f"cuda:{index} cannot open it ({first_line(error)})", _OPEN_REMEDY) from None
        start = canary_offset(nbytes)
        try:
            shows = self.backend.read(flat[start : start + CANARY_BYTES])
        except RuntimeError as error:
            shows = b""
            reason = f"cuda:{index} cannot read it ({first_line(error)})"
        else:
            reason = f"cuda:{index} does not show what the publisher wrote"
        if shows != handle.canary:
            del flat  # torch counts the export down, once
            raise AttachError(segment, reason, _OPEN_REMEDY)
        return Import(flat, index, nbytes)

    def _usable(self, segment: int, handle: CudaHandle, on: str) -> int:
        """The index of the device through which the memory can be opened."""
        problem = self.backend.problem()
        if problem:
            raise AttachError(segment, problem, "subscribe where the publisher's GPU can be used")
        try:
            index = find_device(self.backend, on)
        except DeviceError as error:
            raise AttachError(segment, error.text, error.remedy) from error
        if on == handle.device and handle.offset + handle.nbytes > self.backend.total_bytes(index):
            raise AttachError(segment, f"cuda:{index} has no {handle.offset + handle.nbytes} bytes")
        return index

    def _share(self, segment: int, own: CudaSegment) -> Import:
        """The memory of this very process, without opening anything."""
        if own.dropped:
            raise AttachError(segment, "this process, which published it, has dropped it")
        return Import(own.flat, own.index, own.nbytes, own=True)

    def give_back(self, handle: CudaHandle) -> None:
        """Count an export down that was not opened, and will not be."""
        if os.getpid() != self._pid:  # a forked child has no word in it
            return
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
        return _Use(opened, on_release, self._ended, self._wake, self._pid)

    @property
    def releasing(self) -> bool:
        """Whether a version has ended whose ``on_release`` is about to be called."""
        return bool(self._ended) or self._busy

    def received(self, addresses: list[int]) -> bool:
        """Whether some address lies in what was opened here, and not published by this very process."""
        with self._lock:
            spans = [(opened.address, opened.nbytes) for opened in self._imports.values() if not opened.own]
        return any(0 <= address - start < nbytes for start, nbytes in spans for address in addresses)

    def _release(self) -> None:
        more = True
        while more:
            self._wake.get()
            try:
                self.backend.synchronize(self._ended[0][0].index)
                self._busy = True  # first: ``releasing`` must see either
                opened, on_release = self._ended.popleft()
                del opened  # the session's end waits for no version
                on_release()
                del on_release
            except Exception:
                logger.exception("a version on a GPU could not be released")
                if not self._busy:  # without the device's word nothing is released: the lease ends with the session
                    self._lost.append(self._ended.popleft())
            self._busy = False
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
