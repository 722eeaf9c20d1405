"""The connections of a publisher's sessions: the door, the bus, who is at the other end, and what ends them.

On the publisher's thread. What a session means is for the core to say; here packets and messages are taken in, and
sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from busync.errors import BusyncError, DecodeError, DeviceError, FdError, ProtocolError
from busync.exports import Exports
from busync.fds import fd_budget
from busync.handles import Reader
from busync.ids import SegmentId, SessionId, new_token
from busync.options import PublisherOptions
from busync.pool import Pooled
from busync.protocol.publisher import PublisherProtocol
from busync.transport.bus import RouterBus, Sent
from busync.transport.door import DoorConnection, DoorListener, DoorPoll
from busync.transport.endpoint import Endpoint
from busync.wire import Segment, decode_bus_up, decode_door_up, encode

logger = logging.getLogger("busync")

SPARE_DESCRIPTORS = 32  #: below this many the door admits nobody: libzmq aborts the process when it runs out
RETRY = 0.005  #: seconds until packets that found no room are tried again
ACCEPTS_PER_TURN = 64
DOORS_PER_TURN = 64
MESSAGES_PER_TURN = 64
MAX_WAITING = 64  #: packets, each with a descriptor perhaps, for a subscriber that does not read its door


@dataclass(slots=True, eq=False)
class Peer:
    """A session's connection."""

    session: SessionId
    door: DoorConnection
    token: bytes
    reader: Reader
    retrying: bool = False
    exports: bool = False  #: of memory on GPUs were made for it


class Links:
    """Every session's connection. ``carry_out`` is called after something came in, to do what the core decided.

    Raises:
        EndpointError: the sockets cannot be bound.
        FdError: the process has no descriptor left.
    """

    def __init__(
        self, endpoint: Endpoint, core: PublisherProtocol, options: PublisherOptions, exports: Exports,
        loop: asyncio.AbstractEventLoop, carry_out: Callable[[], None],
    ) -> None:  # fmt: skip
        self._core = core
        self._options = options
        self._exports = exports
        self._loop = loop
        self._carry_out = carry_out
        self.peers: dict[SessionId, Peer] = {}
        self._by_token: dict[bytes, Peer] = {}
        self._bus_due = False  #: _bus_ready will be called
        self._bus_used = False  #: since the last look whether something has arrived
        with ExitStack() as undo:
            self._doors: DoorPoll[Peer] = DoorPoll()  # the loop is told once for as many as are ready
            undo.callback(self._doors.close)
            self.bus = RouterBus(endpoint.bus_path)
            undo.callback(self.bus.close)
            self._listener = DoorListener(endpoint.door_path)
            undo.pop_all()
        loop.add_reader(self._doors.fileno(), self._doors_ready)
        loop.add_reader(self.bus.fileno(), self._bus_ready)
        loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """End every session, and close everything."""
        for peer in list(self.peers.values()):
            self._forget(peer)
        for watched in (self._listener, self.bus, self._doors):
            self._loop.remove_reader(watched.fileno())
            watched.close()

    # What comes in

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                door = self._listener.accept()
            except FdError as error:
                logger.warning("%s", error)
                break
            if door is None:
                break
            token = new_token()
            session = self._core.connected(door.peer.pid, door.peer.uid, token, time.monotonic())
            peer = self.peers[session] = Peer(session, door, token, Reader.of(door.peer.pid, session=session))
            if door.peer.uid != os.geteuid() and door.peer.uid not in self._options.allow_uids:
                self._core.refuse(session, "uid", f"user {door.peer.uid} may not subscribe (allow_uids)")
            elif fd_budget() < SPARE_DESCRIPTORS:
                text = "the publisher has no descriptors left: raise its limit on open files (ulimit -n)"
                self._core.refuse(session, "descriptors", text)
            else:
                self._by_token[token] = peer
                self._watch(peer)
        self._carry_out()

    def _watch(self, peer: Peer) -> None:
        try:
            self._doors.add(peer.door, peer)
        except FdError as error:
            logger.warning("session of pid %d ends: %s", peer.door.peer.pid, error)
            self._lose(peer)

    def _doors_ready(self) -> None:
        """Take one packet from each door that has one. Whoever has sent more, or has gone, is ready again."""
        try:
            for peer in self._doors.ready(DOORS_PER_TURN):
                self._receive(peer)
        finally:  # what was decided for some must not wait for others
            self._carry_out()

    def _receive(self, peer: Peer) -> None:
        try:
            packet = peer.door.receive()
            if packet is not None:
                for fd in packet.fds:
                    fd.close()
                self._core.receive(peer.session, decode_door_up(packet.data), time.monotonic())
        except EOFError:
            self._lose(peer)
        except FdError as error:  # a peer sent descriptors, which are never wanted
            self._break(peer, str(error))
        except ProtocolError as error:
            self._break(peer, str(error))

    def _bus_ready(self) -> None:
        self._bus_due = False
        self._bus_used = True
        for _ in range(MESSAGES_PER_TURN):
            received = self.bus.receive()
            if received is None:
                break
            token, data = received
            peer = self._by_token.get(token)
            if peer is None:
                self._core.counters["strangers on the bus"] += 1
                continue
            try:
                decode_bus_up(data)
            except DecodeError as error:
                self._break(peer, str(error))
            else:
                self._core.joined(peer.session, time.monotonic())
        self._carry_out()

    def _break(self, peer: Peer, reason: str) -> None:
        """A peer did what it must not. What it still says on the bus is a stranger's."""
        logger.warning("session of pid %d ended: %s", peer.door.peer.pid, reason)
        self._by_token.pop(peer.token, None)
        if peer.session in self.peers:
            self._core.refuse(peer.session, "protocol", reason[:1000])

    def _lose(self, peer: Peer) -> None:
        if self.peers.get(peer.session) is peer:
            self._forget(peer)
            self._core.lost(peer.session, time.monotonic())
            if peer.exports:
                self._exports.end(peer.reader)

    def _forget(self, peer: Peer) -> None:
        del self.peers[peer.session]
        self._by_token.pop(peer.token, None)
        self._doors.discard(peer.door)
        peer.door.shutdown()
        if peer.exports:
            self._exports.take_back(peer.door.undelivered())
        peer.door.close()

    def look_at_bus(self) -> None:
        """See to what has come while something was sent: that consumes ZeroMQ's signal, and a Join could lie unseen."""
        if self._bus_used:
            self._bus_used = False
            if not self._bus_due and self.bus.has_input():
                self._bus_due = True
                self._loop.call_soon(self._bus_ready)

    # What goes out

    def end(self, session: SessionId, reason: str) -> None:
        """End a session."""
        peer = self.peers.get(session)
        if peer is not None:
            logger.info("session of pid %d ends: %s", peer.door.peer.pid, reason)
            self._lose(peer)

    def push(self, session: SessionId, segment_id: SegmentId, segment: Pooled) -> None:
        """Send a segment: the descriptor of its memory on the host, and an export of that on each GPU."""
        incarnation = self._core.incarnation
        if segment.host is not None:
            message = Segment(incarnation=incarnation, segment=segment_id, nbytes=segment.host.nbytes)
            self.send_door(session, encode(message), segment.host.fd)
        peer = self.peers.get(session)
        if peer is None or not segment.devices:
            return
        name = self._core.sessions[session].name
        peer.exports = True
        try:
            for on_device in self._exports.messages(peer.reader, name, incarnation, segment_id, segment.devices):
                self.send_door(session, encode(on_device))
                if self.peers.get(session) is not peer:
                    return
        except (DeviceError, RuntimeError) as error:
            logger.warning("session of pid %d ends: %s", peer.door.peer.pid, error)
            self._core.refuse(session, "device", str(error))
        if any(memory.worn for memory in segment.devices.values()):
            self._core.wear_out(segment_id)

    def send_bus(self, session: SessionId, data: bytes) -> None:
        """Send by the bus. A session that does not read it ends."""
        peer = self.peers.get(session)
        if peer is None:
            return
        self._bus_used = True
        try:
            sent = self.bus.send(peer.token, data)
        except BusyncError as error:  # of this peer alone: the others must get what they were granted
            logger.warning("session of pid %d ends: %s", peer.door.peer.pid, error)
            self._lose(peer)
            return
        if sent is not Sent.SENT:
            reason = "it does not read its bus" if sent is Sent.FULL else "its bus connection ended"
            logger.info("session of pid %d ends: %s", peer.door.peer.pid, reason)
            self._lose(peer)

    def send_door(self, session: SessionId, data: bytes, fd: Any = None) -> None:
        """Send by the door, or keep it for a while. A session that does not read it ends."""
        peer = self.peers.get(session)
        if peer is None:
            return
        try:
            sent = peer.door.send(data, fd)
        except (FdError, OSError) as error:
            logger.warning("session of pid %d ends: %s", peer.door.peer.pid, error)
            self._lose(peer)
            return
        if len(peer.door.outbox) > MAX_WAITING:
            logger.info("session of pid %d ends: it does not read its door", peer.door.peer.pid)
            self._lose(peer)
        elif not sent and not peer.retrying:
            peer.retrying = True
            self._loop.call_later(RETRY, self._flush, peer)

    def _flush(self, peer: Peer) -> None:
        # By the clock and not by writability: too many descriptors in flight leave a socket writable.
        peer.retrying = False
        if self.peers.get(peer.session) is peer and not peer.door.flush():
            peer.retrying = True
            self._loop.call_later(RETRY, self._flush, peer)
