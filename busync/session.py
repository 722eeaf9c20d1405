"""One connection of a subscriber to a publisher, driven by non-blocking turns.

Here the core, the door, the bus, the board and the memory of one session meet; no event loop is known here. Who owns
what: the session owns its sockets and, through ``AttachedSegment``, the descriptors of the segments that may still be
announced. A ``Hold`` owns one lease: it lives as long as a snapshot, a tensor or a running load uses the version, and
its death is the Release.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from msgspec import Struct

from busync import forks
from busync.errors import BusyncError, FdError, ProtocolError, ViolationError
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
    check_segment,
    decode_handle,
    gpus,
    live_names,
    map_readonly,
)
from busync.ids import Incarnation, LeaseId, SegmentId, Version
from busync.manifest import DeviceSpec, Manifest
from busync.protocol import effects as fx
from busync.protocol.subscriber import SubscriberProtocol
from busync.transport.board import BoardView
from busync.transport.bus import DealerBus
from busync.transport.door import DoorConnection, door_connect
from busync.transport.endpoint import Endpoint
from busync.wire import (
    MAX_MESSAGE_BYTES,
    Abandon,
    DeviceSegment,
    Join,
    Release,
    Want,
    decode_bus_down,
    decode_door_down,
    encode,
)

#: Seconds of messages that one turn handles before it lets the loop do something else.
TURN = 0.008


class SessionEnded(BusyncError):
    """The session is over; ``text`` says why. Never leaves the subscriber."""


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
        with forks.fork_lock:
            if self._readonly is None:
                self._readonly = map_readonly(self.fd, self.nbytes)
            return self._readonly

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


class _Word(Struct, eq=False, gc=False):
    """The promise to say Release. It is said when this dies: on any thread, perhaps inside the garbage collector.

    The collector does not see it: a lease that hangs on a cycle ends when the cycle is taken apart, after its
    finalizers, and not before them as a weak reference would have it. Takes no lock: one send, one append.
    """

    door: DoorConnection
    packet: bytes
    pid: int
    ended: deque[LeaseId]
    lease: LeaseId
    said: bool  #: by a Want
    holds: weakref.WeakValueDictionary[LeaseId, Hold]  #: the session's

    def __del__(self) -> None:
        if not self.said and not sys.is_finalizing() and os.getpid() == self.pid:
            self.door.send(self.packet)
            self.ended.append(self.lease)


class Hold:
    """This process's use of one version, under one lease.

    When it dies, nothing here can read the version in its segment any more, and Release is sent. The bytes of a small
    version are copied when they are first needed. From then on the lease is not needed, and ends with the next Want if
    the hold lives as long.
    """

    def __init__(
        self, session: Session, lease: LeaseId, version: Version, manifest: Manifest, segment: AttachedSegment | None
    ) -> None:
        self.session = weakref.ref(session)
        self.lease = lease
        self.version = version
        self.manifest = manifest
        self.segment = segment
        self._mapped = session.mapped
        self._spare = session.spare
        self._bytes: bytearray | None = None  #: of a small version, as they were published; nobody writes to them
        self._copying = threading.RLock()  #: nobody may find the lease gone half way
        #: of each mapping. Not its builder: that refers to the mapping, and the mapping to this hold
        self._memories: list[Memory] = []
        packet = encode(Release(lease=lease))
        self._word = _Word(session.door, packet, os.getpid(), session.ended, lease, False, session.holds)

    def own_memory(self) -> TensorBuilder:
        """A builder of tensors over memory of this process, which keeps this hold alive.

        A copy-on-write mapping of the segment; a copy, which does not, if there is little. On a GPU the publisher's own
        memory, or a copy if the reader uses another one.

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
            return TensorBuilder(bytearray(self._copied()), self.manifest)
        if segment is None or not nbytes:
            return TensorBuilder(memoryview(b""), self.manifest)
        private = segment.private
        assert private is not None, "memory on the host without a descriptor"
        private.prepare()
        with forks.fork_lock:
            mapping = private.map(keep=self)
            self._mapped.add(self.lease)
            self._stay_known()
        return TensorBuilder(mapping, self.manifest)

    def _copied(self) -> bytearray:
        """The bytes of a small version, under its lease the first time."""
        with self._copying:
            if self._bytes is None:
                segment = self.segment
                assert segment is not None, "bytes without a segment"
                self._bytes = bytearray(memoryview(segment.readonly())[: self.manifest.nbytes])
                if not self.manifest.devices:
                    self._spare.append(self.lease)
            return self._bytes

    def said(self) -> None:
        """A Want has said that the lease has ended, after the bytes were copied."""
        self._word.said = True
        self.segment = None  # or whoever keeps small snapshots keeps a descriptor for each

    def _device_memory(self, spec: DeviceSpec) -> TensorBuilder:
        assert self.segment is not None, "memory on a GPU without a segment"
        memory = self.segment.devices[spec.device]
        if memory.foreign:
            return memory.copy(self.manifest)
        self._stay_known()
        return memory.map(self.manifest, partial(_let_go, self))

    def _stay_known(self) -> None:
        if self.lease not in self._word.holds:  # the finalizer of a cycle has saved it
            self._word.holds[self.lease] = self

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


class Session(forks.ForkAware):
    """A session from the door's connection to its end. ``core`` is told of everything.

    Raises:
        OSError: nobody is at the door.
        FdError: the process has no descriptor left.
    """

    def __init__(self, endpoint: Endpoint, core: SubscriberProtocol, device: str | None = None) -> None:
        self.endpoint = endpoint
        self.core = core
        self.device = device  #: the UUID of the one GPU that the application uses; None: whichever a version is on
        self.door = door_connect(endpoint.door_path)
        self.bus: DealerBus | None = None
        self.board: BoardView | None = None
        self.slot = 0
        self.incarnation = Incarnation(0)
        #: leases whose Release was sent, for the core to strike out
        self.ended: deque[LeaseId] = deque()
        self.spare: deque[LeaseId] = deque()  #: leases of versions that were copied, for the core to know
        self.holds: weakref.WeakValueDictionary[LeaseId, Hold] = weakref.WeakValueDictionary()
        #: of versions that were copied, and whose leases have ended
        self.copies: weakref.WeakValueDictionary[Version, Hold] = weakref.WeakValueDictionary()
        #: leases on segments that tensors of the user may point into. A fork, perhaps on another thread, reads them
        #: here and not from the holds: one that it referred to would outlive its last use.
        self.mapped: set[LeaseId] = set()
        self.segments: dict[SegmentId, AttachedSegment] = {}
        self._fd: OwnedFd | None = None  #: came with the packet that is being handled
        self.more = False  #: the last turn ended early, and another one is due
        forks.register(self)
        core.start()
        self.say([])

    @property
    def newest(self) -> Version:
        """The newest version on the board, 0 if none."""
        return Version(self.board.read(self.slot)) if self.board is not None else Version(0)

    def hold(self, granted: fx.Granted) -> Hold:
        """The holder of a fresh grant."""
        stored = granted.segment_nbytes or granted.manifest.devices
        segment = self.segments[granted.segment] if stored else None
        hold = Hold(self, granted.lease, granted.version, granted.manifest, segment)
        self.holds[granted.lease] = hold
        return hold

    def turn(self, events: list[fx.SubscriberEffect]) -> None:
        """Handle what has arrived, at most TURN seconds of it, and say what the core wants to say.

        The effects that concern the application are appended to ``events``, also when the session ends: a refusal, or
        the last version, arrives together with the end of the connection.

        Raises:
            SessionEnded: the publisher has gone, or broke the protocol, or a descriptor could not be taken.
        """
        try:
            self.strike_ended()
            if self.door.pending:
                self.door.flush()
            self.say(events)
            self._receive(events)
            if self.bus is not None and not self.more and self.bus.lost():
                raise SessionEnded("the bus connection broke")
        except EOFError:
            raise SessionEnded("the publisher closed the connection") from None
        except ProtocolError as error:
            raise SessionEnded(str(error)) from error

    def strike_ended(self) -> None:
        """Strike out the leases whose Release was sent."""
        while self.ended:
            lease = self.ended.popleft()
            self.mapped.discard(lease)
            self.core.ended(lease)
        while self.spare:
            self.core.spared(self.spare.popleft())
        if self.core.held + len(self.core.spare) > len(self.holds):
            self._keep_words()

    def _keep_words(self) -> None:
        """Say Release for leases whose last user is gone without a word: Ctrl-C may strike inside a finalizer."""
        for lease in self.core.without_hold(self.holds):
            self.door.send(encode(Release(lease=lease)))
            self.mapped.discard(lease)
            self.core.ended(lease)

    def _receive(self, events: list[fx.SubscriberEffect]) -> None:
        """Handle what has arrived. The bus comes last: nothing lies there afterwards, unless there is ``more``."""
        stop_at = 0.0
        door = True
        while True:
            packet = self.door.receive() if door else None
            if packet is not None:
                self._fd = packet.fds[0] if packet.fds else None
                self.core.receive_door(decode_door_down(packet.data))
                self.say(events)
            data = self.bus.receive() if self.bus is not None else None
            if data is not None:
                self.core.receive_bus(decode_bus_down(data))
                self.say(events)
            door = packet is not None
            self.more = False
            if packet is None and data is None:
                return
            now = time.monotonic()
            stop_at = stop_at or now + TURN
            if now > stop_at:
                self.more = True
                return

    def say(self, events: list[fx.SubscriberEffect]) -> None:
        """Carry out the core's effects; those that concern the application are appended to ``events``."""
        for effect in self.core.take_effects():
            match effect:
                case fx.ToDoor(message):
                    self.door.send(encode(message))
                    if isinstance(message, Want) and message.released:
                        self._said(message.released)
                case fx.ConnectBus(token, incarnation, slot):
                    self._connect_bus(token, incarnation, slot)
                case fx.TakeSegment(segment, nbytes):
                    fd = self._take_fd("a segment")
                    check_segment(fd, segment, nbytes)
                    attached = AttachedSegment(segment, fd, nbytes)
                    if segment in self.segments:  # its memory on a GPU came first
                        attached.devices = self.segments[segment].devices
                    self.segments[segment] = attached
                case fx.TakeDevice(segment, device, nbytes, values):
                    self._take_device(segment, device, nbytes, values)
                case fx.ForgetSegments(segments):
                    for segment in segments:
                        self.segments.pop(segment).close()
                case _:
                    events.append(effect)

    def _said(self, released: tuple[int, ...]) -> None:
        for lease in map(LeaseId, released):
            hold = self.holds.pop(lease, None)
            if hold is not None:
                hold.said()
                self.copies[hold.version] = hold

    def _take_fd(self, what: str) -> OwnedFd:
        fd, self._fd = self._fd, None
        if fd is None:
            raise ViolationError("the publisher", f"{what} without its descriptor")
        return fd

    def _take_device(self, segment: SegmentId, device: str, nbytes: int, values: dict[str, Any]) -> None:
        handle = decode_handle(segment, nbytes, values)
        if handle.device != device:
            raise ViolationError("the publisher", f"memory on {device} with a handle for {handle.device}")
        attached = self.segments.setdefault(segment, AttachedSegment(segment))
        attached.devices[device] = ReceivedSegment(gpus.importer(), segment, handle, nbytes, self.device)

    def _connect_bus(self, token: bytes, incarnation: Incarnation, slot: int) -> None:
        self.board = BoardView(self._take_fd("a board"), incarnation)
        self.slot, self.incarnation = slot, incarnation
        self.bus = DealerBus(self.endpoint.bus_path, token, MAX_MESSAGE_BYTES)
        self.bus.send(encode(Join()))

    def close(self) -> None:
        """End the session. Tensors in place stay usable; their leases end with the session at the publisher."""
        forks.unregister(self)
        self.door.shutdown()
        self._give_back_unread()
        if self.bus is not None:
            self.bus.close()
        if self.board is not None:
            self.board.close()
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        self.core.stop()

    def _give_back_unread(self) -> None:
        """Exports that have arrived and were never looked at would count for as long as this process lives."""
        with suppress(EOFError, ProtocolError, FdError):
            while (packet := self.door.receive()) is not None:
                for fd in packet.fds:
                    fd.close()
                with suppress(BusyncError):  # whatever is wrong with one, the next may be right
                    message = decode_door_down(packet.data)
                    if isinstance(message, DeviceSegment):
                        gpus.importer().give_back(decode_handle(message.segment, message.nbytes, message.handle))

    def before_fork(self) -> None:
        """Take back the word on leases that a child will map as well."""
        mapped = tuple(self.mapped)
        if mapped:  # straight to the door: the core belongs to the loop's thread, and this may be another
            self.door.send(encode(Abandon(leases=mapped)))

    def after_fork_in_child(self) -> None:
        """Close what would keep the parent's memory alive; the sockets look after themselves."""
        kept = {hold.segment for hold in list(self.holds.values()) if hold.segment is not None}
        for segment in kept | set(self.segments.values()):
            segment.after_fork_in_child()
