"""One connection of a subscriber to a publisher, driven by non-blocking turns.

Here the core, the door, the bus, the board and the memory of one session meet; no event loop is known here. The session
owns its sockets, its board and the segments that it was sent; see ``holds`` for those, and for the leases.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from busync import forks
from busync.errors import BusyncError, FdError, ProtocolError, ViolationError
from busync.fds import OwnedFd
from busync.handles import (
    ReceivedSegment,
    check_segment,
    decode_handle,
    gpus,
)
from busync.holds import AttachedSegment, Hold, Leases
from busync.ids import Incarnation, LeaseId, SegmentId, Version
from busync.protocol import effects as fx
from busync.protocol.subscriber import SubscriberProtocol
from busync.transport.board import BoardView
from busync.transport.bus import DealerBus
from busync.transport.door import door_connect
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
        self.leases = Leases(self.door)
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
        return Hold(self, granted.lease, granted.version, granted.manifest, segment)

    def turn(self, events: list[fx.SubscriberEffect], *, one_packet: bool = False) -> None:
        """Handle what has arrived, at most TURN seconds of it, and say what the core wants to say.

        ``one_packet``: there is one at the door, and nothing else need be looked at. Whoever says so looks again.

        The effects that concern the application are appended to ``events``, also when the session ends: a refusal, or
        the last version, arrives together with the end of the connection.

        Raises:
            SessionEnded: the publisher has gone, or broke the protocol, or a descriptor could not be taken.
        """
        try:
            if self.leases.ended or self.leases.spare:
                self.strike_ended()
            if self.door.outbox:
                self.door.flush()
            if one_packet:
                self._receive_packet(events)
                return
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
        ended, spare = self.leases.ended, self.leases.spare
        while ended:
            self._struck(ended.popleft())
        while spare:
            self.core.spared(spare.popleft())

    def _struck(self, lease: LeaseId) -> None:
        self.leases.forget(lease)
        self.core.ended(lease)

    def keep_words(self) -> None:
        """Say Release for leases whose last user is gone without a word: Ctrl-C may strike inside a finalizer."""
        if self.leases.ended or self.leases.spare:
            self.strike_ended()
        if not self.core.taken:
            return
        kept = {lease for lease, word in list(self.leases.words.items()) if word() is not None}
        for lease in self.core.without_hold(kept):
            self.door.send(encode(Release(lease=lease)))
            self._struck(lease)

    def _receive(self, events: list[fx.SubscriberEffect]) -> None:
        """Handle what has arrived. The bus comes last: nothing lies there afterwards, unless there is ``more``."""
        stop_at = 0.0
        door = True
        while True:
            door = door and self._receive_packet(events)
            data = self.bus.receive() if self.bus is not None else None
            if data is not None:
                self.core.receive_bus(decode_bus_down(data))
                self.say(events)
            self.more = False
            if not door and data is None:
                return
            now = time.monotonic()
            stop_at = stop_at or now + TURN
            if now > stop_at:
                self.more = True
                return

    def _receive_packet(self, events: list[fx.SubscriberEffect]) -> bool:
        packet = self.door.receive()
        if packet is None:
            return False
        self._fd = packet.fds[0] if packet.fds else None
        self.core.receive_door(decode_door_down(packet.data))
        self.say(events)
        return True

    def say(self, events: list[fx.SubscriberEffect]) -> None:
        """Carry out the core's effects; those that concern the application are appended to ``events``."""
        for effect in self.core.take_effects():  # first what comes with every version, without a pattern's steps
            if isinstance(effect, fx.ToDoor):
                message = effect.message
                self.door.send(encode(message))
                if isinstance(message, Want) and message.released:
                    self.leases.note_said(message.released)
            elif isinstance(effect, fx.Granted):
                events.append(effect)
            else:
                self._carry_out(effect, events)

    def _carry_out(self, effect: fx.SubscriberEffect, events: list[fx.SubscriberEffect]) -> None:
        match effect:
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
        for segment in self.segments.values():  # first: what the publisher counts has ended when it hears of the end
            segment.close()
        self.segments.clear()
        self.door.shutdown()
        self._give_back_unread()
        if self.bus is not None:
            self.bus.close()
        if self.board is not None:
            self.board.close()
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
        mapped = tuple(self.leases.mapped)
        if mapped:  # straight to the door: the core belongs to the loop's thread, and this may be another
            self.door.send(encode(Abandon(leases=mapped)))

    def after_fork_in_child(self) -> None:
        """Close what would keep the parent's memory alive; the sockets look after themselves."""
        kept = {hold.segment for hold in self.leases.living() if hold.segment is not None}
        for segment in kept | set(self.segments.values()):
            segment.after_fork_in_child()
