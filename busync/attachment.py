"""Keeping a subscriber attached: one session after another, on the caller's loop."""

from __future__ import annotations

import asyncio
import logging
import os
import select
from contextlib import suppress
from typing import Protocol

from busync import forks
from busync.calls import settle
from busync.errors import BusyncError, EndpointError, ProtocolError, PublisherLost
from busync.protocol.effects import SubscriberEffect
from busync.protocol.subscriber import SubscriberProtocol
from busync.session import Session, SessionEnded
from busync.transport.endpoint import Endpoint

logger = logging.getLogger("busync")

FIRST_BACKOFF, LAST_BACKOFF = 0.02, 1.0  #: seconds between attempts to attach
ATTACH_TIMEOUT = 5.0  #: seconds that one attempt may take
LONGEST_PAUSE = 3600.0  #: seconds; poll(2) takes no more than 24 days
RETRY = 0.005  #: seconds until packets that found no room are tried again


def _without_frames(error: BusyncError) -> BusyncError:
    """The error, to be kept: its traceback leads to the frames of callers, and to the versions in their variables."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


class AttachmentOwner(Protocol):
    """Who is told what happens."""

    def handle(self, events: list[SubscriberEffect]) -> None:
        """Events of the session. A BusyncError that this raises ends the session."""

    def session_ended(self, error: BusyncError) -> None:
        """The session is over."""


class Attachment:
    """Opens sessions, watches their descriptors, and opens the next one when one ends, for ever."""

    def __init__(
        self, endpoint: Endpoint, core: SubscriberProtocol, owner: AttachmentOwner, device: str | None = None
    ) -> None:
        self.session: Session | None = None
        self.lost_reason: BusyncError = PublisherLost(endpoint.directory, "not connected yet")
        self.loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._core = core
        self._owner = owner
        self._device = device
        self._changed = asyncio.Event()
        self._watched: list[int] = []
        self._poll = select.poll()  #: the same descriptors, for whoever waits without the loop
        self._torn = False  #: inside a turn; if it is when a turn begins, a signal's handler has raised in the last one
        self._ready: list[tuple[int, int]] | None = None  #: what a pause has seen, for the turn after it
        self._packet: list[tuple[int, int]] = []  #: what is seen when there is a packet at the door, and nothing else
        self._due = False  #: input is left that nothing will signal
        self._scheduled = self._retrying = False  #: the loop will give a turn: for input that is left, for output
        self._keeper = self.loop.create_task(self._keep(), name=f"busync-{core.name}")
        self._keeper.add_done_callback(self._keeper_ended)

    async def close(self, error: BusyncError) -> bool:
        """End the session with ``error``, and open none any more; says whether the caller was cancelled meanwhile."""
        self.end(error)
        self._keeper.cancel()
        cancelled = await settle(self._keeper)
        del self._keeper  # the traceback of its cancellation refers to this object
        return cancelled

    async def wait_change(self) -> None:
        """Wait until a session is attached or has ended."""
        self._changed.clear()
        await self._changed.wait()

    def turn(self) -> None:
        """Handle what has arrived, without waiting. Less work if the pause before it has seen that there is little."""
        session = self.session
        if session is None:
            return
        # Before it is attached, a session connects its bus and sends Join, which may consume ZeroMQ's signal.
        one_packet = self._ready == self._packet and self._core.attached and not self._due
        self._ready = None
        self._due = False
        torn, self._torn = self._torn, True
        events: list[SubscriberEffect] = []
        try:
            if torn:
                raise SessionEnded("a signal's handler raised while a message was handled here")
            try:
                session.turn(events, one_packet=one_packet)
            finally:  # the last version, or a refusal, arrives together with the end
                self._owner.handle(events)
        except BusyncError as error:
            self.end(error)
        self._torn = False
        if self.session is not session:
            return
        if len(self._watched) == 1:
            self._watch(session)
        if session.more:
            self._due = True
            if not self._scheduled:
                self._scheduled = True
                self.loop.call_soon(self._next_turn)
        if session.door.outbox:
            self.flush_later()

    def look(self) -> None:
        """As ``turn``, and much less work when nothing has arrived."""
        session = self.session
        self._ready = None  # a pause that was interrupted is long over
        if session is None:
            return
        if self._due or self._torn or session.door.outbox or self._poll.poll(0):
            self.turn()

    def say(self) -> None:
        """Say what the core has to say, without waiting for the next turn."""
        session = self.session
        if session is not None and self._core.speaks:
            torn, self._torn = self._torn, True
            events: list[SubscriberEffect] = []
            session.say(events)
            if events:
                self._owner.handle(events)
            if session.door.outbox:
                self.flush_later()
            self._torn = torn

    def pause(self, seconds: float | None) -> None:
        """Wait without the loop until something has arrived, at most so long. Takes nothing in; call ``turn`` then."""
        self._ready = None
        if self._due or self._torn:
            return
        if self.session is not None and self.session.door.outbox:
            seconds = RETRY if seconds is None else min(seconds, RETRY)
        self._ready = self._poll.poll(None if seconds is None else min(seconds, LONGEST_PAUSE) * 1000)

    def _next_turn(self) -> None:
        self._scheduled = False
        self.turn()

    def flush_later(self) -> None:
        """Give a turn soon: something waits for room at the door."""
        if not self._retrying:
            self._retrying = True
            self.loop.call_later(RETRY, self._flush)

    def _flush(self) -> None:
        self._retrying = False
        self.turn()

    def note_attached(self) -> None:
        """The publisher counts the session."""
        self._changed.set()

    def fds(self) -> list[int]:
        """What to watch for input."""
        session = self.session
        if session is None:
            return []
        fds = [session.door.fileno()]
        if session.bus is not None:
            fds += [session.bus.fileno(), session.bus.monitor_fileno()]
        return fds

    def end(self, error: BusyncError) -> None:
        """The session is over; the keeper starts the next one."""
        session = self.session
        if session is None:
            return
        self._changed.set()  # first: whatever strikes meanwhile, the keeper looks again
        self.session = None
        self._unwatch()
        session.close()
        if isinstance(error.__cause__, ProtocolError):
            # As text: whoever keeps the record must not keep the session that the traceback refers to.
            reason = str(error.__cause__)
            logger.warning("the session with the publisher at %s ended: %s", self._endpoint.directory, reason)
        if isinstance(error, SessionEnded):
            error = PublisherLost(self._endpoint.directory, error.text)
        self.lost_reason = _without_frames(error)
        self._owner.session_ended(error)
        self._changed.set()

    async def _keep(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            try:
                session = self._open()
            except OSError as error:
                reason = "nobody is there" if isinstance(error, (FileNotFoundError, ConnectionRefusedError)) else error
                self.lost_reason = PublisherLost(self._endpoint.directory, str(reason))
            except BusyncError as error:
                self.lost_reason = _without_frames(error)
            else:
                opened_at = self.loop.time()
                late = self.loop.call_later(ATTACH_TIMEOUT, self._check_attached, session)
                try:
                    self.turn()
                    while self.session is session:
                        await self.wait_change()
                finally:
                    late.cancel()
                if self.loop.time() - opened_at > backoff:  # or else it breaks again and again
                    backoff = FIRST_BACKOFF
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF)

    def _open(self) -> Session:
        """A new session. Nobody but the publisher's own user may be at the other end of a bare name."""
        self._endpoint.check_client()
        with forks.fork_lock:
            session = Session(self._endpoint, self._core, self._device)
        uid = session.door.peer.uid
        if self._endpoint.runtime is not None and uid not in (os.geteuid(), 0):
            session.close()
            raise EndpointError(self._endpoint.text, f"it is served by user {uid}", "name the path if you trust them")
        self._unwatch()  # if the end of the last one was struck
        self.session = session
        self._watch(session)
        return session

    def _unwatch(self) -> None:
        while self._watched:
            fd = self._watched.pop()
            self.loop.remove_reader(fd)
            with suppress(KeyError):
                self._poll.unregister(fd)

    def _watch(self, session: Session) -> None:
        door = session.door.fileno()
        self._packet = [(door, select.POLLIN)]
        for fd in self.fds():
            if fd not in self._watched:
                self.loop.add_reader(fd, self.turn)
                self._poll.register(fd, select.POLLIN)
                self._watched.append(fd)

    def _check_attached(self, session: Session) -> None:
        if self.session is session and not self._core.attached:
            self.end(PublisherLost(self._endpoint.directory, f"it did not answer within {ATTACH_TIMEOUT:g} s"))

    def _keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None:  # a fault of busync's own: nobody must wait for ever over it
            logger.error("a subscriber broke", exc_info=error)
            self._owner.session_ended(
                BusyncError(f"this subscriber broke: {error!r}", "report this, and open a new one")
            )
