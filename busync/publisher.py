"""Publisher: the public face of the publisher's thread, for asyncio code. ``blocking`` has the plain one."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from busync.calls import Call, finish
from busync.errors import ClosedError, LoanInUse, OptionError, UsageError
from busync.handles import LoanBuffer, Source, Tensors, flatten
from busync.ids import DEFAULT_TOPIC, check_label
from busync.options import PublisherOptions, WhenFull, check_seconds
from busync.protocol.waits import WaitFor
from busync.publishing import (
    Lent,
    PublishReport,
    Wait,
    check_wait,
    give_back,
    lend,
    publish,
    publish_lent,
    wait_for,
)
from busync.server import Server, ensure_usable
from busync.transport.endpoint import Endpoint
from busync.wire import Value

if TYPE_CHECKING:
    import torch

WAIT_TIMEOUT = 30.0  #: seconds that a publish waits for acks unless told otherwise


def _uids(uids: object) -> frozenset[int]:
    if isinstance(uids, Iterable):
        return frozenset(uids)
    raise OptionError("allow_uids", uids, "a list of user ids")


class PublisherBase:
    """What the asyncio and the plain publisher share: options, the thread, and checked calls into it."""

    def __init__(
        self, endpoint: str | os.PathLike[str], *, max_segments: int = 4, max_held: int = 2,
        when_full: WhenFull = "wait", lease_timeout: float = 10.0, allow_uids: Iterable[int] = (),
        copy_threads: int = 2,
    ) -> None:  # fmt: skip
        """Check the options; nothing is opened yet. See ``PublisherOptions`` for what they mean.

        Raises:
            OptionError: an option has a value that is not allowed.
            EndpointError: the endpoint's name cannot be used.
        """
        self._server: Server | None = None
        self._closed = False
        self.options = PublisherOptions(
            max_segments=max_segments, max_held=max_held, when_full=when_full, lease_timeout=lease_timeout,
            allow_uids=_uids(allow_uids), copy_threads=copy_threads,
        )  # fmt: skip
        self.endpoint = Endpoint.resolve(endpoint)

    def _start(self) -> Server:
        if self._closed or self._server is not None:
            raise ClosedError("publisher") if self._closed else UsageError("this publisher is open already")
        self._server = Server(self.endpoint, self.options)
        self._server.start()
        return self._server

    def _stop(self) -> Server | None:
        self._closed = True
        server, self._server = self._server, None
        if server is None or os.getpid() != server.pid:
            return None  # a forked child has nothing to stop
        server.ask_to_stop()
        return server

    def _publish(self, source: Source, topic: str, label: str, wait: Wait, timeout: float) -> Call[PublishReport]:
        check_label("topic", topic)
        check_label("label", label, empty=True)
        check_seconds("timeout", timeout)
        check_wait(wait)
        server = ensure_usable(self._server, "publisher")
        if isinstance(source, nn.Module):  # in the caller's thread, where its hooks belong
            source = source.state_dict(keep_vars=True)
        return server.call(publish(server, source, topic, label, wait, timeout))

    def _wait(self, version: int, what: WaitFor, timeout: float, topic: str) -> Call[None]:
        check_seconds("timeout", timeout)
        server = ensure_usable(self._server, "publisher")
        return server.call(wait_for(server, topic, version, what, timeout))

    @property
    def incarnation(self) -> int:
        """This run's number, which readers see in their snapshots."""
        return ensure_usable(self._server, "publisher").core.incarnation

    def status(self) -> dict[str, Any]:
        """What there is, who holds it, and why: plain data, made on the publisher's thread in well under 1 ms.

        ``endpoint, incarnation, topics{version, versions[{version, state, bytes, holders}], segments, bytes},
        subscribers[{name, pid, uid, topic, version, lag, leases, skipped, state, reason}], counters``.

        Raises:
            ClosedError: the publisher is closed or not open.
        """
        server = ensure_usable(self._server, "publisher")

        async def status() -> dict[str, Any]:
            return server.status()

        return server.call(status()).block()

    def __del__(self) -> None:
        if self._server is not None and os.getpid() == self._server.pid:
            warnings.warn(f"publisher at {self.endpoint.directory} was never closed", ResourceWarning, stacklevel=2)
            self._stop()

    def __reduce__(self) -> Any:
        raise UsageError("a publisher cannot be pickled", "pass the endpoint's name, and subscribe there")


class Publisher(PublisherBase):
    """Publishes versions of weights to every subscriber that asks for them.

    Serving happens on a thread of its own: readers are admitted, granted and released while the caller's code is
    inside a long torch call. Its methods may be called from any loop and thread. Use it as ``async with``; the
    endpoint is claimed on entry (EndpointInUse, EndpointError, FdError, AllocationError) and given back at the end,
    when subscribers lose their connection and keep what they hold.
    """

    async def __aenter__(self) -> Self:
        server = self._start()
        try:
            if await finish(asyncio.wrap_future(server.ready)):
                raise asyncio.CancelledError
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every session and give everything back. May be called again."""
        server = self._stop()
        if server is not None and await finish(asyncio.wrap_future(server.ended)):
            raise asyncio.CancelledError

    async def publish(
        self, source: Source, *, topic: str = DEFAULT_TOPIC, label: str = "", wait: Wait = "none",
        timeout: float = WAIT_TIMEOUT,
    ) -> PublishReport:  # fmt: skip
        """Publish ``source`` as the next version of ``topic``: all or nothing, and never older than before.

        Args:
            source: a module (its state dict: parameters and persistent buffers), a mapping, nested mappings and
                sequences (flattened to dotted names), or an iterable of (name, tensor). Plain values beside tensors
                travel along. It is copied once; the caller may do anything with it once this returns.
            topic: which stream of versions; streams are independent.
            label: a text that readers see with the version.
            wait: "none"; "all": until every subscriber that is attached now has acknowledged this version or a later
                one, has failed or is gone; or a number of acknowledgements, later joiners counted.
            timeout: seconds to wait for them at most. The report then names who is pending; nothing is raised.

        Raises:
            ExportError: something in the source cannot be published; nothing was announced.
            AllocationError, FdError: no memory could be had; nothing was announced.
            PoolExhausted: the publisher's own loans hold every segment.
            OptionError: an argument is not allowed.
            ClosedError: the publisher is closed; ForkedError: it belongs to the parent process.

        Cancelling before the version is committed leaves nothing behind and burns no number; afterwards it is
        published. Either way the source is not touched any more once the cancellation arrives.
        """
        return await self._publish(source, topic, label, wait, timeout).wait()

    def loan(
        self, like: Source | Mapping[str, tuple[str | torch.dtype, tuple[int, ...]]], *, topic: str = DEFAULT_TOPIC
    ) -> Loan:
        """Memory of the next version, to be written in place: ``async with pub.loan(like=model) as loan``.

        ``like`` is a source whose names, dtypes and shapes are taken and whose values are ignored, or a mapping of
        name to (dtype, size). Waits for a free segment like a publish, whatever ``when_full`` says.

        Raises (on entry): as ``publish``.
        """
        check_label("topic", topic)
        return Loan(self, like, topic)

    async def wait(
        self, version: int, what: WaitFor = "acked", *, timeout: float = WAIT_TIMEOUT, topic: str = DEFAULT_TOPIC
    ) -> None:
        """Wait until all that are attached now have "acked" a version, or none holds it any more ("released").

        Raises:
            WaitTimeout: it took longer than ``timeout`` seconds; ``missing`` names who.
            OptionError: there is no such version.
            ClosedError: the publisher is closed.
        """
        await self._wait(version, what, timeout, topic).wait()


class LoanBase:
    """A loan: tensors to write in place, then to be published without a copy."""

    def __init__(self, publisher: PublisherBase, like: Any, topic: str) -> None:
        self._publisher = publisher
        self._like = like
        self._topic = topic
        self._lent: Lent | None = None
        self._buffer: LoanBuffer | None = None
        self._dropped: list[LoanBuffer] = []  #: let go of, while the caller still referred to their tensors

    def _lend(self) -> Call[Lent]:
        if self._lent is not None:
            raise UsageError("this loan was entered already")
        server = ensure_usable(self._publisher._server, "publisher")
        like, self._like = self._like, None
        return server.call(lend(server, like, self._topic))

    @property
    def tensors(self) -> Tensors:
        """The loan's tensors by name, uninitialised and writable.

        Raises:
            UsageError: the loan was not entered, or is over.
        """
        if self._lent is None or self._lent.over:
            raise UsageError("the loan is over" if self._lent else "the loan is not entered yet", "use it in `with`")
        if self._buffer is None:
            self._buffer = self._lent.buffer()
        return self._buffer.tensors

    def _let_go(self) -> list[str]:
        """Drop the loan's own references; the names of tensors that the caller still refers to."""
        if self._buffer is not None:
            self._buffer.drop()
            self._dropped.append(self._buffer)
            self._buffer = None
        names = [name for buffer in self._dropped for name in buffer.in_use()]
        if names:
            gc.collect()  # perhaps they are only in a cycle that nobody uses
            names = [name for buffer in self._dropped for name in buffer.in_use()]
        return names

    def _publish(
        self, label: str, values: Mapping[str, Value] | None, wait: Wait, timeout: float
    ) -> Call[PublishReport]:
        check_label("label", label, empty=True)
        check_seconds("timeout", timeout)
        check_wait(wait)
        if self._lent is None or self._lent.over:
            raise UsageError("the loan is over" if self._lent else "the loan is not entered yet")
        plain = flatten(values or {})
        if plain.tensors:
            raise OptionError("values", next(iter(plain.tensors)), "plain values; tensors belong into the loan")
        names = self._let_go()
        if names:
            raise LoanInUse(names)
        server = ensure_usable(self._publisher._server, "publisher")
        return server.call(publish_lent(server, self._lent, label, plain.values, wait, timeout))

    def _give_back_unseen(self, call: Call[Lent]) -> Call[None] | None:
        """The caller was cancelled when it was about to get the loan."""
        self._lent = call.result_of_cancelled()
        return self._give_back()

    def _give_back(self) -> Call[None] | None:
        lent = self._lent
        if lent is None or lent.over or self._publisher._server is None:
            return None
        referenced = bool(self._let_go())
        server = ensure_usable(self._publisher._server, "publisher")
        return server.call(give_back(server, lent, referenced=referenced))


class Loan(LoanBase):
    """The memory of the next version, for asyncio code; see ``Publisher.loan``.

    Leaving the block without publishing gives the memory back; if the caller still refers to a tensor of it, the memory
    is not used again.
    """

    async def __aenter__(self) -> Self:
        call = self._lend()
        try:
            self._lent = await call.wait()
        except asyncio.CancelledError:
            back = self._give_back_unseen(call)
            if back is not None:
                await back.wait(cancel=False)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        call = self._give_back()
        if call is not None:
            await call.wait(cancel=False)

    async def publish(
        self, *, label: str = "", values: Mapping[str, Value] | None = None, wait: Wait = "none",
        timeout: float = WAIT_TIMEOUT,
    ) -> PublishReport:  # fmt: skip
        """Publish what was written, without a copy.

        The caller must have dropped every reference to the loan's tensors: a later write would reach readers.

        ``values``: plain values to travel along. The rest is as in ``Publisher.publish``.

        Raises:
            LoanInUse: the caller still refers to a tensor, a view or a storage of the loan. Nothing was announced;
                drop it and publish again.
            UsageError: the loan is over.
        """
        return await self._publish(label, values, wait, timeout).wait()
