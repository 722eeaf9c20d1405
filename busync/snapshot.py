"""Snapshot: one version in a subscriber's hands. ``blocking`` has the one of plain code."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from busync import forks
from busync.calls import finish
from busync.errors import AllocationError, AttachError, BusyncError, DeviceError, MismatchError, UsageError
from busync.handles import CudaEvent, NameMap, Tensors, gpus, plan_load
from busync.holds import Hold
from busync.ids import Incarnation, Version
from busync.manifest import Manifest
from busync.protocol.effects import Granted
from busync.wire import NackCode

if TYPE_CHECKING:
    from torch import nn

#: Loads of fewer bytes run on the loop's own thread: a hop to another one costs more.
INLINE_LOAD_BYTES = 256 * 1024
#: Why a version cannot be used, which the publisher is told.
_CANNOT = (MismatchError, AttachError, AllocationError, DeviceError)


class SnapshotOwner(Protocol):
    """What a snapshot needs of its subscriber."""

    topic: str

    def ensure_here(self) -> None:
        """Check that the caller is on the subscriber's loop."""

    def acknowledge(self, hold: Hold) -> None:
        """Send Ack for the hold's version."""

    def fail(self, hold: Hold, code: NackCode, text: str) -> None:
        """Send Nack for the hold's version."""

    def run(self, job: Callable[[], None]) -> asyncio.Future[None]:
        """Run a blocking job off the loop."""

    async def wait_digest(self, version: Version, timeout: float) -> bytes:
        """The publisher's digest of a version."""


class SnapshotBase:
    """What the snapshots of asyncio and of plain code have in common; see ``Snapshot``."""

    def __init__(self, owner: SnapshotOwner, granted: Granted, hold: Hold, incarnation: Incarnation) -> None:
        self.version: Version = granted.version
        self.label: str = granted.label
        self.topic: str = owner.topic
        self.incarnation: Incarnation = incarnation
        self.manifest: Manifest = granted.manifest
        self.nbytes: int = granted.manifest.total_bytes
        self.values: dict[str, Any] = dict(granted.values)  # the caller knows what it published
        self.published_at: float = granted.published_at
        self._owner = owner
        self._hold: Hold | None = hold
        self._tensors: Tensors | None = None
        self._blocks = 0
        self._pid = os.getpid()

    @property
    def tensors(self) -> Tensors:
        """The version's tensors by name, each made when it is first asked for.

        Plain tensors without gradient, over memory that is shared with the publisher copy-on-write: an edit in place
        stays in this process. (A version of up to 64 KiB is copied: that takes less than a mapping.) They keep strides,
        and tied names share one storage. The version stays leased for as long as this mapping or any tensor, view or
        module parameter made from it lives, unless they are copies, which hold no lease.

        Tensors on a GPU are the publisher's own memory: an edit in place is seen by everybody. The first use of a
        segment there takes some milliseconds. Those of another device than the subscriber's ``device`` are copied to
        that one, which takes as long as the copy.

        Raises:
            UsageError: the snapshot was released or spent by ``load_into``.
            AllocationError: the memory cannot be mapped, or a GPU has no room for a copy.
            AttachError, DeviceError: memory on a GPU cannot be opened here, or copied; the publisher is told.
        """
        hold = self._held()
        if self._tensors is None:
            try:
                self._tensors = Tensors(hold.own_memory(), hold)
            except _CANNOT as error:
                self._owner.fail(hold, "attach", str(error))
                raise
        return self._tensors

    def _load(self, modules: tuple[nn.Module, ...], strict: bool, map: NameMap | None) -> None:
        """For plain code: as ``load_into``, on the caller's own thread, to the end."""
        hold = self._held()
        self._owner.ensure_here()
        try:
            self._copy(hold, modules, strict, map, gpus.marks())
        except _CANNOT as error:
            self._failed(hold, error)
            raise
        self._loaded(hold)

    def _failed(self, hold: Hold, error: BusyncError) -> None:
        self._owner.fail(hold, "apply" if isinstance(error, MismatchError) else "attach", str(error))

    def _loaded(self, hold: Hold) -> None:
        self._owner.acknowledge(hold)
        if self._tensors is None and not self._blocks:
            self.release()

    def _copy(
        self, hold: Hold, modules: tuple[nn.Module, ...], strict: bool, map: NameMap | None,
        queued: Mapping[int, CudaEvent],
    ) -> None:  # fmt: skip
        hold.load(plan_load(self.version, self.manifest, modules, strict=strict, map=map), queued)

    def _ack(self) -> None:
        """See ``ack``; it does not wait."""
        hold = self._held()
        self._owner.ensure_here()
        self._owner.acknowledge(hold)

    def release(self) -> None:
        """Drop the snapshot's own references. The lease ends with the last tensor that the caller has, copies apart."""
        self._hold = self._tensors = None

    async def _digest(self, timeout: float) -> bytes:
        """See ``digest``."""
        forks.ensure_same_process(self._pid, "snapshot")
        return await self._owner.wait_digest(self.version, timeout)

    def _held(self) -> Hold:
        forks.ensure_same_process(self._pid, "snapshot")
        if self._hold is None:
            raise UsageError(
                f"the snapshot of version {self.version} was released", "ask the subscriber for the version again"
            )
        return self._hold

    def _enter(self) -> None:
        """Begin a block; see ``_leave``."""
        self._held()
        self._blocks += 1

    def _leave(self, error: BaseException | None) -> None:
        """End a block, with what the caller's code raised in it."""
        self._blocks -= 1
        try:
            if isinstance(error, Exception) and not isinstance(error, BusyncError) and self._hold is not None:
                self._owner.fail(self._hold, "apply", f"{type(error).__name__}: {error}")
        finally:  # an error of the caller's may fail to say what it is
            self.release()

    def __reduce__(self) -> Any:
        raise UsageError("a snapshot cannot be pickled or copied", "pass its tensors on, or open a subscriber there")

    def __repr__(self) -> str:
        held = "" if self._hold is not None else ", released"
        return f"<Snapshot of {self.topic!r} version {self.version}, {self.nbytes} bytes{held}>"


class Snapshot(SnapshotBase):
    """One version, complete and immutable, in this process's hands until it is let go.

    Use it in place through ``tensors``, or copy it into modules with ``load_into``. It holds a lease, of which a
    subscriber has only a few (the publisher's ``max_held``): let go of old versions when you adopt a new one. As a
    context manager (``async with``) it ends with the block; an exception that leaves the block is reported to the
    publisher as a failed adoption.

    Attributes: ``version``, ``label``, ``topic``, ``incarnation``, ``nbytes`` (of its tensors in shared memory),
    ``values`` (plain values by name), ``published_at`` (CLOCK_MONOTONIC seconds of the commit) and ``manifest`` (names,
    dtypes, shapes, and which tensors were parameters or required a gradient).
    """

    async def load_into(self, *modules: nn.Module, strict: bool = True, map: NameMap | None = None) -> None:
        """Copy the whole version into each of ``modules``, off the loop, and acknowledge it.

        Names, shapes and dtypes of everything are checked first: all or nothing. Parameters stay the same objects.
        ``strict``: every published tensor has a place and every tensor of the module's state dict gets a value.
        ``map`` turns a published name into the module's name, or None to leave it out.

        Afterwards the snapshot is spent and its lease ends, unless ``tensors`` was taken or this is inside
        ``async with snapshot:``. Cancelling waits for a copy that has begun; the modules are then completely loaded.
        Nobody may use the modules meanwhile, coroutines included; assign ``tensors`` to exchange weights in one step.
        What the caller had queued on its GPUs, on the current streams, comes before the copy.

        Raises:
            MismatchError: the version does not fit; nothing was changed, and the publisher is told.
            UsageError: the snapshot was released or spent, or this is not the subscriber's loop.
            AllocationError: the memory cannot be mapped.
            AttachError: memory on a GPU cannot be opened here; DeviceError: a GPU has failed. The publisher is told.
            ClosedError: the subscriber was closed.
        """
        hold = self._held()
        self._owner.ensure_here()
        cancelled = False
        try:
            queued = gpus.marks()
            if self.nbytes < INLINE_LOAD_BYTES and not self.manifest.devices and not queued:
                self._copy(hold, modules, strict, map, queued)
            else:
                # The thread may refer to the job a little longer than we wait for it, so the job gives the hold up.
                box = [hold]
                cancelled = await finish(self._owner.run(lambda: self._copy(box.pop(), modules, strict, map, queued)))
        except _CANNOT as error:
            self._failed(hold, error)
            raise
        self._loaded(hold)
        if cancelled:
            raise asyncio.CancelledError

    async def ack(self) -> None:
        """Tell the publisher that this version is in use here. Asking for the next version says it as well.

        Raises:
            UsageError: the snapshot was released or spent, or this is not the subscriber's loop.
        """
        self._ack()

    async def digest(self, timeout: float = 30.0) -> bytes:
        """The publisher's content digest (32 bytes) of this version; compare with ``busync.content_digest``.

        Raises:
            UsageError: the subscriber was not made with ``digests=True``.
            WaitTimeout: it did not come in time.
            PublisherLost: the session ended first.
        """
        return await self._digest(timeout)

    async def __aenter__(self) -> Self:
        self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(error)
