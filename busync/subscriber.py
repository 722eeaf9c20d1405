"""Subscriber: the asyncio shell around one session after another. It runs on the caller's loop and has no thread.

What its calls wait for is in ``asking``.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from busync import forks
from busync.asking import POLL_WINDOW, Asking, letting_go
from busync.attachment import Attachment
from busync.calls import settle, start_job
from busync.errors import (
    BusyncError,
    ClosedError,
    OptionError,
    PublisherLost,
    RefusedError,
    UsageError,
    WaitTimeout,
)
from busync.handles import gpus
from busync.holds import Hold
from busync.ids import DEFAULT_TOPIC, Incarnation, Version
from busync.options import SubscriberOptions, check_seconds
from busync.protocol import effects as fx
from busync.protocol.subscriber import SubscriberProtocol, make_nack
from busync.requests import LATEST, NEXT, request_version
from busync.session import Session
from busync.snapshot import Snapshot
from busync.transport.endpoint import Endpoint
from busync.wire import NackCode, encode

if TYPE_CHECKING:
    import torch

UNMAP_PATIENCE = 0.5  #: seconds that the end waits for large versions to be unmapped, and their leases to end
#: Refusals that trying again cannot change.
FINAL_REFUSALS = frozenset({"uid", "wire-version", "topics"})


class Subscriber(Asking[Snapshot]):
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
        self.name = name or f"pid-{os.getpid()}"
        core = SubscriberProtocol(topic, self.name, digests=digests)
        super().__init__(Endpoint.resolve(endpoint), topic, core, prefetch=prefetch)
        self._digests: dict[Version, asyncio.Future[bytes]] = {}
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: set[asyncio.Future[None]] = set()  #: that run

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
        device = gpus.device_of(self._device) if self._device is not None else None
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
        while self._opened and letting_go() and time.monotonic() < stop_at:
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
        self._ensure_caller()
        return self._poll_here(check_seconds("timeout", timeout), self._pause)

    # Looking

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

    def _snapshot(self, granted: fx.Granted, hold: Hold, incarnation: Incarnation) -> Snapshot:
        return Snapshot(self, granted, hold, incarnation)

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
        self._ensure_caller()
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

    # Inside: the session

    def handle(self, events: list[fx.SubscriberEffect]) -> None:
        """What the session has for the application; called by the attachment."""
        for event in events:
            match event:
                case fx.Granted():
                    self._granted(event)
                case fx.Attached():
                    for waiter in self._waiters:
                        if waiter.request is not None:
                            waiter.have = self._have(waiter.request)
                    self._attachment.note_attached()
                    self._update_demand()
                case fx.DigestArrived(version, digest):
                    future = self._digest(version)
                    if not future.done():
                        future.set_result(digest)
                case fx.Rejected(code, text):
                    raise RefusedError(self.endpoint.directory, code, text)
        if self._unsaid and self._session is not None and not self._session.door.outbox:
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

    # Forks and copies

    def after_fork_in_child(self) -> None:
        """The child has no session; finalizers of what it inherited do nothing."""
        if self._opened:
            self._attachment.session = None

    def __reduce__(self) -> Any:
        raise UsageError("a subscriber cannot be pickled", "pass the endpoint's name and open one there")
