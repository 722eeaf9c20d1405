"""What happens between ``publish()`` and the version: plan, segment, copy, commit, wait. Runs on the server's loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

import torch

from busync.calls import finish, start_job
from busync.errors import BusyncError, OptionError, UsageError, WaitTimeout
from busync.handles import CudaEvent, Flat, Job, LoanBuffer, Plan, Source, gpus, like_mixed
from busync.ids import SessionId, Version
from busync.manifest import Manifest
from busync.pool import Pooled
from busync.protocol import effects as fx
from busync.protocol.ledger import State
from busync.protocol.waits import WaitFor
from busync.server import Layout, Server
from busync.wire import VALUE_TYPES, Value

logger = logging.getLogger("busync")
R = TypeVar("R")

Wait = Literal["none", "all"] | int

PAGE_BYTES = 4096
SMALL_TENSORS = 64  #: sources of at most this many tensors are planned on the loop: a hop to a thread costs more
SMALL_BYTES = 256 * 1024  #: and at most this much is copied there
LARGE_MANIFEST = 2048  #: tensors from which on a manifest is encoded, and its copies are cut to pieces, on a thread
COMPLAINT_INTERVAL = 30.0  #: seconds between warnings that a publish had to wait


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What became of a publish. Names are those that the subscribers gave themselves.

    Attributes: ``version`` (None: nothing was published, because the pool was full and ``when_full`` is "skip"),
    ``acked``, ``pending`` (attached at the start, and neither acked, gone nor failed when the wait ended; without a
    wait, everybody), ``gone`` (their sessions ended), ``failed`` (name to reason: could not adopt the version) and
    ``waited`` (seconds for a free segment).
    """

    version: int | None  #: None: nothing was published, because the pool was full and ``when_full`` is "skip"
    acked: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()  #: counted from the start, and neither acked, gone nor failed when the wait ended
    gone: tuple[str, ...] = ()  #: their sessions ended
    failed: dict[str, str] = field(default_factory=dict)  #: could not adopt the version, and why
    waited: float = 0.0  #: seconds that the publish waited for a free segment


@dataclass(slots=True, eq=False)
class Lent:
    """A loan as the server knows it."""

    topic: str
    reservation: int
    layout: Layout
    segment: Pooled
    waited: float
    over: bool = False

    def buffer(self) -> LoanBuffer:
        """Tensors over the loan's memory."""
        return LoanBuffer(self.segment.builder(self.layout.manifest))


def check_wait(wait: object) -> Wait:
    """Return ``wait`` if it is "none", "all" or a number of subscribers.

    Raises:
        OptionError: it is not.
    """
    if wait in ("none", "all") or (type(wait) is int and wait >= 0):
        return wait
    raise OptionError("wait", wait, '"none", "all" or a number of subscribers')


async def publish(
    server: Server, source: Source, topic: str, label: str, values: Mapping[str, Value], wait: Wait, timeout: float,
    queued: Mapping[int, CudaEvent],
) -> PublishReport:  # fmt: skip
    """See ``Publisher.publish``. ``queued``: what the caller has queued on GPUs comes before the copy."""
    expected = server.core.attached(topic)
    async with server.lock(topic):
        flat, planned = await _plan(server, topic, source, values)
        layout = await _layout(server, planned.manifest)
        reserved = await _reserve(server, topic, planned.manifest, State.WRITING)
        if reserved.skipped:
            return PublishReport(version=None, pending=tuple(expected.values()), waited=reserved.waited)
        try:
            await _copy(server, planned, await _memory(server, reserved), queued)
            relayed = bool(planned.devices) and await _run(server, partial(_relays, planned))
        except BaseException:
            server.core.discard(reserved.reservation, time.monotonic())
            server.carry_out()
            raise
        version = _commit(server, reserved.reservation, layout, label, flat.values)
        server.core.counters["relayed"] += relayed
    assert version is not None, "nothing but a loan can be referenced"
    return await _report(server, topic, version, expected, wait, timeout, reserved.waited)


async def lend(server: Server, like: Source, topic: str) -> Lent:
    """See ``Publisher.loan``."""
    manifest = await _run(server, lambda: like_mixed(like, gpus.exporter()))
    layout = await _layout(server, manifest)
    reserved = await _reserve(server, topic, manifest, State.LOANED)
    try:
        segment = await _memory(server, reserved)
    except BaseException:
        server.core.discard(reserved.reservation, time.monotonic())
        server.carry_out()
        raise
    return Lent(topic, reserved.reservation, layout, segment, reserved.waited)


async def publish_lent(
    server: Server, lent: Lent, label: str, values: dict[str, Value], wait: Wait, timeout: float,
    queued: Mapping[int, CudaEvent],
) -> PublishReport:  # fmt: skip
    """Commit a loan that the caller has let go of; see ``Loan.publish``."""
    if lent.over:
        raise UsageError("the loan is over")
    lent.over = True
    expected = server.core.attached(lent.topic)
    try:
        for segment in lent.segment.devices.values():  # any of the caller's devices may have written to any of them
            await _run(server, partial(segment.wait, list(queued.values())))
    except BaseException:
        lent.over = False  # nothing was announced
        raise
    version = _commit(server, lent.reservation, lent.layout, label, values)
    assert version is not None, "the loan's references were checked before"
    return await _report(server, lent.topic, version, expected, wait, timeout, lent.waited)


async def give_back(server: Server, lent: Lent, *, referenced: bool) -> None:
    """End a loan without publishing. ``referenced``: the caller still has tensors of it, so it is never used again."""
    if not lent.over:
        lent.over = True
        server.core.discard(lent.reservation, time.monotonic(), referenced=referenced)
        server.carry_out()


async def wait_for(server: Server, topic: str, version: int, what: WaitFor, timeout: float) -> None:
    """See ``Publisher.wait``."""
    if what not in ("acked", "released"):
        raise OptionError("what", what, '"acked" or "released"')
    known = server.core.topics.get(topic)
    if type(version) is not int or known is None or not 1 <= version <= known.version:
        newest = known.version if known else 0
        raise OptionError("version", version, f"a version of topic {topic!r} that was published (1 to {newest})")
    expected = server.core.attached(topic)
    deadline_at = time.monotonic() + timeout
    done = await _wait(server, topic, Version(version), what, None, expected, deadline_at)
    missing = (*done.pending, *(f"{name} ({reason})" for name, reason in done.failed))
    if missing:
        raise WaitTimeout(f"version {version} of topic {topic!r} {what} by all", timeout, missing)


async def drain(server: Server, grace: float) -> tuple[str, ...]:
    """Wait until no subscriber holds a version, at most ``grace`` seconds; the names of those that still do."""
    deadline_at = time.monotonic() + grace
    while (held := server.core.held()) and time.monotonic() < deadline_at:
        for topic, version, sessions in held:
            await _wait(server, topic, version, "released", None, sessions, deadline_at)
    return tuple(sorted({session: name for *_, sessions in held for session, name in sessions.items()}.values()))


# Steps


async def _plan(server: Server, topic: str, source: Source, values: Mapping[str, Value]) -> tuple[Flat, Plan]:
    planner = server.planner(topic)

    if _is_small(source):
        return planner.plan(source, values)
    return await _run(server, lambda: planner.plan(source, values))


def _is_small(source: Source) -> bool:
    if not isinstance(source, Mapping) or len(source) > SMALL_TENSORS:
        return False
    for value in source.values():  # a generator would take longer than the look at a few tensors
        if not isinstance(value, torch.Tensor) and type(value) not in VALUE_TYPES:
            return False
    return True


def _relays(planned: Plan) -> bool:
    return any(gpus.relays(part.sources) for part in planned.devices.values())


async def _layout(server: Server, manifest: Manifest) -> Layout:
    layout = server.layouts.get(manifest.digest)
    if layout is not None:
        return layout
    if len(manifest.tensors) < LARGE_MANIFEST:
        return server.encode_layout(manifest)
    return await start_job(server.loop, server.workers, lambda: server.encode_layout(manifest))


async def _reserve(server: Server, topic: str, manifest: Manifest, state: State) -> fx.Reserved:
    nbytes = -(-manifest.nbytes // PAGE_BYTES) * PAGE_BYTES
    devices = tuple([(spec.device, spec.nbytes) for spec in manifest.devices])
    key = server.core.reserve(topic, nbytes, state, time.monotonic(), devices)
    try:
        reserved: fx.Reserved = await server.answer(key)
    except BaseException:
        server.core.discard(key, time.monotonic())
        server.carry_out()
        raise
    if reserved.waited > 0.1:
        _complain(server, topic, reserved)
    if reserved.error is not None:
        raise reserved.error
    return reserved


def _complain(server: Server, topic: str, reserved: fx.Reserved) -> None:
    now = time.monotonic()
    if now < server.quiet_until:
        return
    server.quiet_until = now + COMPLAINT_INTERVAL
    logger.warning(
        "a publish on topic %r waited %.2f s for a segment; versions were held by %s; "
        'more max_segments, load_into in the readers, or when_full="skip" would help',
        topic, reserved.waited, ", ".join(reserved.blocked_by) or "copies that were cancelled",
    )  # fmt: skip


async def _memory(server: Server, reserved: fx.Reserved) -> Pooled:
    if not reserved.segment:
        return Pooled()
    if not reserved.fresh:
        return server.pool.get(reserved.segment)
    try:
        return await _run(server, lambda: server.pool.create(reserved.segment, reserved.nbytes, reserved.devices))
    except BusyncError:
        server.core.allocation_failed(reserved.reservation, time.monotonic())
        raise


async def _copy(server: Server, planned: Plan, segment: Pooled, queued: Mapping[int, CudaEvent]) -> None:
    def make_jobs() -> list[Job]:
        views = segment.host.views if segment.host is not None else None
        return planned.jobs(segment.mapping, server.options.copy_threads, views)

    jobs = make_jobs() if len(planned.sources) < LARGE_MANIFEST else await _run(server, make_jobs)
    if planned.manifest.nbytes <= SMALL_BYTES and not planned.devices:
        for job in jobs:
            job()
        return
    for device, part in planned.devices.items():
        on_device = segment.devices[device]
        before = [event for index, event in queued.items() if index == on_device.index]
        jobs.insert(0, partial(on_device.fill, part, before))  # first: a GPU copies while the workers do
    futures: list[asyncio.Future[None]] = []
    try:
        futures.extend(start_job(server.loop, server.workers, job) for job in jobs)
    finally:
        # To the end of every job, also when one fails: a segment that some job still writes must not be used again.
        cancelled = await finish(asyncio.gather(*futures, return_exceptions=True))
    for future in futures:
        future.result()
    if cancelled:
        raise asyncio.CancelledError


async def _run(server: Server, job: Callable[[], R]) -> R:
    """Run a job on a worker, to its end even when cancelled: it uses the caller's tensors or makes memory."""
    future = start_job(server.loop, server.workers, job)
    try:
        if await finish(future):
            raise asyncio.CancelledError
        return future.result()
    finally:
        del future  # what it raised refers to this frame, and to the caller's tensors


def _commit(server: Server, reservation: int, layout: Layout, label: str, values: dict[str, Value]) -> Version | None:
    server.layouts[layout.manifest.digest] = layout
    version = server.core.commit(reservation, layout.manifest.digest, label, values, time.monotonic())
    server.carry_out()
    return version


async def _report(
    server: Server, topic: str, version: Version, expected: dict[SessionId, str], wait: Wait, timeout: float,
    waited: float,
) -> PublishReport:  # fmt: skip
    if wait == "none":
        return PublishReport(version=version, pending=tuple(expected.values()), waited=waited)
    need = wait if isinstance(wait, int) else None
    done = await _wait(server, topic, version, "acked", need, expected, time.monotonic() + timeout)
    return PublishReport(
        version=version, acked=done.acked, pending=done.pending, gone=done.gone, failed=dict(done.failed),
        waited=waited,
    )  # fmt: skip


async def _wait(
    server: Server, topic: str, version: Version, what: WaitFor, need: int | None,
    expected: dict[SessionId, str], deadline_at: float,
) -> fx.WaitDone:  # fmt: skip
    key = server.core.wait(topic, version, what, need, expected, deadline_at)
    try:
        done: fx.WaitDone = await server.answer(key)
    finally:
        server.core.cancel_wait(key)
    return done
