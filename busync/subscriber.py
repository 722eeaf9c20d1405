"""Subscriber: the asyncio shell around one session after another. It runs on the caller's loop and has no thread."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from busync import forks
from busync.attachment import Attachment
from busync.calls import settle, start_job
from busync.errors import (
    BusyncError,
    ClosedError,
    OptionError,
    PinnedError,
    PublisherLost,
    RefusedError,
    UsageError,
    WaitTimeout,
)
from busync.handles import gpus, unmapping
from busync.ids import DEFAULT_TOPIC, Incarnation, Version
from busync.options import SubscriberOptions, check_seconds
from busync.protocol import effects as fx
from busync.protocol.subscriber import SubscriberProtocol, make_nack
from busync.session import Hold, Session
from busync.snapshot import Snapshot
from busync.transport.endpoint import Endpoint
from busync.wire import NackCode, encode

if TYPE_CHECKING:
    import torch

#: Waits until something has arrived, for so many seconds at most (None: for ever).
Pause = Callable[[float | None], None]

HELD_PATIENCE = 1.0  #: seconds that a call waits for versions to be let go of here, before it raises PinnedError
UNMAP_PATIENCE = 0.5  #: seconds that the end waits for large versions to be unmapped, and their leases to end
POLL_WINDOW = 0.002  #: seconds that a version which is there gets to arrive, unless poll() is given others
#: Refusals that trying again cannot change.
FINAL_REFUSALS = frozenset({"uid", "wire-version", "topics"})


@dataclass(frozen=True, slots=True)
class Request:
    """What a call asks for: a version newer than all that were handed out, or one that is ``enough``."""

    enough: Version | None = None  #: a version that was handed out before will do if it is at least this


NEXT, LATEST = Request(), Request(Version(1))


def request_version(version: int) -> Request:
    """A request for ``version`` or a later one.

    Raises:
        OptionError: ``version`` is not a whole number of at least 1.
    """
    if type(version) is not int or version < 1:
        raise OptionError("version", version, "a whole number, 1 or more")
    return Request(Version(version))


def _letting_go() -> bool:
    """Whether leases are about to end, of which the last tensor is gone."""
    return unmapping() or gpus.releasing()


class _Waiter:
    """A call that waits for a version newer than ``have``: a coroutine, or plain code that gives turns itself."""

    def __init__(self, evaluate: Callable[[], Version], future: asyncio.Future[Snapshot] | None = None) -> None:
        self.evaluate = evaluate  #: depends on the session
        self.have = evaluate()
        self.future = future
        self.snapshot: Snapshot | None = None
        self.error: BusyncError | None = None

    def give(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        if self.future is not None and not self.future.done():
            self.future.set_result(snapshot)

    def fail(self, error: BusyncError) -> None:
        self.error = error
        if self.future is not None and not self.future.done():
            self.future.set_exception(error)


class Subscriber(forks.ForkAware):
    """Receives the versions of one topic.

    ``async with`` waits until the publisher counts this subscriber. ``async for`` gives the newest version, then each
    time a newer one; versions that were overtaken are skipped, and never does an older one follow a newer. When the
    publisher goes away, a subscriber keeps what it holds and reconnects for ever; the first version of a restarted
    publisher is adopted whatever its number (``snapshot.incarnation`` tells them apart).

    It belongs to the loop on which it was opened. It needs no thread: nothing happens on its behalf while the loop is
    busy, and every call first looks at what has arrived.

    Args:
        endpoint: the publisher's bare name, ``ipc://PATH`` or a path.
        topic: the stream of versions to follow.
        name: how the publisher's reports call this subscriber; "pid-PID" unless given. Need not be unique.
        connect_timeout: seconds to wait for a publisher at first. Once attached, a subscriber reconnects for ever.
        prefetch: keep one request standing, so that the next version is already here when it is asked for. It counts as
            held.
        digests: have the publisher compute the content digest of every version that this subscriber is given.
        device: the one GPU that this process uses, for weights that are on GPUs. They are used in place if they are on
            it, and copied to it from another one. Unless given, they are used in place wherever they are.

    Raises:
        OptionError: an option has a value that is not allowed.
        EndpointError: the endpoint's name cannot be used.
    """

    def __init__(
        self, endpoint: str | os.PathLike[str], *, topic: str = DEFAULT_TOPIC, name: str = "",
        connect_timeout: float = 10.0, prefetch: bool = False, digests: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:  # fmt: skip
        self.options = SubscriberOptions(topic=topic, name=name, connect_timeout=connect_timeout, prefetch=prefetch)
        if type(digests) is not bool:
            raise OptionError("digests", digests, "True or False")
        self._device = gpus.check_device(device)
        self.endpoint = Endpoint.resolve(endpoint)
        self.topic = topic
        self.name = name or f"pid-{os.getpid()}"
        self._core = SubscriberProtocol(topic, self.name, digests=digests)
        self._attachment: Attachment  #: once opened
        self._opened = False
        self._waiters: list[_Waiter] = []
        self._unsaid = False  #: what the waiters want must be said when the door has room
        self._held_timer: asyncio.TimerHandle | None = None
        self._prefetched: Snapshot | None = None
        self._handed: tuple[Session, Version] | None = None  #: acknowledged when the next one is asked for
        #: The newest that a caller got. A grant is not enough: whoever waited for it may have been cancelled.
        self._given: tuple[Incarnation | None, Version] = (None, Version(0))
        self._digests: dict[Version, asyncio.Future[bytes]] = {}
        self._last: fx.Granted | None = None  #: of this session
        self._final: BusyncError | None = None  #: why there will never be a session again
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: set[asyncio.Future[None]] = set()  #: that run
        self._closed = False
        self._pid = os.getpid()

    # Opening and closing

    async def __aenter__(self) -> Self:
        """Wait until the publisher counts this subscriber, at most ``connect_timeout``.

        Raises:
            PublisherLost: there is no publisher.
            RefusedError: the publisher does not want this subscriber.
            EndpointError: the endpoint's directory is not to be trusted.
            DeviceError: there is no such device.
        """
        forks.ensure_same_process(self._pid, "subscriber")
        if self._closed or self._opened:
            raise ClosedError("subscriber") if self._closed else UsageError("this subscriber is open already")
        self.endpoint.check_client()
        device = gpus.exporter().device(self._device) if self._device is not None else None
        self._attachment = Attachment(self.endpoint, self._core, self, device)
        self._opened = True
        forks.register(self)
        try:
            async with asyncio.timeout(self.options.connect_timeout):
                while not self._core.attached and self._final is None:
                    await self._attachment.wait_change()
        except TimeoutError:
            lost = self._attachment.lost_reason
            why = lost.reason if isinstance(lost, PublisherLost) else str(lost)
            reason = f"none within {self.options.connect_timeout:g} s ({why})"
            await self.close()
            raise PublisherLost(self.endpoint.directory, reason) from None
        except BaseException:
            await self.close()
            raise
        if self._final is not None:
            await self.close()
            raise self._final
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session. Tensors in place stay usable. May be called again; waiting calls get ClosedError.

        Raises:
            UsageError: it is called on another loop while the subscriber's own runs.
        """
        if self._closed or os.getpid() != self._pid:
            return
        if self._opened and self._attachment.loop.is_running():
            self.ensure_here()
        self._closed = True
        if self._held_timer is not None:
            self._held_timer.cancel()
        forks.unregister(self)
        error = ClosedError("subscriber")
        for waiter in self._waiters:
            waiter.fail(error)
        self._waiters.clear()
        cancelled = False
        for job in list(self._jobs):  # before the session ends: a load may open memory of a GPU
            cancelled = await settle(job) or cancelled
        stop_at = time.monotonic() + UNMAP_PATIENCE
        while self._opened and _letting_go() and time.monotonic() < stop_at:
            try:
                await asyncio.sleep(0.002)  # or leases that were let go of would end without a word
            except asyncio.CancelledError:
                cancelled = True
                break
        if self._opened:
            cancelled = await self._attachment.close(error) or cancelled
            self._opened = False
            del self._attachment  # it refers back
        if self._executor is not None:
            self._executor.shutdown(wait=True)
        if cancelled:
            raise asyncio.CancelledError

    # Versions

    def __aiter__(self) -> Self:
        """Iterate over versions as they come; ends only with the loop's body or an exception."""
        return self

    async def __anext__(self) -> Snapshot:
        return await self.next()

    async def next(self, timeout: float | None = None) -> Snapshot:
        """The newest version that is newer than every version handed out so far. Cancelling loses nothing.

        Asking acknowledges the version that was handed out before.

        Raises:
            WaitTimeout: there was none within ``timeout`` seconds (None: wait for ever). A version that is there
                already gets 2 ms to arrive, also when ``timeout`` is less.
            PinnedError: this process still holds as many versions as it may.
            RefusedError: the publisher does not want this subscriber any more.
            FdError, AttachError: what the publisher sent could not be taken; the subscriber reconnects, so ask again.
            UsageError: the subscriber is not open, or belongs to another event loop.
            ClosedError: the subscriber is closed; ForkedError: it belongs to the parent process.
        """
        return await self._ask(NEXT, timeout)

    async def latest(self, timeout: float | None = None) -> Snapshot:
        """The newest version, which may be one that was handed out before; waits for the first if there is none.

        Raises: as ``next``.
        """
        return await self._ask(LATEST, timeout)

    async def wait_version(self, version: int, timeout: float | None = None) -> Snapshot:
        """The newest version once it is at least ``version``.

        Raises: as ``next``; OptionError: ``version`` is not a whole number of at least 1.
        """
        return await self._ask(request_version(version), timeout)

    def poll(self, timeout: float = POLL_WINDOW) -> Snapshot | None:
        """A version newer than every version handed out so far, or None; at once if the board shows none.

        A version that is on the board gets ``timeout`` seconds to arrive. If it does not, a version that was asked for
        ahead (``prefetch``) is handed out although there is a newer one by now.

        Needs no running loop; a loop that runs is held meanwhile. Raises: as ``next``, but never WaitTimeout.
        """
        return self._poll_here(check_seconds("timeout", timeout), self._pause)

    # Looking

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

    @property
    def lag(self) -> int:
        """How many versions the publisher is ahead of this subscriber."""
        return max(0, self.version - self.adopted)

    @property
    def connected(self) -> bool:
        """Whether the publisher counts this subscriber now. Looks at what has arrived first.

        Raises:
            UsageError: it is asked on another loop or thread than the subscriber's.
        """
        if self._closed or os.getpid() != self._pid:
            return False
        self.ensure_here()
        if self._opened:
            self._attachment.turn()
        return self._core.attached

    @property
    def incarnation(self) -> Incarnation | None:
        """The publisher's run that this subscriber was last attached to."""
        return self._core.incarnation

    # What snapshots need

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

    def acknowledge(self, hold: Hold) -> None:
        """Send Ack for the hold's version, unless its session is over."""
        session = hold.session()
        if session is not None:
            self._say_ack(session, hold.version)

    def _say_ack(self, session: Session, version: Version) -> None:
        if session is self._session:
            self._core.ack(version)
            self._attachment.say()

    def fail(self, hold: Hold, code: NackCode, text: str) -> None:
        """Send Nack for the hold's version, unless its session is over. Tensors may be asked for on any thread."""
        session = hold.session()
        if session is not None:
            if self._handed == (session, hold.version):
                self._handed = None  # asking for the next one does not acknowledge it
            session.door.send(encode(make_nack(hold.version, code, text)))  # not by the core, which has one thread

    def run(self, job: Callable[[], None]) -> asyncio.Future[None]:
        """Run a blocking job on a thread of this subscriber's own.

        Raises:
            ClosedError: the subscriber is closed.
        """
        if self._closed:
            raise ClosedError("subscriber")
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="busync-load")
        future = start_job(self._attachment.loop, self._executor, job)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)  # what it raised refers to a version
        return future

    async def wait_digest(self, version: Version, timeout: float) -> bytes:
        """The publisher's content digest of a version; see ``Snapshot.digest``."""
        if not self._core.digests:
            raise UsageError("this subscriber does not ask for digests", "make it with digests=True")
        self._begin()
        self._ack_handed()
        self._attachment.say()
        try:
            async with asyncio.timeout(check_seconds("timeout", timeout)):
                return await asyncio.shield(self._digest(version))
        except TimeoutError:
            raise WaitTimeout(f"the digest of version {version}", timeout, [self.endpoint.directory]) from None

    def _digest(self, version: Version) -> asyncio.Future[bytes]:
        future = self._digests.get(version)
        if future is None:
            for old in [v for v in self._digests if v < version and self._digests[v].done()]:
                del self._digests[old]
            future = self._digests[version] = self._attachment.loop.create_future()
        return future

    # Inside: asking

    @property
    def _session(self) -> Session | None:
        try:
            return self._attachment.session if self._opened else None
        except AttributeError:  # its loop's thread closes this subscriber at this very moment
            return None

    def _begin(self) -> None:
        forks.ensure_same_process(self._pid, "subscriber")
        if self._closed:
            raise ClosedError("subscriber")
        if not self._opened:
            raise UsageError("this subscriber is not open", "use it inside `async with`")
        self.ensure_here()
        self._attachment.look()
        if self._final is not None:
            raise self._final

    async def _ask(self, request: Request, timeout: float | None, spent: float = 0.0) -> Snapshot:
        """Wait for a request's version; ``spent`` seconds of ``timeout`` have passed already."""
        ready = self._look(request, timeout)
        if ready is not None:
            return self._hand_over(ready)
        future: asyncio.Future[Snapshot] = self._attachment.loop.create_future()
        waiter = self._waiter_for(request, future)
        self._add(waiter)
        try:
            patience = self._patience(timeout, waiter)
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

    def _ask_here(self, request: Request, timeout: float | None, pause: Pause) -> Snapshot | None:
        """As a coroutine that asks, without the loop; None if there is no session (any more), which only a loop mends.

        Raises: as ``next``.
        """
        ready = self._look(request, timeout)
        if ready is not None:
            return self._hand_over(ready)
        if self._session is None or not self._core.attached:
            return None
        waiter = self._waiter_for(request)
        self._wait_here(waiter, self._patience(timeout, waiter), pause)
        if waiter.snapshot is not None:
            return self._hand_over(waiter.snapshot)
        if self._session is None or not self._core.attached:
            return None
        raise self._timed_out(request, timeout)

    def _poll_here(self, timeout: float, pause: Pause) -> Snapshot | None:
        """See ``poll``."""
        self._begin()
        self._ack_handed()
        session = self._session
        if session is None or session.newest <= self.adopted:
            self._attachment.say()
            return None
        ahead = self._take_ahead()
        if ahead is None:
            self._check_held()
            ahead = self._take_ahead()  # it may have come just now
        if ahead is not None and (ahead.version == session.newest or len(self._core.leases) >= self._core.max_held):
            return self._hand_over(ahead)
        have = max(self.adopted, ahead.version if ahead is not None else Version(0))
        waiter = _Waiter(lambda: have)
        self._wait_here(waiter, timeout, pause)
        if waiter.snapshot is None and self._session is not session:
            return None  # what was asked for ahead went with its session
        snapshot = waiter.snapshot or ahead
        return self._hand_over(snapshot) if snapshot is not None else None

    def _wait_here(self, waiter: _Waiter, patience: float | None, pause: Pause) -> None:
        """Give turns until the waiter has its version, its time is over, or the session is."""
        session = self._session
        stop_at = None if patience is None else time.monotonic() + patience
        try:
            self._add(waiter)
            while waiter.snapshot is None and self._session is session:
                left = None if stop_at is None else stop_at - time.monotonic()
                if left is not None and left <= 0:
                    break
                full = self._core.held >= self._core.max_held  # and one of them ends in a moment, perhaps
                pause(HELD_PATIENCE if full and (left is None or left > HELD_PATIENCE) else left)
                self._attachment.turn()
                if full and waiter.snapshot is None:
                    self._check_held()
        finally:
            self._remove(waiter)
        if waiter.error is not None:
            raise waiter.error

    def _pause(self, seconds: float | None) -> None:
        self._attachment.pause(seconds)

    def _waiter_for(self, request: Request, future: asyncio.Future[Snapshot] | None = None) -> _Waiter:
        """What waits for a request."""
        enough = request.enough
        if enough is None:
            return _Waiter(lambda: self.adopted, future)
        return _Waiter(lambda: max(Version(enough - 1), self._newest_held(below_board=True)), future)

    def _look(self, request: Request, timeout: float | None) -> Snapshot | None:
        """What is at hand for a request, after what has arrived was taken in."""
        if timeout is not None:
            check_seconds("timeout", timeout)
        self._begin()
        self._ack_handed()
        ready = self._at_hand(request.enough)
        if ready is None:
            self._check_held()
            ready = self._at_hand(request.enough)  # what was asked for ahead may have come just now
        return ready

    def _ack_handed(self) -> None:
        """Acknowledge what was handed out before. It is said together with what is wanted next."""
        if self._handed is not None:
            (session, version), self._handed = self._handed, None
            if session is self._session:
                self._core.ack(version)

    def _patience(self, timeout: float | None, waiter: _Waiter) -> float | None:
        """Seconds to wait: a version that is there gets some, or a caller with little time would never get it."""
        if timeout is not None and self.version > waiter.have:
            return max(timeout, POLL_WINDOW)
        return timeout

    def _timed_out(self, request: Request, timeout: float | None) -> WaitTimeout:
        missing = [str(self._attachment.lost_reason)] if self._opened and not self._core.attached else []
        what = f"a version newer than {self.adopted}" if request.enough is None else f"version {request.enough}"
        if request is LATEST:
            what = "a version"
        return WaitTimeout(f"{what} of topic {self.topic!r} from {self.endpoint.directory}", timeout or 0.0, missing)

    def _hand_over(self, snapshot: Snapshot) -> Snapshot:
        if self._session is not None and snapshot.incarnation == self._session.incarnation:
            self._handed = (self._session, snapshot.version)
        if snapshot.incarnation == self._core.incarnation:
            self._given = snapshot.incarnation, max(self.adopted, snapshot.version)
        self._update_demand()
        return snapshot

    def _newest_held(self, *, below_board: bool) -> Version:
        session = self._session
        if session is None:
            return Version(0)
        limit = session.newest if below_board else Version(session.newest + 1)
        return max((hold.version for hold in list(session.holds.values()) if hold.version < limit), default=Version(0))

    def _at_hand(self, enough: Version | None) -> Snapshot | None:
        """What is here already: newer than all that was handed out, or at least ``enough``."""
        least = Version(self.adopted + 1) if enough is None else enough
        return self._take_prefetched(least) or (self._share(enough) if enough is not None else None)

    def _share(self, enough: Version) -> Snapshot | None:
        """A snapshot under a lease that this process has already, if that is the newest version."""
        session = self._session
        last = self._last
        if session is None or last is None or last.version != session.newest or last.version < enough:
            return None
        hold = next((h for h in list(session.holds.values()) if h.version == last.version), None)
        return Snapshot(self, last, hold, session.incarnation) if hold is not None else None

    def _take_ahead(self) -> Snapshot | None:
        """What was asked for ahead, unless it is not newer than what was handed out."""
        snapshot, self._prefetched = self._prefetched, None
        return snapshot if snapshot is not None and snapshot.version > self.adopted else None

    def _take_prefetched(self, least: Version) -> Snapshot | None:
        snapshot, self._prefetched = self._prefetched, None
        if snapshot is None or self._session is None or snapshot.version < max(least, self._session.newest):
            return None  # overtaken, or not what is asked for: its release goes out as it is dropped here
        return snapshot

    def _check_held(self) -> None:
        """Refuse to wait for what the publisher will not grant, unless what was asked for ahead has come meanwhile."""
        session = self._session
        if session is None or not self._core.attached or self._core.held < self._core.max_held:
            return
        # A release may have been sent that the books do not know yet. To look at all objects of a process with torch
        # takes 100 ms and more.
        for look in (None, 1, 2):
            if look is not None:
                gc.collect(look)
            self._attachment.turn()
            if self._core.held < self._core.max_held or self._prefetched is not None:
                return
            if _letting_go():
                return  # one of them may be gone in a moment; whoever waits for it is told if it was not
        raise PinnedError(self._core.max_held, [str(hold) for hold in list(session.holds.values())])

    def _watch_held(self) -> None:
        """See to it that no call waits without a word because others took the last lease while it waited."""
        full = len(self._core.leases) >= self._core.max_held
        if self._waiters and full and self._held_timer is None:
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
        self._watch_held()

    def _add(self, waiter: _Waiter) -> None:
        self._waiters.append(waiter)
        self._update_demand()

    def _remove(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._update_demand()

    def _update_demand(self) -> None:
        """Have the one Want open that serves every waiter, or the prefetch, or nobody."""
        session, core = self._session, self._core
        if session is None or not core.attached:
            return
        have: Version | None = min((waiter.have for waiter in self._waiters), default=None)
        if have is None and self.options.prefetch and self._prefetched is None and len(core.leases) < core.max_held:
            have = max(self.adopted, core.adopted)  # what a caller is about to get is not asked for again
        self._unsaid = session.door.pending > 0  # the publisher does not read: Wants and Withdraws would pile up
        if not self._unsaid:
            core.demand(have)
            self._attachment.say()
        if self._waiters:
            self._watch_held()

    # Inside: the session

    def handle(self, events: list[fx.SubscriberEffect]) -> None:
        """What the session has for the application; called by the attachment."""
        for event in events:
            match event:
                case fx.Attached():
                    for waiter in self._waiters:
                        waiter.have = waiter.evaluate()
                    self._attachment.note_attached()
                    self._update_demand()
                case fx.Granted():
                    self._granted(event)
                case fx.DigestArrived(version, digest):
                    future = self._digest(version)
                    if not future.done():
                        future.set_result(digest)
                case fx.Rejected(code, text):
                    raise RefusedError(self.endpoint.directory, code, text)
        if self._unsaid and self._session is not None and not self._session.door.pending:
            self._update_demand()

    def session_ended(self, error: BusyncError) -> None:
        """The session is over; called by the attachment. Calls go on waiting unless trying again cannot help."""
        self._prefetched = self._handed = self._last = None
        for version, future in list(self._digests.items()):
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may ever ask, and one that nobody reads is not worth a warning
            del self._digests[version]
        if type(error) is BusyncError or (isinstance(error, RefusedError) and error.code in FINAL_REFUSALS):
            self._final = error
        elif isinstance(error, PublisherLost | RefusedError):
            return
        for waiter in self._waiters:
            waiter.fail(error)

    def _granted(self, granted: fx.Granted) -> None:
        session = self._session
        assert session is not None, "granted without a session"
        hold = session.hold(granted)
        self._last = granted
        takers = [waiter for waiter in self._waiters if waiter.have < granted.version]
        for waiter in takers:
            self._waiters.remove(waiter)
            waiter.give(Snapshot(self, granted, hold, session.incarnation))
        if not takers and self.options.prefetch:
            self._prefetched = Snapshot(self, granted, hold, session.incarnation)
        self._update_demand()

    # Forks and copies

    def after_fork_in_child(self) -> None:
        """The child has no session; finalizers of what it inherited do nothing."""
        if self._opened:
            self._attachment.session = None

    def __reduce__(self) -> Any:
        raise UsageError("a subscriber cannot be pickled", "pass the endpoint's name and open one there")
