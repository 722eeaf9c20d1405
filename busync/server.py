"""The publisher's own thread: its loop, the calls into it, its memory.

The thread lets readers be admitted, granted and released while the learner is inside a long torch call.
Everything in ``Server`` but ``start``, ``call`` and ``ask_to_stop`` runs on it. It owns the endpoint, the connections
(``links``), the board, the segments and the copy workers, until ``ended``.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from busync import forks
from busync.calls import Call, Outcome, start_job
from busync.errors import BusyncError, ClosedError
from busync.exports import Exports
from busync.fds import raise_fd_limit
from busync.handles import Planner, TensorBuilder, content_digest, gpus
from busync.ids import Version, new_incarnation
from busync.links import Links
from busync.manifest import Manifest
from busync.options import PublisherOptions
from busync.pool import Pool, Pooled
from busync.protocol import effects as fx
from busync.protocol.publisher import PublisherProtocol
from busync.transport.board import Board
from busync.transport.endpoint import Claim, Endpoint
from busync.wire import MAX_PACKET_BYTES, Welcome, encode, manifest_parts

logger = logging.getLogger("busync")
T = TypeVar("T")

STOP_TIMEOUT = 10.0  #: seconds that the end of the program waits for a publisher that was left open


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
        self.links: Links | None = None
        self.board: Board | None = None
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._planners: dict[str, Planner] = {}
        self.quiet_until = 0.0  #: no complaint about waiting before then
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._calls: deque[Call[Any]] = deque()  #: not yet started
        self._ending = False
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
        self.links = Links(self.endpoint, self.core, self.options, self._exports, self.loop, self.carry_out)
        self.claim.open_sockets()

    def _close(self) -> None:
        """Give back whatever was opened; the claim last, so that nobody comes in between."""
        if self.links is not None:
            self.links.close()
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

    # Effects

    def carry_out(self) -> None:
        """Do what the core decided, until it has nothing left to do."""
        links = self.links
        assert links is not None, "acted before opened"
        while effects := self.core.take_effects():
            for effect in effects:
                self._carry_out_one(effect)
        links.look_at_bus()
        self._arm_timer()

    def _carry_out_one(self, effect: fx.PublisherEffect) -> None:
        links, board = self.links, self.board
        assert links is not None, "acted before opened"
        assert board is not None, "acted before opened"
        match effect:
            case fx.SendDoor(session, message):
                data = encode(message)
                if len(data) > MAX_PACKET_BYTES:  # an Announce with large values
                    links.send_bus(session, data)
                else:
                    links.send_door(session, data, board.fd if isinstance(message, Welcome) else None)
            case fx.SendBus(session, message):
                links.send_bus(session, encode(message))
            case fx.SendManifest(session, digest):
                for part in self.layouts[digest].parts:
                    links.send_bus(session, part)
            case fx.PushSegment(session, segment_id):
                links.push(session, segment_id, self.pool.get(segment_id))
            case fx.WriteBoard(slot, version):
                board.write(slot, version)
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
                links.end(session, reason)

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
        return self._locks[topic]

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
        if self.links is not None:
            self.core.counters["malformed on the bus"] = self.links.bus.malformed
        return {
            "endpoint": self.endpoint.directory,
            "incarnation": self.core.incarnation,
            "exports": len(gpus.exporter().outstanding()),
            **self.core.status(),
        }

    def after_fork_in_child(self) -> None:
        """The thread is not here. Its loop must never be collected: that would touch the parent's epoll."""
        forks.immortal(self.loop)


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
