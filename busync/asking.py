"""What the calls of a subscriber wait for: the one Want that serves them all, and what is at hand.

``Asking`` is the base of ``Subscriber``, which opens and closes, and tells it what the session brings.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
import weakref
from collections.abc import Callable
from typing import Generic

from busync import forks
from busync.attachment import Attachment
from busync.errors import BusyncError, ClosedError, PinnedError, UsageError, WaitTimeout
from busync.handles import gpus, unmapping
from busync.holds import Hold
from busync.ids import Incarnation, Version
from busync.options import check_seconds
from busync.protocol import effects as fx
from busync.protocol.subscriber import SubscriberProtocol
from busync.requests import LATEST, Request, S, Waiter
from busync.session import Session
from busync.transport.endpoint import Endpoint

#: Waits until something has arrived, for so many seconds at most (None: for ever).
Pause = Callable[[float | None], None]

HELD_PATIENCE = 1.0  #: seconds that a call waits for versions to be let go of here, before it raises PinnedError
POLL_WINDOW = 0.002  #: seconds that a version which is there gets to arrive, unless poll() is given others


def letting_go() -> bool:
    """Whether leases are about to end, of which the last tensor is gone."""
    return unmapping() or gpus.releasing()


class Asking(forks.ForkAware, Generic[S]):
    """The part of a subscriber that its calls wait in."""

    def __init__(self, endpoint: Endpoint, topic: str, core: SubscriberProtocol, *, prefetch: bool) -> None:
        self.endpoint = endpoint
        self.topic = topic
        self._core = core
        self._prefetch = prefetch
        self._pid = os.getpid()
        self._attachment: Attachment  #: once opened
        self._opened = self._closed = False
        self._final: BusyncError | None = None  #: why there will never be a session again
        self._waiters: list[Waiter[S]] = []
        self._unsaid = False  #: what the waiters want must be said when the door has room
        self._held_timer: asyncio.TimerHandle | None = None
        self._prefetched: S | None = None
        self._handed: tuple[Session, Version] | None = None  #: acknowledged when the next one is asked for
        #: The newest that a caller got. A grant is not enough: whoever waited for it may have been cancelled.
        self._given: tuple[Incarnation | None, Version] = (None, Version(0))
        self._last: fx.Granted | None = None  #: of this session
        self._last_hold: Callable[[], Hold | None] = lambda: None

    def _snapshot(self, granted: fx.Granted, hold: Hold, incarnation: Incarnation) -> S:
        """What callers get."""
        raise NotImplementedError

    @property
    def version(self) -> int:
        """The newest version that the publisher has published, 0 if none: a read of shared memory."""
        session = self._session
        try:
            return session.newest if session is not None else 0
        except ClosedError:  # its loop's thread ends the session at this very moment
            return 0

    @property
    def adopted(self) -> Version:
        """The newest version that was handed out here in the present incarnation, 0 if none."""
        incarnation, version = self._given
        return version if incarnation == self._core.incarnation else Version(0)

    def ensure_here(self) -> None:
        """Check that this is the subscriber's own loop, or its thread while the loop does not run.

        Raises:
            UsageError: it is not. Its sockets and its books are not made for two threads.
        """
        if self._opened:
            running = asyncio._get_running_loop()
            own = self._attachment.loop
            if running is not own and (running is not None or own.is_running()):
                raise UsageError("this subscriber belongs to another event loop or thread", "open one per loop")

    @property
    def _session(self) -> Session | None:
        """For calls that come at any time. What runs after ``_begin`` reads that of ``_attachment``."""
        try:
            return self._attachment.session if self._opened else None
        except AttributeError:  # its loop's thread closes this subscriber at this very moment
            return None

    def _ensure_caller(self) -> None:
        """Check the process and the loop of a call. Plain code has a check of its own, in ``blocking``."""
        forks.ensure_same_process(self._pid, "subscriber")
        self.ensure_here()

    def _begin(self, *, look: bool = True) -> None:
        if self._closed:
            raise ClosedError("subscriber")
        if not self._opened:
            raise UsageError("this subscriber is not open", "use it inside `async with`")
        if look:
            self._attachment.look()
        session = self._attachment.session
        if session is not None:
            session.keep_words()
        if self._final is not None:
            raise self._final

    async def _ask(self, request: Request, timeout: float | None, spent: float = 0.0) -> S:
        """Wait for a request's version; ``spent`` seconds of ``timeout`` have passed already."""
        self._ensure_caller()
        ready = self._look(request, timeout)
        if ready is not None:
            return self._hand_over(ready)
        future: asyncio.Future[S] = self._attachment.loop.create_future()
        waiter = Waiter(request, self._have(request), future)
        self._waiters.append(waiter)
        self._update_demand()
        try:
            patience = timeout if timeout is None else self._patience(timeout, waiter)
            async with asyncio.timeout(None if patience is None else patience - spent):
                snapshot = await future
        except TimeoutError:
            raise self._timed_out(request, timeout) from None
        finally:
            self._remove(waiter)
            # An exception keeps this frame, and a version may have come in the very moment of the cancellation.
            waiter.snapshot = waiter.future = waiter.error = None
            del future
        return self._hand_over(snapshot)

    def _ask_here(self, request: Request, timeout: float | None, pause: Pause) -> S | None:
        """As a coroutine that asks, without the loop; None if there is no session (any more), which only a loop mends.

        Raises: as ``next``.
        """
        ready = self._look(request, timeout)
        if ready is not None:
            return self._hand_over(ready)
        session = self._attachment.session
        if session is None or not self._core.attached:
            return None
        waiter: Waiter[S] = Waiter(request, self._have(request))
        self._wait_here(session, waiter, timeout if timeout is None else self._patience(timeout, waiter), pause)
        if waiter.snapshot is not None:
            return self._hand_over(waiter.snapshot)
        if self._attachment.session is None or not self._core.attached:
            return None
        raise self._timed_out(request, timeout)

    def _poll_here(self, timeout: float, pause: Pause) -> S | None:
        """See ``poll``."""
        self._begin()
        self._ack_handed()
        session = self._session
        if session is None or session.newest <= self.adopted:
            self._attachment.say()
            return None
        ahead = self._take_ahead()
        if ahead is None and self._check_held():
            ahead = self._take_ahead()  # it may have come just now
        if ahead is not None and (ahead.version == session.newest or self._core.taken >= self._core.max_held):
            return self._hand_over(ahead)
        have = max(self.adopted, ahead.version if ahead is not None else Version(0))
        waiter: Waiter[S] = Waiter(None, have)
        self._wait_here(session, waiter, timeout, pause)
        if waiter.snapshot is None and self._session is not session:
            return None  # what was asked for ahead went with its session
        snapshot = waiter.snapshot or ahead
        return self._hand_over(snapshot) if snapshot is not None else None

    def _wait_here(self, session: Session, waiter: Waiter[S], patience: float | None, pause: Pause) -> None:
        """Give turns until the waiter has its version, its time is over, or the session is."""
        attachment, core = self._attachment, self._core
        stop_at = None if patience is None else time.monotonic() + patience
        try:
            self._waiters.append(waiter)
            self._update_demand()
            while waiter.snapshot is None and attachment.session is session:
                left = None if stop_at is None else stop_at - time.monotonic()
                if left is not None and left <= 0:
                    break
                full = core.full  # and one of them ends in a moment, perhaps
                pause(HELD_PATIENCE if full and (left is None or left > HELD_PATIENCE) else left)
                attachment.turn()
                if full and waiter.snapshot is None:
                    self._check_held()
                    self._update_demand()
        finally:
            if waiter.snapshot is None:  # or else it was removed when it got it
                self._remove(waiter)
        if waiter.error is not None:
            raise waiter.error

    def _pause(self, seconds: float | None) -> None:
        self._attachment.pause(seconds)

    def _have(self, request: Request) -> Version:
        """What a newer version answers a request."""
        return self.adopted if request.enough is None else max(Version(request.enough - 1), self._newest_held())

    def _look(self, request: Request, timeout: float | None) -> S | None:
        """What is at hand for a request, after what has arrived was taken in."""
        if timeout is not None:
            check_seconds("timeout", timeout)
        at_hand = self._prefetch or request.enough is not None
        self._begin(look=at_hand or timeout is not None)  # who waits for ever will look
        self._ack_handed()
        ready = None
        if at_hand:
            ready = self._at_hand(request.enough)
        if ready is None and self._check_held():
            ready = self._at_hand(request.enough)  # what was asked for ahead may have come just now
        if ready is not None:
            self._attachment.say()  # or the acknowledgement of the version before would wait for the next Want
        return ready

    def _ack_handed(self) -> None:
        """Acknowledge what was handed out before. It is said together with what is wanted next."""
        if self._handed is not None:
            (session, version), self._handed = self._handed, None
            if session is self._attachment.session:
                self._core.ack(version)

    def _patience(self, timeout: float, waiter: Waiter[S]) -> float:
        """Seconds to wait: a version that is there gets some, or a caller with little time would never get it."""
        return max(timeout, POLL_WINDOW) if self.version > waiter.have else timeout

    def _timed_out(self, request: Request, timeout: float | None) -> WaitTimeout:
        missing = [str(self._attachment.lost_reason)] if self._opened and not self._core.attached else []
        what = f"a version newer than {self.adopted}" if request.enough is None else f"version {request.enough}"
        if request is LATEST:
            what = "a version"
        return WaitTimeout(f"{what} of topic {self.topic!r} from {self.endpoint.directory}", timeout or 0.0, missing)

    def _hand_over(self, snapshot: S) -> S:
        session = self._session  # or none, if this was closed while the caller's coroutine did not run
        if session is not None and snapshot.incarnation == session.incarnation:
            self._handed = (session, snapshot.version)
        if snapshot.incarnation == self._core.incarnation:
            self._given = snapshot.incarnation, max(self.adopted, snapshot.version)
        if self._prefetch:
            self._update_demand()
        return snapshot

    def _newest_held(self) -> Version:
        """The newest version that this process holds, but for the one on the board."""
        session = self._session
        if session is None:
            return Version(0)
        held = [hold.version for hold in session.leases.living() if hold.version < session.newest]
        return max(held, default=Version(0))

    def _at_hand(self, enough: Version | None) -> S | None:
        """What is here already: newer than all that was handed out, or at least ``enough``."""
        least = Version(self.adopted + 1) if enough is None else enough
        return self._take_prefetched(least) or (self._share(enough) if enough is not None else None)

    def _share(self, enough: Version) -> S | None:
        """A snapshot under a lease that this process has already, if that is the newest version."""
        session = self._session
        last = self._last
        if session is None or last is None or last.version != session.newest or last.version < enough:
            return None
        hold = self._last_hold()
        return self._snapshot(last, hold, session.incarnation) if hold is not None else None

    def _take_ahead(self) -> S | None:
        """What was asked for ahead, unless it is not newer than what was handed out."""
        snapshot, self._prefetched = self._prefetched, None
        return snapshot if snapshot is not None and snapshot.version > self.adopted else None

    def _take_prefetched(self, least: Version) -> S | None:
        snapshot, self._prefetched = self._prefetched, None
        if snapshot is None or self._session is None or snapshot.version < max(least, self._session.newest):
            return None  # overtaken, or not what is asked for: its release goes out as it is dropped here
        return snapshot

    def _check_held(self) -> bool:
        """Refuse to wait for what the publisher will not grant, unless what was asked for ahead has come meanwhile.

        Says whether it took in what has arrived.
        """
        session = self._attachment.session
        core = self._core
        if session is None or not core.attached or core.taken < core.max_held or core.held < core.max_held:
            return False
        # A release may have been sent that the books do not know yet. To look at all objects of a process with torch
        # takes 100 ms and more.
        for look in (None, 1, 2):
            if look is not None:
                gc.collect(look)
            self._attachment.turn()
            session.keep_words()
            if core.held < core.max_held or self._prefetched is not None:
                return True
            if letting_go():
                return True  # one of them may be gone in a moment; whoever waits for it is told if it was not
        raise PinnedError(core.max_held, [str(hold) for hold in session.leases.living()])

    def _watch_held(self) -> None:
        """See to it that no call waits without a word because others took the last lease while it waited."""
        if self._waiters and self._held_timer is None:
            self._held_timer = self._attachment.loop.call_later(HELD_PATIENCE, self._look_held)

    def _look_held(self) -> None:
        self._held_timer = None
        session = self._session
        stalled = [waiter for waiter in self._waiters if session is not None and waiter.have < session.newest]
        try:
            if stalled:
                self._check_held()
        except PinnedError as error:
            for waiter in stalled:
                waiter.fail(error)
        self._update_demand()  # which also says what leases are not needed any more

    def _remove(self, waiter: Waiter[S]) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._update_demand()

    def _update_demand(self) -> None:
        """Have the one Want open that serves every waiter, or the prefetch, or nobody."""
        session, core = self._attachment.session, self._core
        if session is None or not core.attached:
            return
        have: Version | None = min([waiter.have for waiter in self._waiters], default=None)
        if have is None and self._prefetch and self._prefetched is None and core.taken < core.max_held:
            have = max(self.adopted, core.adopted)  # what a caller is about to get is not asked for again
        self._unsaid = bool(session.door.outbox)  # the publisher does not read: Wants and Withdraws would pile up
        if self._unsaid:
            self._attachment.flush_later()
        else:
            core.demand(have)
            self._attachment.say()
        if core.full:
            self._watch_held()

    def _granted(self, granted: fx.Granted) -> None:
        session = self._attachment.session
        assert session is not None, "granted without a session"
        hold = session.hold(granted)
        self._last, self._last_hold = granted, weakref.ref(hold)
        taken = False
        for waiter in self._waiters[:]:
            if waiter.have < granted.version:
                self._waiters.remove(waiter)
                waiter.give(self._snapshot(granted, hold, session.incarnation))
                taken = True
        if not taken and self._prefetch:
            self._prefetched = self._snapshot(granted, hold, session.incarnation)
        if self._waiters or self._prefetch:
            self._update_demand()
