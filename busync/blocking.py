"""Publisher and Subscriber for plain code, without an event loop of the caller's.

    with busync.blocking.Publisher("policy") as pub: pub.publish(model)
    with busync.blocking.Subscriber("policy") as sub:
        for snapshot in sub: snapshot.load_into(model)

They promise and raise what their asyncio namesakes do; where those can be cancelled, these can be interrupted
(Ctrl-C). Nothing of a subscriber runs between its calls: a version that is asked for is fetched in the call that asks.
While it is attached, the calls that wait for versions or load them wait for its sockets themselves; a private loop runs
in the others, and where it has to connect again.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from busync import forks
from busync import subscriber as aio
from busync.asking import POLL_WINDOW
from busync.calls import settle
from busync.errors import ClosedError, UsageError
from busync.handles import NameMap, Source
from busync.holds import Hold
from busync.ids import DEFAULT_TOPIC, Incarnation, check_label
from busync.interrupts import CtrlC
from busync.options import check_seconds
from busync.protocol.effects import Granted
from busync.protocol.waits import WaitFor
from busync.publisher import WAIT_TIMEOUT, LoanBase, PublisherBase
from busync.publishing import PublishReport, Wait, drain
from busync.requests import LATEST, NEXT, Request, request_version
from busync.snapshot import SnapshotBase
from busync.wire import Value

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Loan", "Publisher", "Snapshot", "Subscriber"]

T = TypeVar("T")
P = ParamSpec("P")


class Publisher(PublisherBase):
    """As ``busync.Publisher``, for plain code."""

    def __enter__(self) -> Self:
        server = self._start()
        try:
            server.ready.block()
            server.ready.result()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self, grace: float = 0.0) -> tuple[str, ...]:
        """As ``busync.Publisher.close``."""
        check_seconds("grace", grace)
        server = self._take_server()
        if server is None:
            return ()
        try:
            return server.call(drain(server, grace)).block()
        except ClosedError:  # it has ended by itself, or never began
            return ()
        finally:
            server.ask_to_stop()
            server.ended.block()

    def publish(
        self, source: Source, *, topic: str = DEFAULT_TOPIC, label: str = "",
        values: Mapping[str, Value] | None = None, wait: Wait = "none", timeout: float = WAIT_TIMEOUT,
    ) -> PublishReport:  # fmt: skip
        """As ``busync.Publisher.publish``."""
        return self._publish(source, topic, label, values, wait, timeout).block()

    def loan(
        self, like: Source | Mapping[str, tuple[str | torch.dtype, tuple[int, ...]]], *, topic: str = DEFAULT_TOPIC
    ) -> Loan:
        """As ``busync.Publisher.loan``, with a plain ``with``."""
        check_label("topic", topic)
        return Loan(self, like, topic)

    def wait(
        self, version: int, what: WaitFor = "acked", *, timeout: float = WAIT_TIMEOUT, topic: str = DEFAULT_TOPIC
    ) -> None:
        """As ``busync.Publisher.wait``."""
        self._wait(version, what, timeout, topic).block()


class Loan(LoanBase):
    """As ``busync.Loan``, for plain code."""

    def __enter__(self) -> Self:
        call = self._lend()
        try:
            self._lent = call.block()
        except BaseException:
            back = self._give_back_unseen(call)
            if back is not None:
                back.block(cancel=False)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        call = self._give_back()
        if call is not None:
            call.block(cancel=False)

    def publish(
        self, *, label: str = "", values: Mapping[str, Value] | None = None, wait: Wait = "none",
        timeout: float = WAIT_TIMEOUT,
    ) -> PublishReport:  # fmt: skip
        """As ``busync.Loan.publish``."""
        return self._publish(label, values, wait, timeout).block()


class Snapshot(SnapshotBase):
    """As ``busync.Snapshot``, for plain code."""

    _subscriber: Subscriber  #: once it is handed out: with one that was asked for ahead, each would keep the other

    def load_into(self, *modules: nn.Module, strict: bool = True, map: NameMap | None = None) -> None:
        """As ``busync.Snapshot.load_into``."""
        self._subscriber._here(self._load, modules, strict, map)

    def ack(self) -> None:
        """As ``busync.Snapshot.ack``."""
        self._subscriber._here(self._ack)

    def digest(self, timeout: float = 30.0) -> bytes:
        """As ``busync.Snapshot.digest``."""
        return self._subscriber._run(self._digest(timeout))

    def __enter__(self) -> Self:
        self._subscriber._here(self._enter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._subscriber._here(self._leave, error)


class _Inner(aio.Subscriber):
    """What the plain subscriber is made of: its snapshots are for plain code as well."""

    def _snapshot(self, granted: Granted, hold: Hold, incarnation: Incarnation) -> Snapshot:  # type: ignore[override]
        return Snapshot(self, granted, hold, incarnation)


class _Call:
    """A call into a subscriber, for as long as its frame refers to it."""


class Subscriber(forks.ForkAware):
    """As ``busync.Subscriber``, for plain code. For one thread, which may not have a running loop."""

    def __init__(
        self, endpoint: str | os.PathLike[str], *, topic: str = DEFAULT_TOPIC, name: str = "",
        connect_timeout: float = 10.0, prefetch: bool = False, digests: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:  # fmt: skip
        self._inner = _Inner(
            endpoint,
            topic=topic,
            name=name,
            connect_timeout=connect_timeout,
            prefetch=prefetch,
            digests=digests,
            device=device,
        )
        self._runner: asyncio.Runner | None = None
        self._inside = threading.RLock()  #: only ever tried: a thread is inside one of the calls
        self._call: weakref.ref[_Call] | None = None  #: alive while a call runs
        self._ctrl_c = CtrlC()
        self.topic, self.name = self._inner.topic, self._inner.name

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the private loop."""
        try:
            return self._alone(self._run_to_its_end, coroutine)
        finally:
            coroutine.close()

    def _here(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do without the loop what needs none and does not wait. Ctrl-C strikes at its end."""

        def guarded() -> T:
            with self._ctrl_c:
                return job(*args, **kwargs)

        return self._alone(guarded)

    def _pause(self, seconds: float | None) -> None:
        self._ctrl_c.wait(self._inner._attachment.pause, seconds)

    def _alone(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do it as the only caller, in the right process, outside of event loops."""
        forks.ensure_same_process(self._inner._pid, "subscriber")
        if self._runner is None:
            raise ClosedError("subscriber")
        if asyncio._get_running_loop() is not None:
            raise UsageError("an event loop runs here", "use busync.Subscriber inside a running loop")
        if not self._inside.acquire(blocking=False):
            raise UsageError("another thread is inside this subscriber", "open one per thread")
        try:
            if self._call is not None and self._call() is not None:
                raise UsageError("a signal's handler called this subscriber inside a call of its own")
            if self._runner is None:  # closed by another thread since the first look
                raise ClosedError("subscriber")
            call = _Call()
            self._call = weakref.ref(call)
            try:
                return job(*args, **kwargs)
            finally:
                del call  # an exception refers to this frame
        finally:
            self._inside.release()

    def _run_to_its_end(self, coroutine: Coroutine[Any, Any, T]) -> T:
        runner = self._runner
        assert runner is not None, "it was looked at"
        task: asyncio.Task[T] | None = None
        given_up = False

        async def call() -> T:
            nonlocal task
            if given_up:
                raise asyncio.CancelledError
            task = asyncio.current_task()
            return await coroutine

        loop = runner.get_loop()  # makes it: no descriptor may be left for one
        begun = call()
        try:
            return runner.run(begun)
        except asyncio.CancelledError:  # by Ctrl-C alone; asyncio.Runner does not always say so
            raise KeyboardInterrupt from None
        except BaseException:  # a signal handler may have raised: then nobody waits for the call any more
            if task is None:  # and perhaps struck while the task was made: the loop has one that nobody knows
                given_up = True
                loop.run_until_complete(asyncio.sleep(0))
            elif not task.done():
                task.cancel()
                loop.run_until_complete(settle(task))
                task.cancelled() or task.exception()
            begun.close()
            raise

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        forks.register(self)
        try:
            self._run(self._inner.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """As ``busync.Subscriber.close``."""
        runner = self._runner
        if runner is not None and os.getpid() == self._inner._pid:
            self._run(self._inner.close())
            with self._inside:
                self._runner = None
                runner.close()
            forks.unregister(self)

    def after_fork_in_child(self) -> None:
        """The private loop must never be collected in the child: that would touch the parent's epoll."""
        if self._runner is not None:
            forks.immortal(self._runner.get_loop())

    def __iter__(self) -> Iterator[Snapshot]:
        """Iterate over versions as they come; ends only with the loop's body or an exception."""
        while True:
            yield self.next()

    def next(self, timeout: float | None = None) -> Snapshot:
        """As ``busync.Subscriber.next``."""
        return self._ask(NEXT, timeout)

    def latest(self, timeout: float | None = None) -> Snapshot:
        """As ``busync.Subscriber.latest``."""
        return self._ask(LATEST, timeout)

    def wait_version(self, version: int, timeout: float | None = None) -> Snapshot:
        """As ``busync.Subscriber.wait_version``."""
        return self._ask(request_version(version), timeout)

    def _ask(self, request: Request, timeout: float | None) -> Snapshot:
        """Ask without the loop for as long as there is a session, and with it when there is none."""
        begun = time.monotonic()
        snapshot = self._alone(self._ask_here, request, timeout)
        if snapshot is None:
            snapshot = self._run(self._inner._ask(request, timeout, time.monotonic() - begun))
        return self._hand_over(snapshot)

    def _hand_over(self, snapshot: SnapshotBase) -> Snapshot:
        assert isinstance(snapshot, Snapshot), "the inner subscriber makes no others"
        snapshot._subscriber = self
        return snapshot

    def _ask_here(self, request: Request, timeout: float | None) -> SnapshotBase | None:
        with self._ctrl_c:
            return self._inner._ask_here(request, timeout, self._pause)

    def _poll_here(self, timeout: float) -> SnapshotBase | None:
        with self._ctrl_c:
            return self._inner._poll_here(timeout, self._pause)

    def poll(self, timeout: float = POLL_WINDOW) -> Snapshot | None:
        """As ``busync.Subscriber.poll``."""
        check_seconds("timeout", timeout)
        if not self._inner._core.attached:
            self._run(asyncio.sleep(0))  # in which it may reconnect
        snapshot = self._alone(self._poll_here, timeout)
        return self._hand_over(snapshot) if snapshot is not None else None

    @property
    def version(self) -> int:
        """As ``busync.Subscriber.version``."""
        return self._inner.version

    @property
    def adopted(self) -> int:
        """As ``busync.Subscriber.adopted``."""
        return self._inner.adopted

    @property
    def lag(self) -> int:
        """As ``busync.Subscriber.lag``."""
        return self._inner.lag

    @property
    def incarnation(self) -> int | None:
        """As ``busync.Subscriber.incarnation``."""
        return self._inner.incarnation

    @property
    def connected(self) -> bool:
        """As ``busync.Subscriber.connected``; gives the private loop a turn, in which it may reconnect."""

        async def look() -> bool:
            await asyncio.sleep(0)
            return self._inner.connected

        if self._runner is None or os.getpid() != self._inner._pid:
            return False
        return self._run(look())
