"""Segments on a GPU: the publisher's buffers, and what it knows of those who opened them.

A segment is one flat buffer that is allocated once and written again and again. It is exported once *per reader*:
torch counts one opening per export, by a count that every closing takes down, so an export that two readers opened
would read "closed" while one of them still reads, and then wrap around and read "open" for ever.

An export ends in one of three ways, and ``reap`` notices each:

    its reader closed it, or gave it back unopened    the count is 0
    its reader's process is gone                      the count is taken down on its behalf, once
    nobody ever will (the publisher ends)             torch frees the memory with the process

Memory of a dropped segment stays allocated until every export of it has ended: torch keeps it, and ``reap`` has torch
look again. The count alone never makes a segment writable: who may read which version is for the ledger to say.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from busync.errors import AllocationError, DeviceError
from busync.forks import ForkAware, ensure_same_process, fork_lock, immortal, register
from busync.handles.cuda import (
    CANARY_BYTES,
    LAYOUT_PROBLEM,
    CudaHandle,
    buffer_bytes,
    canary_offset,
    device_errors,
    ensure_layout,
    first_line,
    name_fields,
)
from busync.handles.cuda_backend import CudaBackend, CudaEvent, CudaStream, TorchCuda
from busync.handles.cuda_build import CudaTensorBuilder
from busync.handles.cuda_layout import CudaPlan
from busync.handles.cuda_reader import Reader
from busync.manifest import Manifest

logger = logging.getLogger("busync")

#: Exports after which a segment should be replaced when it is free. Each keeps an event and a slot of torch's until
#: the buffer goes: of a thousand events on, torch has to wait for streams, and a file has ten thousand slots.
WORN_EXPORTS = 200

_PROBE_BYTES = 4096
_CPU_REMEDY = "publish CPU tensors, which is not affected"


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """One opening that one reader may make."""

    handle: CudaHandle
    reader: Reader
    segment: weakref.ref[CudaSegment]

    @property
    def dropped(self) -> bool:
        """Whether the publisher has no use for its segment any more."""
        segment = self.segment()
        return segment is None or segment.dropped


class CudaSegment:
    """The publisher's side of a segment on a GPU. Made by ``CudaExporter.create``."""

    def __init__(
        self, exporter: CudaExporter, device: str, index: int, nbytes: int, flat: torch.Tensor, stream: CudaStream
    ) -> None:
        self.device = device
        self.index = index
        self.nbytes = nbytes  #: that tensors may use
        self.exports = 0  #: that were ever made
        self._exporter = exporter
        self._backend = exporter.backend
        self._stream = stream
        self._flat: torch.Tensor | None = flat
        self._layout: object = None  #: that ``_targets`` are for, and what lies there
        self._targets: list[torch.Tensor] = []
        self._canary = secrets.token_bytes(CANARY_BYTES)
        start = canary_offset(nbytes)
        # This waits for the thread's own stream, on which the memory was given out. The copies have another one.
        self._backend.write(flat[start : start + CANARY_BYTES], self._canary)

    @property
    def flat(self) -> torch.Tensor:
        """The bytes that tensors may use. Whoever keeps this tensor keeps the memory."""
        assert self._flat is not None, "used after it was dropped"
        return self._flat[: self.nbytes]

    @property
    def dropped(self) -> bool:
        """Whether ``drop`` was called."""
        return self._flat is None

    @property
    def worn(self) -> bool:
        """Whether it has been exported so often that a fresh one should take its place."""
        return self.exports >= WORN_EXPORTS

    def export(self, reader: Reader) -> CudaHandle:
        """A handle for ``reader`` alone, to be opened at most once. The same process needs no second one.

        Raises:
            DeviceError: torch exports it in a way that is not known here.
        """
        self._exporter.ensure_here()
        handle = self.reduce()
        self._exporter.made(handle, reader, self)
        return handle

    def reduce(self) -> CudaHandle:
        """Export it without remembering for whom."""
        assert self._flat is not None, "exported after it was dropped"
        reduced = self._backend.reduce(self._flat, self._stream)
        self.exports += 1
        return name_fields(reduced, self.device, buffer_bytes(self.nbytes), self._canary)

    def write(self, plan: CudaPlan, after: Sequence[CudaEvent]) -> CudaEvent:
        """Queue a plan's copies into the segment, on a stream of its own, once the events ``after`` have happened.

        Returns the moment at which everything is written. Announce nothing before somebody has waited for it
        (``synchronize``, which blocks: off the loop), and keep the sources until then.
        """
        for event in after:
            self._stream.wait(event)
        for target, (_, number) in zip(self._targets_of(plan), plan.places, strict=True):
            self._stream.copy(target, plan.sources[number])
        for copy in plan.copies:
            self._stream.copy(self._target(copy.offset, copy.source, copy.stride), copy.source)
        return self._stream.mark()

    def _targets_of(self, plan: CudaPlan) -> list[torch.Tensor]:
        """Tensors over the segment for what is copied as it lies. A plan like the last one has the same."""
        # The layout alone does not tell which tensors lie in the source as they do here.
        if self._layout != (plan.manifest.digest, plan.places):
            sources = [(offset, plan.sources[number]) for offset, number in plan.places]
            self._targets = [self._target(offset, source, source.stride()) for offset, source in sources]
            self._layout = plan.manifest.digest, plan.places
        return self._targets

    def _target(self, offset: int, source: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        itemsize = source.itemsize
        span = 1 + sum((length - 1) * step for length, step in zip(source.shape, stride, strict=True))
        assert 0 <= offset <= self.nbytes - span * itemsize, "a copy out of the segment"
        return self.flat[offset : offset + span * itemsize].view(source.dtype).as_strided(source.shape, stride)

    def builder(self, manifest: Manifest) -> CudaTensorBuilder:
        """A builder of writable tensors over this memory, for a loan."""
        flat = self.flat
        return CudaTensorBuilder(self._backend, self.index, flat.data_ptr(), self.nbytes, manifest, keep=flat)

    def fill(self, plan: CudaPlan, after: Sequence[CudaEvent]) -> None:
        """As ``write``, and wait until everything is written. Blocks.

        Raises:
            DeviceError: the device has failed.
        """
        with device_errors(self.device, "the copy"):
            self.write(plan, after).synchronize()

    def wait(self, events: Iterable[CudaEvent]) -> None:
        """Block until the caller's own work on the device is done up to ``events``.

        Raises:
            DeviceError: the device has failed.
        """
        with device_errors(self.device, "what was queued before"):
            for event in events:
                event.synchronize()

    def drop(self) -> None:
        """Let go of the memory. It is free once the last export has ended and ``reap`` was called."""
        self._flat = None
        self._layout, self._targets = None, []

    def after_fork_in_child(self) -> None:
        """Keep the child from freeing what belongs to its parent."""
        if self._flat is not None:
            immortal(self._flat)
            immortal(self._targets)
            self._flat = None


class CudaExporter(ForkAware):
    """What a process has exported, by one backend. Methods may be called from any thread."""

    def __init__(self, backend: CudaBackend | None = None) -> None:
        self.backend: CudaBackend = backend if backend is not None else TorchCuda()
        self._lock = threading.Lock()
        self._proving = threading.Lock()
        self._pid = os.getpid()
        #: by UUID: whether memory of the device can be exported, or with what a DeviceError says that it cannot
        self._proven: dict[str, tuple[Any, ...] | None] = {}
        self._streams: dict[str, CudaStream] = {}
        self._exports: list[Export] = []
        self._over: set[Reader] = set()  #: whose sessions have ended
        self._segments: weakref.WeakSet[CudaSegment] = weakref.WeakSet()
        #: by counter and slot: what was exported here, for subscribers in this process
        self._here: weakref.WeakValueDictionary[tuple[bytes, int], CudaSegment] = weakref.WeakValueDictionary()
        register(self)

    def index(self, device: str) -> int:
        """The index of a device in this process.

        Raises:
            DeviceError: this process does not see it, or can share no memory at all.
        """
        self.ensure_here()
        problem = self.backend.problem()
        if problem:
            raise DeviceError(device, problem, _CPU_REMEDY)
        return find_device(self.backend, device)

    def device(self, index: int) -> str:
        """The UUID of a device of this process.

        Raises:
            DeviceError: this process cannot use it (any more).
        """
        self.ensure_here()
        for uuid, number in self.backend.devices().items():
            if number == index:
                return uuid
        raise DeviceError(f"cuda:{index}", self.backend.problem() or "torch does not know it", _CPU_REMEDY)

    def create(self, device: str, nbytes: int) -> CudaSegment:
        """Make a segment of ``nbytes`` bytes on the device with this UUID. Blocks.

        Raises:
            DeviceError: its memory cannot be shared, and why.
            AllocationError: it has not that much to spare.
        """
        index = self.index(device)
        with self._proving:  # a lock of its own: a probe takes a while, and the books are asked for on event loops
            if device not in self._proven:
                try:
                    self._probe(device, index)
                except DeviceError as error:
                    self._proven[device] = error.args  # not the error: its traceback refers to memory
                    raise
                self._proven[device] = None
            refusal = self._proven[device]
            if refusal is not None:
                raise DeviceError(*refusal)
        with fork_lock, device_errors(device, "a segment"):
            return self._make(device, index, nbytes)

    def _make(self, device: str, index: int, nbytes: int) -> CudaSegment:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self.backend.stream(index)
        flat = self.backend.allocate(index, buffer_bytes(nbytes))
        segment = CudaSegment(self, device, index, nbytes, flat, stream)
        self._segments.add(segment)
        return segment

    def made(self, handle: CudaHandle, reader: Reader, segment: CudaSegment) -> None:
        """Remember an export until it has ended."""
        with self._lock:
            self._exports.append(Export(handle, reader, weakref.ref(segment)))
            self._here[handle.counter, handle.slot] = segment

    def exported_here(self, handle: CudaHandle) -> CudaSegment | None:
        """The segment, if it belongs to this very process: torch cannot open its own exports."""
        return self._here.get((handle.counter, handle.slot))

    def take_back(self, handle: CudaHandle) -> None:
        """Count an export down that its reader has certainly not received. ``reap`` will see it."""
        self.ensure_here()
        with suppress(RuntimeError):
            if self.backend.count(handle.counter, handle.slot) == 1:
                self.backend.release(handle.counter, handle.slot)

    def end(self, reader: Reader) -> None:
        """A session is over: its exports will end, and ``reap`` will see it."""
        with self._lock:
            if any(export.reader == reader for export in self._exports):
                self._over.add(reader)

    def waiting(self) -> bool:
        """Whether exports are left of sessions that are over, or of segments that were dropped: call ``reap`` again."""
        with self._lock:
            return any(export.reader in self._over or export.dropped for export in self._exports)

    def outstanding(self) -> list[Export]:
        """Exports that have not ended, as far as ``reap`` has seen."""
        with self._lock:
            return list(self._exports)

    def reap(self) -> list[Export]:
        """Notice exports that have ended, and end those of dead readers; returns the latter. Cheap if there are none.

        Call it after a session has ended, after a segment was dropped, and now and then while either has left
        something behind.
        """
        self.ensure_here()
        freed: list[Export] = []
        with self._lock:
            kept: list[Export] = []
            for export in self._exports:
                counter, slot = export.handle.counter, export.handle.slot
                gone = export.reader.gone  # looked at first: what a process counts, it counts before it is gone
                count = self.backend.count(counter, slot)
                if count is None or count == 0:
                    continue
                if count != 1:  # somebody counted who had no right to: to count on would not mend it
                    logger.error("an export for %s counts %d openings; its memory is lost", export.reader, count)
                elif gone:
                    self.backend.release(counter, slot)
                    freed.append(export)
                else:
                    kept.append(export)
            changed = len(kept) != len(self._exports)
            self._exports = kept
            self._over.intersection_update({export.reader for export in kept})
        if changed or kept:
            self.backend.collect()
        return freed

    def tidy(self) -> None:
        """After a publisher's last drop: reap, and have torch remove its file of counters if nothing counts there.

        By itself torch does so when the process ends, but not in a child of multiprocessing.
        """
        if self._streams:  # or nothing was ever made
            self.reap()
            self.backend.collect()

    def ensure_here(self) -> None:
        """Check that this is not a forked child.

        Raises:
            ForkedError: it is.
        """
        ensure_same_process(self._pid, "CUDA exporter")

    def after_fork_in_child(self) -> None:
        """Free nothing in the child that is the parent's."""
        for segment in list(self._segments):
            segment.after_fork_in_child()
        self._exports.clear()
        immortal(self._streams)

    # Whether it works at all

    def _probe(self, device: str, index: int) -> None:
        """Share a small buffer with nobody, and see whether all of it is as it should be.

        Raises:
            DeviceError: it is not; says which setting stands in the way.
        """
        ensure_layout(device, LAYOUT_PROBLEM)
        before = self.backend.allocations(index)
        try:
            segment = self._make(device, index, _PROBE_BYTES)
        except AllocationError:
            raise
        except RuntimeError as error:
            raise self._refusal(device, f"the probe could not be allocated ({first_line(error)})") from error
        try:
            if self.backend.allocations(index) <= before:  # it only grows, whatever other threads do meanwhile
                raise self._refusal(device, "torch's caching allocator is not in use")
            counts = self._count_probe(segment)
        except RuntimeError as error:
            raise self._refusal(device, f"the probe could not be exported ({first_line(error)})") from error
        finally:
            segment.drop()
            self.backend.collect()
        if counts != [1, 0]:
            reason = f"torch counts the openings of an export as {counts}, not [1, 0]"
            raise DeviceError(device, reason, "publish CPU tensors, or use a torch that busync knows")

    def _count_probe(self, segment: CudaSegment) -> list[int | None]:
        """What torch counts for an export, before and after it is counted down."""
        handle = segment.reduce()
        counts = [self.backend.count(handle.counter, handle.slot)]
        self.backend.release(handle.counter, handle.slot)
        return [*counts, self.backend.count(handle.counter, handle.slot)]

    def _refusal(self, device: str, reason: str) -> DeviceError:
        settings = " ".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
        allocator = self.backend.allocator()
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
            remedy = "unset PYTORCH_NO_CUDA_MEMORY_CACHING in the publisher"
        elif "expandable_segments:True" in settings.replace(" ", ""):
            remedy = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False in the publisher"
        elif allocator != "native":
            remedy = f"use torch's own allocator in the publisher, not {allocator}"
        else:
            remedy = "publish CPU tensors"
        return DeviceError(device, reason, remedy)


def find_device(backend: CudaBackend, device: str) -> int:
    """The index in this process of the device with a UUID.

    Raises:
        DeviceError: it is not one of those that this process sees; both sides are named.
    """
    seen = backend.devices()
    if device not in seen:
        there = ", ".join(f"{uuid} (cuda:{index})" for uuid, index in seen.items()) or "none"
        raise DeviceError(
            device, f"this process does not see it; it sees {there}", "let CUDA_VISIBLE_DEVICES name it here too"
        )
    return seen[device]
