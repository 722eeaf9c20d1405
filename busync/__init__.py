"""busync: broadcasts model weights from one learner process to many actor processes through shared memory.

    Publisher       in the learner: ``publish`` a version, or write it in place in a ``loan``; gives PublishReport, Loan
    Subscriber      in an actor: iterate over versions; gives Snapshot, to use in place or to ``load_into`` a module
    blocking        both for code without asyncio
    content_digest  what ``Snapshot.digest`` can be compared with

Every exception derives from BusyncError; ``help(busync.errors)`` shows the tree.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from busync.errors import (
    AllocationError,
    AttachError,
    BusyncError,
    ClosedError,
    DecodeError,
    DeviceError,
    EndpointError,
    EndpointInUse,
    ExportError,
    FdError,
    ForkedError,
    HandleError,
    LoanInUse,
    MismatchError,
    OptionError,
    PinnedError,
    PoolExhausted,
    ProtocolError,
    PublisherLost,
    RefusedError,
    UsageError,
    ViolationError,
    WaitTimeout,
    WireVersionError,
)

if TYPE_CHECKING:
    from busync import blocking as blocking
    from busync.handles import content_digest as content_digest
    from busync.publisher import Loan as Loan
    from busync.publisher import Publisher as Publisher
    from busync.publishing import PublishReport as PublishReport
    from busync.snapshot import Snapshot as Snapshot
    from busync.subscriber import Subscriber as Subscriber

__version__ = "0.1.0"

#: Loaded when first used, so that ``import busync`` brings in neither torch nor zmq.
_LAZY = {
    "Loan": "busync.publisher",
    "PublishReport": "busync.publishing",
    "Publisher": "busync.publisher",
    "Snapshot": "busync.snapshot",
    "Subscriber": "busync.subscriber",
    "content_digest": "busync.handles",
}

__all__ = [
    "AllocationError",
    "AttachError",
    "BusyncError",
    "ClosedError",
    "DecodeError",
    "DeviceError",
    "EndpointError",
    "EndpointInUse",
    "ExportError",
    "FdError",
    "ForkedError",
    "HandleError",
    "Loan",
    "LoanInUse",
    "MismatchError",
    "OptionError",
    "PinnedError",
    "PoolExhausted",
    "ProtocolError",
    "PublishReport",
    "Publisher",
    "PublisherLost",
    "RefusedError",
    "Snapshot",
    "Subscriber",
    "UsageError",
    "ViolationError",
    "WaitTimeout",
    "WireVersionError",
    "blocking",
    "content_digest",
]


def __getattr__(name: str) -> object:
    if name == "blocking":
        return import_module("busync.blocking")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
