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

from busync.calls import Call, outlast
from busync.errors import ClosedError, LoanInUse, OptionError, UsageError
from busync.handles import LoanBuffer, Source, Tensors, flatten, gpus
from busync.ids import DEFAULT_TOPIC, check_label
from busync.options import PublisherOptions, WhenFull, check_seconds
from busync.protocol.waits import WaitFor
from busync.publishing import (
    Lent,
    PublishReport,
    Wait,
    check_wait,
    drain,
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


def _plain_values(values: Mapping[str, Value] | None, remedy: str) -> dict[str, Value]:
    if not values:
        return {}
    flat = flatten(values)
    if flat.tensors:
        raise OptionError("values", next(iter(flat.tensors)), f"plain values; {remedy}")
    return flat.values


class PublisherBase:
    """What the asyncio and the plain publisher share: options, the thread, and checked calls into it."""

    _server: Server | None = None  # here for __del__, which also comes when the constructor was called wrongly

    def __init__(
        self, endpoint: str | os.PathLike[str], *, max_segments: int = 4, max_held: int = 2,
        when_full: WhenFull = "wait", lease_timeout: float = 10.0, allow_uids: Iterable[int] = (),
        copy_threads: int = 4,
    ) -> None:  # fmt: skip
        """Check the options, which ``Publisher`` explains; nothing is opened yet.

        Raises:
            OptionError: an option has a value that is not allowed.
            EndpointError: the endpoint's name cannot be used.
        """
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

    def _take_server(self) -> Server | None:
        """The thread, for whoever stops it; from now on every other call is refused."""
        self._closed = True
        server, self._server = self._server, None
        return server if server is not None and os.getpid() == server.pid else None  # a child has nothing to stop

    def _publish(
        self, source: Source, topic: str, label: str, values: Mapping[str, Value] | None, wait: Wait, timeout: float
    ) -> Call[PublishReport]:
        check_label("topic", topic)
        check_label("label", label, empty=True)
        check_seconds("timeout", timeout)
        check_wait(wait)
        plain = _plain_values(values, "tensors belong into the source")
        server = ensure_usable(self._server, "publisher")
        if isinstance(source, nn.Module):  # in the caller's thread, where its hooks belong
            source = source.state_dict(keep_vars=True)
        return server.call(publish(server, source, topic, label, plain, wait, timeout, gpus.marks()))

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

        ``endpoint, incarnation, exports, topics{version, versions[{version, state, bytes, devices, holders}], segments,
        bytes, devices}, subscribers[{name, pid, uid, topic, version, lag, leases, skipped, state, reason}], counters``.

        ``bytes`` are those in shared memory of the host, ``devices`` those on each GPU by its UUID. ``exports`` are the
        openings of GPU memory that this process has given to readers and that have not ended.
        ``counters["relayed"]``: publishes of GPU memory that came from another publisher, which were copied like any.

        ``lag`` is how many versions a subscriber has not acknowledged, ``reason`` what it last could not use a version
        for. ``counters["unchanged"]``: versions with the same content digest as the one digested before on their topic,
        known where a subscriber asks for digests.

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
            self._server.ask_to_stop()

    def __reduce__(self) -> Any:
        raise UsageError("a publisher cannot be pickled", "pass the endpoint's name, and subscribe there")


class Publisher(PublisherBase):
    """Publishes versions of weights to every subscriber that asks for them.

    Serving happens on a thread of its own: readers are admitted, granted and released while the caller's code is
    inside a long torch call. Its methods may be called from any loop and thread. Use it as ``async with``; the
    endpoint is claimed on entry (EndpointInUse, EndpointError, FdError, AllocationError) and given back at the end,
    when subscribers lose their connection and keep what they hold.

    Args:
        endpoint: a bare name, ``ipc://PATH`` or a path: where subscribers find this publisher.
        max_segments: versions of a topic that may be in memory at a time, 2 to 1024: the newest, the one being written,
            and those that readers still use.
        max_held: versions that one subscriber may hold at a time, 2 to 64: the old one while it adopts the new.
        when_full: what a publish does that finds no free segment: "wait" for one, or "skip": publish nothing and say so
            (``report.version`` is None).
        lease_timeout: seconds that a publish waits for a segment before it leaves the oldest retired version to those
            who hold it, and takes a fresh one.
        allow_uids: user ids besides the publisher's own that may subscribe.
        copy_threads: threads that copy weights into shared memory, 1 to 64. More than there are free cores do little
            harm, and get their share of cores that others keep busy.

    Raises:
        OptionError: an option has a value that is not allowed.
        EndpointError: the endpoint's name cannot be used.
    """

    async def __aenter__(self) -> Self:
        server = self._start()
        try:
            if await outlast(server.ready):
                raise asyncio.CancelledError
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float = 0.0) -> tuple[str, ...]:
        """End every session and give everything back. May be called again.

        First wait up to ``grace`` seconds until no subscriber holds a version. Nobody is told to let go: a reader that
        uses versions in place keeps one until it gets the next. What is still held then stays readable for as long as
        its readers want it, also after a crash of this process: the memory is theirs as well.

        Returns:
            The names of the subscribers that still held a version.

        Raises:
            OptionError: ``grace`` is not a number of seconds.
        """
        check_seconds("grace", grace)
        server = self._take_server()
        if server is None:
            return ()
        try:
            return await server.call(drain(server, grace)).wait()
        except ClosedError:  # it has ended by itself, or never began
            return ()
        finally:
            server.ask_to_stop()
            if await outlast(server.ended):
                raise asyncio.CancelledError

    async def publish(
        self, source: Source, *, topic: str = DEFAULT_TOPIC, label: str = "",
        values: Mapping[str, Value] | None = None, wait: Wait = "none", timeout: float = WAIT_TIMEOUT,
    ) -> PublishReport:  # fmt: skip
        """Publish ``source`` as the next version of ``topic``: all or nothing, and never older than before.

        Args:
            source: a module (its state dict: parameters and persistent buffers), a mapping, nested mappings and
                sequences (flattened to dotted names), or an iterable of (name, tensor). Plain values beside tensors
                travel along. It is copied once; the caller may do anything with it once this returns.
            topic: which stream of versions; streams are independent.
            label: a text that readers see with the version.
            values: plain values that readers see with the version, as if the source held them beside its tensors.
            wait: "none"; "all": until every subscriber that is attached now has acknowledged this version or a later
                one, has failed or is gone; or a number of acknowledgements, later joiners counted.
            timeout: seconds to wait for them at most. The report then names who is pending; nothing is raised.

        Raises:
            ExportError: something in the source cannot be published; nothing was announced.
            AllocationError, FdError: no memory could be had; nothing was announced.
            DeviceError: memory of a GPU cannot be shared, and why, or the GPU has failed; nothing was announced.
            PoolExhausted: the publisher's own loans hold every segment.
            OptionError: an argument is not allowed.
            ClosedError: the publisher is closed; ForkedError: it belongs to the parent process.

        Cancelling before the version is committed leaves nothing behind and burns no number; afterwards it is
        published. Either way the source is not touched any more once the cancellation arrives.
        """
        return await self._publish(source, topic, label, values, wait, timeout).wait()

    def loan(
        self, like: Source | Mapping[str, tuple[str | torch.dtype, tuple[int, ...]]], *, topic: str = DEFAULT_TOPIC
    ) -> Loan:
        """Memory of the next version, to be written in place: ``async with pub.loan(like=model) as loan``.

        ``like`` is a source whose names, dtypes and shapes are taken and whose values are ignored, or a mapping of
        name to (dtype, size). Waits for a free segment like a publish.

        Raises (on entry): as ``publish``; PoolExhausted also if there is none and ``when_full`` is "skip".
        """
        check_label("topic", topic)
        return Loan(self, like, topic)

    async def wait(
        self, version: int, what: WaitFor = "acked", *, timeout: float = WAIT_TIMEOUT, topic: str = DEFAULT_TOPIC
    ) -> None:
        """Wait until all that are attached now have "acked" a version, or none holds it any more ("released").

        Subscribers that go meanwhile are not waited for. One that reports that it cannot use the version is not waited
        for either, and counts as missing.

        Raises:
            WaitTimeout: it took longer than ``timeout`` seconds, or somebody could not use the version; ``missing``
                names who, and why.
            OptionError: there is no such version.
            ClosedError: the publisher is closed; ForkedError: it belongs to the parent process.
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
        plain = _plain_values(values, "tensors belong into the loan")
        names = self._let_go()
        if names:
            raise LoanInUse(names)
        server = ensure_usable(self._publisher._server, "publisher")
        return server.call(publish_lent(server, self._lent, label, plain, wait, timeout, gpus.marks()))

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

        async with pub.loan(like=model) as loan:
            for name, tensor in loan.tensors.items(): ...  # write in place
            del tensor  # a later write would reach readers
            await loan.publish()

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
