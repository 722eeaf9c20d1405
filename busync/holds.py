"""What a reader holds: the segments that it was sent, and its use of versions in them.

A session owns its sockets and, through ``AttachedSegment``, the descriptors, mappings and imports of the segments that
may still be announced. A ``Hold`` owns one lease: it lives as long as a snapshot, a tensor or a running load uses the
version, and its death is the Release.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from busync import forks
from busync.fds import OwnedFd
from busync.handles import (
    COPY_BYTES,
    CudaEvent,
    LoadPlan,
    Memory,
    MixedBuilder,
    PrivateMappings,
    ReceivedSegment,
    TensorBuilder,
    gpus,
    live_names,
    map_readonly,
)
from busync.ids import LeaseId, SegmentId, Version
from busync.manifest import DeviceSpec, Manifest
from busync.transport.door import DoorConnection
from busync.wire import Release, encode

if TYPE_CHECKING:
    from busync.session import Session


class AttachedSegment:
    """A segment that the publisher sent: its descriptor, its mappings for tensors and for loads, its memory on GPUs."""

    def __init__(self, segment: SegmentId, fd: OwnedFd | None = None, nbytes: int = 0) -> None:
        self.id = segment
        self.nbytes = nbytes  #: on the host
        self.fd = fd  #: None: it has no memory on the host, or that has not arrived yet
        self.private = PrivateMappings(fd, nbytes) if fd is not None else None  #: for tensors that callers get
        self.devices: dict[str, ReceivedSegment] = {}  #: by UUID
        self._readonly: mmap.mmap | None = None

    def readonly(self) -> mmap.mmap:
        """The mapping that loads copy from; no tensor of the user ever points into it.

        Raises:
            AllocationError: it cannot be mapped.
        """
        assert self.fd is not None, "mapped without a descriptor"
        mapping = self._readonly  # once made it stays; only making it must not meet a fork
        if mapping is None:
            with forks.fork_lock:
                mapping = self._readonly = self._readonly or map_readonly(self.fd, self.nbytes)
        return mapping

    def close(self) -> None:
        """The session needs it no more; what is in use stays open. Mappings and descriptors go with the last user."""
        for memory in self.devices.values():
            memory.close()
        if self.private is not None:
            self.private.end()

    def after_fork_in_child(self) -> None:
        """Close the child's descriptor; the read-only mapping does not exist in the child."""
        if self.fd is not None:
            self.fd.close()
        if self.private is not None:
            self.private.after_fork_in_child()
        if self._readonly is not None:
            forks.immortal(self._readonly)
            self._readonly = None


class Leases:
    """The leases of one session that have not ended, and what their holders share."""

    __slots__ = ("copying", "door", "ended", "holds", "mapped", "pid", "spare", "words")

    def __init__(self, door: DoorConnection) -> None:
        self.door = door
        self.pid = os.getpid()
        self.copying = threading.RLock()  #: nobody may find a lease gone half way
        #: leases whose Release was sent, for the core to strike out
        self.ended: deque[LeaseId] = deque()
        self.spare: deque[LeaseId] = deque()  #: leases of versions that were copied, for the core to know
        #: Some may be gone. Not WeakValueDictionaries, which run a dozen functions for each version. The collector
        #: clears references to a hold before it runs finalizers, which may save it, and never those to the life of its
        #: word.
        self.holds: dict[LeaseId, weakref.ref[Hold]] = {}
        self.words: dict[LeaseId, weakref.ref[object]] = {}
        #: leases on segments that tensors of the user may point into. A fork, perhaps on another thread, reads them
        #: here and not from the holds: one that it referred to would outlive its last use.
        self.mapped: set[LeaseId] = set()

    def living(self) -> list[Hold]:
        """Those holders that are alive."""
        return [hold for known in list(self.holds.values()) if (hold := known()) is not None]

    def note_said(self, released: tuple[int, ...]) -> None:
        """A Want has said that these have ended, after their bytes were copied."""
        for lease in map(LeaseId, released):
            known = self.holds.get(lease)
            if known is not None and (hold := known()) is not None:
                hold.word.said = True
                hold.segment = None  # or whoever keeps small snapshots keeps a descriptor for each
            self.forget(lease)

    def forget(self, lease: LeaseId) -> None:
        """Strike out a lease that has ended."""
        self.holds.pop(lease, None)
        self.words.pop(lease, None)
        self.mapped.discard(lease)


class _Life:
    """Something to refer to weakly, as a word cannot be: it lives as long."""

    __slots__ = ("__weakref__",)


class _Word(Struct, eq=False, gc=False):
    """The promise to say Release. It is said when this dies: on any thread, perhaps inside the garbage collector.

    The collector does not see it: a lease that hangs on a cycle ends when the cycle is taken apart, after its
    finalizers, and not before them as a weak reference would have it. Takes no lock: one send, one append.
    """

    leases: Leases
    lease: LeaseId
    life: _Life
    said: bool = False  #: by a Want

    def __del__(self) -> None:
        leases = self.leases
        if not self.said and not sys.is_finalizing() and os.getpid() == leases.pid:
            leases.door.send(encode(Release(lease=self.lease)))
            leases.ended.append(self.lease)


class Hold:
    """This process's use of one version, under one lease.

    When it dies, nothing here can read the version in its segment any more, and Release is sent. The bytes of a small
    version are copied when they are first needed. From then on the lease is not needed, and ends with the next Want if
    the hold lives as long.
    """

    __slots__ = (
        "__weakref__", "_bytes", "_leases", "_memories", "lease", "manifest", "segment", "session", "version", "word",
    )  # fmt: skip

    def __init__(
        self, session: Session, lease: LeaseId, version: Version, manifest: Manifest, segment: AttachedSegment | None
    ) -> None:
        self.session = weakref.ref(session)
        self.lease = lease
        self.version = version
        self.manifest = manifest
        self.segment = segment
        self._leases = session.leases
        self._bytes: bytearray | None = None  #: of a small version, as they were published; nobody writes to them
        #: of each mapping. Not its builder: that refers to the mapping, and the mapping to this hold
        self._memories: list[Memory] = []
        life = _Life()  # lasts until Release was said, or should have been, also where the hold is saved
        self.word = _Word(session.leases, lease, life)
        session.leases.holds[lease] = weakref.ref(self)
        session.leases.words[lease] = weakref.ref(life)

    def own_memory(self) -> TensorBuilder:
        """A builder of tensors over memory of this process, which keeps this hold alive.

        A copy-on-write mapping of the segment; if there is little, copies, which do not, made as they are asked for. On
        a GPU the publisher's own memory, or a copy if the reader uses another one.

        Raises:
            AllocationError: it cannot be mapped, or copied.
            AttachError: it cannot be opened.
        """
        builder = self._host_memory()
        if self.manifest.devices:
            builder = MixedBuilder([builder, *map(self._device_memory, self.manifest.devices)])
        self._memories.append(builder.memory)
        return builder

    def _host_memory(self) -> TensorBuilder:
        segment, nbytes = self.segment, self.manifest.nbytes
        if nbytes and (self._bytes is not None or nbytes <= COPY_BYTES):
            return TensorBuilder(self._copied(), self.manifest, copy=True)
        if segment is None or not nbytes:
            return TensorBuilder(memoryview(b""), self.manifest)
        private = segment.private
        assert private is not None, "memory on the host without a descriptor"
        private.prepare()
        with forks.fork_lock:
            mapping = private.map(keep=self)
            self._leases.mapped.add(self.lease)
            self._stay_known()
        return TensorBuilder(mapping, self.manifest)

    def _copied(self) -> bytearray:
        """The bytes of a small version, under its lease the first time."""
        with self._leases.copying:
            if self._bytes is None:
                segment = self.segment
                assert segment is not None, "bytes without a segment"
                copied = bytearray(memoryview(segment.readonly())[: self.manifest.nbytes])
                if self._bytes is None:  # or a signal's handler was here meanwhile, and the lease may be over
                    self._bytes = copied
                    if not self.manifest.devices:
                        self._leases.spare.append(self.lease)
            return self._bytes

    def _device_memory(self, spec: DeviceSpec) -> TensorBuilder:
        assert self.segment is not None, "memory on a GPU without a segment"
        memory = self.segment.devices[spec.device]
        if memory.foreign:
            return memory.copy(self.manifest)
        self._stay_known()
        return memory.map(self.manifest, partial(_let_go, self))

    def _stay_known(self) -> None:
        known = self._leases.holds.get(self.lease)
        if known is None or known() is None:  # the finalizer of a cycle has saved it
            self._leases.holds[self.lease] = weakref.ref(self)

    def load(self, plan: LoadPlan, queued: Mapping[int, CudaEvent]) -> None:
        """Copy the version as planned, to the end, also on GPUs; after what the caller had ``queued`` there. Blocks.

        Raises:
            AllocationError: it cannot be mapped.
            AttachError: it cannot be opened.
            DeviceError: a GPU has failed.
        """
        segment, manifest = self.segment, self.manifest
        gpus.wait(queued)
        host = self._to_load_from()
        if segment is None or not manifest.devices:
            plan.run(host)
        else:
            with ExitStack() as stack:
                parts = [stack.enter_context(segment.devices[s.device].load(manifest)) for s in manifest.devices]
                plan.run(MixedBuilder([host, *parts]))
        if queued:
            gpus.finish(plan.tensors)

    def _to_load_from(self) -> TensorBuilder:
        """What the host's part is copied from; never for callers."""
        segment, nbytes = self.segment, self.manifest.nbytes
        memory: mmap.mmap | memoryview = memoryview(b"")
        if nbytes and (self._bytes is not None or nbytes <= COPY_BYTES):
            memory = memoryview(self._copied())
        elif nbytes and segment is not None:
            memory = segment.readonly()
        return TensorBuilder(memory, self.manifest)

    def __str__(self) -> str:
        names = [name for memory in self._memories for name in live_names(self.manifest, memory)]
        if not names:
            return f"version {self.version}: its snapshot"
        more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
        return f"version {self.version}: {names[0]!r}{more}"


def _let_go(hold: Hold) -> None:
    """Holds what it is to be called with, until a GPU is done with it."""
