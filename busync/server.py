"""The publisher's own thread: its loop, its sockets, its memory.

The thread lets readers be admitted, granted and released while the learner is inside a long torch call.
Everything in ``Server`` but ``start``, ``call`` and ``ask_to_stop`` runs on it. It owns the endpoint, the sockets,
the board, the segments and the copy workers, until ``ended``.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from busync import forks
from busync.calls import Call, Outcome, start_job
from busync.errors import BusyncError, ClosedError, DecodeError, DeviceError, FdError, ProtocolError
from busync.exports import Exports
from busync.fds import fd_budget, raise_fd_limit
from busync.handles import Planner, Reader, TensorBuilder, content_digest, gpus
from busync.ids import SegmentId, SessionId, Version, new_incarnation, new_token
from busync.manifest import Manifest
from busync.options import PublisherOptions
from busync.pool import Pool, Pooled
from busync.protocol import effects as fx
from busync.protocol.publisher import PublisherProtocol
from busync.transport.board import Board
from busync.transport.bus import RouterBus, Sent
from busync.transport.door import DoorConnection, DoorListener
from busync.transport.endpoint import Claim, Endpoint
from busync.wire import (
    MAX_PACKET_BYTES,
    Segment,
    Welcome,
    decode_bus_up,
    decode_door_up,
    encode,
    manifest_parts,
)

logger = logging.getLogger("busync")
T = TypeVar("T")

STOP_TIMEOUT = 10.0  #: seconds that the end of the program waits for a publisher that was left open
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


@dataclass(slots=True, eq=False)
class Layout:
    """A manifest, and its parts as they are sent."""

    manifest: Manifest
    parts: list[bytes]


class Server(forks.ForkAware):
    """One publisher's thread. ``start`` before anything else, ``ask_to_stop`` at the end."""

    def __init__(self, endpoint: Endpoint, options: PublisherOptions) -> None:
        raise_fd_limit()
        self.endpoint = endpoint
        self.options = options
        self.core = PublisherProtocol(options, new_incarnation())
        self.pool = Pool()
        self.workers = ThreadPoolExecutor(options.copy_threads, thread_name_prefix="busync-copy")
        #: Apart from the workers, so that no publish waits for the digest of the version before.
        self._digester = ThreadPoolExecutor(1, thread_name_prefix="busync-digest")
        self.layouts: dict[bytes, Layout] = {}
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._exports = Exports(self.loop, self.workers, self.core.counters)
        self.pid = os.getpid()
        self.claim: Claim | None = None
        self.listener: DoorListener | None = None
        self.bus: RouterBus | None = None
        self.board: Board | None = None
        self._peers: dict[SessionId, Peer] = {}
        self._by_token: dict[bytes, Peer] = {}
        self._by_fd: dict[int, Peer] = {}
        self._doors: select.epoll | None = None  #: all of them: the loop is told once for as many as are ready
        self._locks: dict[str, asyncio.Lock] = {}
        self._planners: dict[str, Planner] = {}
        self.quiet_until = 0.0  #: no complaint about waiting before then
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._calls: deque[Call[Any]] = deque()  #: not yet started
        self._ending = False
        self._bus_due = False  #: _bus_ready will be called
        self._bus_used = False  #: since the last look whether something has arrived
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.ready: Outcome[None] = Outcome()
        self.ended: Outcome[None] = Outcome()
        self._stop_asked = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="busync-publisher", daemon=True)

    # Any thread

    def start(self) -> None:
        """Start the thread. ``ready`` tells when it serves, or why not: EndpointError, FdError, AllocationError."""
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread left
            self.loop.close()
            self.ended.set_result(None)
            raise
        forks.register(self)
        _running.add(self)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> Call[T]:
        """A coroutine for the thread, which runs it once somebody waits for it."""
        return Call(self.loop, coroutine, "publisher", self._take_over)

    def _take_over(self, call: Call[Any]) -> None:
        self._calls.append(call)  # first: whatever is in here is started or refused, whenever the thread ends
        try:
            self.loop.call_soon_threadsafe(self._start_calls)
        except RuntimeError:  # the loop is closed
            self._refuse_calls()

    def ask_to_stop(self) -> None:
        """End every session, give everything back, end the thread. ``ended`` tells when. May be called again."""
        if os.getpid() == self.pid:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self.loop.call_soon_threadsafe(self._stop_asked.set)

    # The thread

    def _start_calls(self) -> None:
        if not self._ending:
            for call in _take(self._calls):
                call.start()

    def _refuse_calls(self) -> None:
        for call in _take(self._calls):
            call.refuse()

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._main())
        finally:
            self.loop.close()
            self._refuse_calls()
            forks.unregister(self)
            self.ended.set_result(None)

    async def _main(self) -> None:
        try:
            self._open()
        except BaseException as error:
            self.ready.set_exception(error)
        else:
            self.ready.set_result(None)
            await self._stop_asked.wait()
        self._ending = True
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # one that ends may start another
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._close()

    def _open(self) -> None:
        self.claim = self.endpoint.claim(self.options.allow_uids)
        self.board = Board(self.core.incarnation)
        self.bus = RouterBus(self.endpoint.bus_path)
        self.listener = DoorListener(self.endpoint.door_path)
        self.claim.open_sockets()
        self._doors = select.epoll()
        self.loop.add_reader(self._doors.fileno(), self._doors_ready)
        self.loop.add_reader(self.bus.fileno(), self._bus_ready)
        self.loop.add_reader(self.listener.fileno(), self._accept)

    def _close(self) -> None:
        """Give back whatever was opened; the claim last, so that nobody comes in between."""
        for peer in list(self._peers.values()):
            self._forget(peer)
        if self.listener is not None:
            self.loop.remove_reader(self.listener.fileno())
            self.listener.close()
        if self.bus is not None:
            self.loop.remove_reader(self.bus.fileno())
            self.bus.close()
        if self._doors is not None:
            self.loop.remove_reader(self._doors.fileno())
            self._doors.close()
        if self.board is not None:
            self.board.close()
        self.workers.shutdown(wait=True)
        self._digester.shutdown(wait=True)
        self.pool.close()
        self._exports.tidy()
        if self.claim is not None:
            self.claim.release()
        if self._timer is not None:
            self._timer.cancel()

    # Sessions

    def _accept(self) -> None:
        assert self.listener is not None, "accepted before opened"
        assert self._doors is not None, "accepted before opened"
        for _ in range(ACCEPTS_PER_TURN):
            try:
                door = self.listener.accept()
            except FdError as error:
                logger.warning("%s", error)
                break
            if door is None:
                break
            token = new_token()
            session = self.core.connected(door.peer.pid, door.peer.uid, token, time.monotonic())
            peer = self._peers[session] = Peer(session, door, token, Reader.of(door.peer.pid, session=session))
            if door.peer.uid != os.geteuid() and door.peer.uid not in self.options.allow_uids:
                self.core.refuse(session, "uid", f"user {door.peer.uid} may not subscribe (allow_uids)")
            elif fd_budget() < SPARE_DESCRIPTORS:
                text = "the publisher has no descriptors left: raise its limit on open files (ulimit -n)"
                self.core.refuse(session, "descriptors", text)
            else:
                self._by_token[token] = peer
                self._by_fd[door.fileno()] = peer
                self._doors.register(door.fileno(), select.EPOLLIN)
        self.carry_out()

    def _doors_ready(self) -> None:
        """Take one packet from each door that has one. Whoever has sent more, or has gone, is ready again."""
        assert self._doors is not None, "received before opened"
        for fd, _ in self._doors.poll(0, DOORS_PER_TURN):
            self._receive(self._by_fd[fd])
        self.carry_out()

    def _receive(self, peer: Peer) -> None:
        try:
            packet = peer.door.receive()
            if packet is not None:
                for fd in packet.fds:
                    fd.close()
                self.core.receive(peer.session, decode_door_up(packet.data), time.monotonic())
        except EOFError:
            self._lose(peer)
        except FdError as error:  # a peer sent descriptors, which are never wanted
            self._break(peer, str(error))
        except ProtocolError as error:
            self._break(peer, str(error))

    def _bus_ready(self) -> None:
        assert self.bus is not None, "received before opened"
        self._bus_due = False
        self._bus_used = True
        for _ in range(MESSAGES_PER_TURN):
            received = self.bus.receive()
            if received is None:
                break
            token, data = received
            peer = self._by_token.get(token)
            if peer is None:
                self.core.counters["strangers on the bus"] += 1
                continue
            try:
                decode_bus_up(data)
            except DecodeError as error:
                self._break(peer, str(error))
            else:
                self.core.joined(peer.session, time.monotonic())
        self.carry_out()

    def _break(self, peer: Peer, reason: str) -> None:
        """A peer did what it must not. What it still says on the bus is a stranger's."""
        logger.warning("session of pid %d ended: %s", peer.door.peer.pid, reason)
        self._by_token.pop(peer.token, None)
        if peer.session in self._peers:
            self.core.refuse(peer.session, "protocol", reason[:1000])

    def _lose(self, peer: Peer) -> None:
        if self._peers.get(peer.session) is peer:
            self._forget(peer)
            self.core.lost(peer.session, time.monotonic())
            if peer.exports:
                self._exports.end(peer.reader)

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.session]
        self._by_token.pop(peer.token, None)
        assert self._doors is not None, "forgotten before opened"
        if self._by_fd.pop(peer.door.fileno(), None) is not None:
            self._doors.unregister(peer.door.fileno())
        peer.door.shutdown()
        if peer.exports:
            self._exports.take_back(peer.door.undelivered())
        peer.door.close()

    # Effects

    def carry_out(self) -> None:
        """Do what the core decided, until it has nothing left to do."""
        while effects := self.core.take_effects():
            for effect in effects:
                self._carry_out_one(effect)
        if self._bus_used:  # which consumes ZeroMQ's signal: without this look a Join could lie there unseen
            self._bus_used = False
            if not self._bus_due and self.bus is not None and self.bus.has_input():
                self._bus_due = True
                self.loop.call_soon(self._bus_ready)
        self._arm_timer()

    def _carry_out_one(self, effect: fx.PublisherEffect) -> None:
        assert self.board is not None, "acted before opened"
        match effect:
            case fx.SendDoor(session, message):
                data = encode(message)
                if len(data) > MAX_PACKET_BYTES:  # an Announce with large values
                    self._send_bus(session, data)
                else:
                    self._send_door(session, data, self.board.fd if isinstance(message, Welcome) else None)
            case fx.SendBus(session, message):
                self._send_bus(session, encode(message))
            case fx.SendManifest(session, digest):
                for part in self.layouts[digest].parts:
                    self._send_bus(session, part)
            case fx.PushSegment(session, segment_id):
                self._push(session, segment_id)
            case fx.WriteBoard(slot, version):
                self.board.write(slot, version)
            case fx.Reserved(reservation=key) | fx.WaitDone(wait=key):
                answer = self._answers.pop(key, None)
                if answer is not None and not answer.done():
                    answer.set_result(effect)
            case fx.DropSegment(segment_id):
                if self.pool.drop(segment_id):
                    self._exports.reap_soon()
            case fx.DropLayout(digest):
                self.layouts.pop(digest, None)
            case fx.ComputeDigest(segment=segment_id):
                # Taken now: when the task begins, a publish may have had the segment dropped, though not overwritten.
                manifest = self.layouts[effect.layout].manifest
                segment = self.pool.get(segment_id) if segment_id else Pooled()
                self.loop.create_task(self._compute_digest(effect, segment.builder(manifest)))
            case fx.EndSession(session, reason):
                peer = self._peers.get(session)
                if peer is not None:
                    logger.info("session of pid %d ends: %s", peer.door.peer.pid, reason)
                    self._lose(peer)

    def _push(self, session: SessionId, segment_id: SegmentId) -> None:
        """Send a segment: the descriptor of its memory on the host, and an export of that on each GPU."""
        segment, incarnation = self.pool.get(segment_id), self.core.incarnation
        if segment.host is not None:
            message = Segment(incarnation=incarnation, segment=segment_id, nbytes=segment.host.nbytes)
            self._send_door(session, encode(message), segment.host.fd)
        peer = self._peers.get(session)
        if peer is None or not segment.devices:
            return
        name = self.core.sessions[session].name
        peer.exports = True
        try:
            for on_device in self._exports.messages(peer.reader, name, incarnation, segment_id, segment.devices):
                self._send_door(session, encode(on_device))
                if self._peers.get(session) is not peer:
                    return
        except (DeviceError, RuntimeError) as error:
            logger.warning("session of pid %d ends: %s", peer.door.peer.pid, error)
            self.core.refuse(session, "device", str(error))
        if any(memory.worn for memory in segment.devices.values()):
            self.core.wear_out(segment_id)

    def _send_bus(self, session: SessionId, data: bytes) -> None:
        peer = self._peers.get(session)
        assert self.bus is not None, "sent before opened"
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

    def _send_door(self, session: SessionId, data: bytes, fd: Any = None) -> None:
        peer = self._peers.get(session)
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
            self.loop.call_later(RETRY, self._flush, peer)

    def _flush(self, peer: Peer) -> None:
        # By the clock and not by writability: too many descriptors in flight leave a socket writable.
        peer.retrying = False
        if self._peers.get(peer.session) is peer and not peer.door.flush():
            peer.retrying = True
            self.loop.call_later(RETRY, self._flush, peer)

    def _arm_timer(self) -> None:
        deadline_at = self.core.deadline()
        if deadline_at is None or (self._timer is not None and self._timer_at <= deadline_at):
            return  # a timer that comes too early does no harm, and costs less than to set one each time
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline_at
        self._timer = self.loop.call_later(max(0.0, deadline_at - time.monotonic()), self._time_passes)

    def _time_passes(self) -> None:
        self._timer = None
        self.core.handle_timer(time.monotonic())
        self.carry_out()

    def planner(self, topic: str) -> Planner:
        """Plans what is published on a topic, under its lock."""
        planner = self._planners.get(topic)
        if planner is None:
            planner = self._planners[topic] = Planner()
        return planner

    def lock(self, topic: str) -> asyncio.Lock:
        """What keeps the publishes of one topic in order."""
        return self._locks.setdefault(topic, asyncio.Lock())

    async def answer(self, key: int) -> Any:
        """Wait for the effect that answers a reservation or a wait."""
        future = self._answers[key] = self.loop.create_future()
        try:
            self.carry_out()
            return await future
        finally:
            self._answers.pop(key, None)

    async def _compute_digest(self, effect: fx.ComputeDigest, builder: TensorBuilder) -> None:
        def compute() -> bytes:
            return content_digest({spec.name: builder.build(spec) for spec in builder.manifest.tensors})

        digest: bytes | None = None
        try:
            digest = await start_job(self.loop, self._digester, compute)
        except ClosedError:
            pass  # the interpreter ends
        except (BusyncError, RuntimeError):  # of torch, when a GPU has failed
            logger.exception("the digest of version %d could not be computed", effect.version)
        finally:
            self.core.digest_done(effect.topic, Version(effect.version), digest, time.monotonic())
            self.carry_out()

    # What goes on outside

    def encode_layout(self, manifest: Manifest) -> Layout:
        """A manifest with its parts encoded. Takes about 1 ms per 1,000 tensors; safe on any thread."""
        return Layout(manifest, [encode(part) for part in manifest_parts(manifest, self.core.incarnation)])

    def status(self) -> dict[str, Any]:
        """See ``Publisher.status``."""
        if self.bus is not None:
            self.core.counters["malformed on the bus"] = self.bus.malformed
        return {
            "endpoint": self.endpoint.directory,
            "incarnation": self.core.incarnation,
            "exports": len(gpus.exporter().outstanding()),
            **self.core.status(),
        }

    def after_fork_in_child(self) -> None:
        """The thread is not here. Its loop must never be collected: that would touch the parent's epoll."""
        forks.immortal(self.loop)
        if self._doors is not None:
            self._doors.close()  # a copy, of which nothing is taken out: what is in it is the parent's


def _take(calls: deque[Call[Any]]) -> Iterator[Call[Any]]:
    """Take out one after the other; each goes to one taker, whatever other threads do."""
    with contextlib.suppress(IndexError):
        while True:
            yield calls.popleft()


_running: weakref.WeakSet[Server] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop what a program left open, while threads and imports still work."""
    for server in list(_running):
        server.ask_to_stop()
        if os.getpid() == server.pid:
            server.ended.block(STOP_TIMEOUT)


def ensure_usable(server: Server | None, what: str) -> Server:
    """The server, if it can be used from here.

    Raises:
        ForkedError: it belongs to the parent process.
        ClosedError: it is closed, or was never opened.
    """
    if server is None:
        raise ClosedError(what)
    forks.ensure_same_process(server.pid, what)
    return server
