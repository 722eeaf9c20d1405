"""What a call of a subscriber asks for, and the call itself while it waits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Generic, TypeVar

from busync.errors import BusyncError, OptionError
from busync.ids import Version
from busync.snapshot import SnapshotBase

S = TypeVar("S", bound=SnapshotBase)  #: what callers get


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


class Waiter(Generic[S]):
    """A call that waits for a version newer than ``have``: a coroutine, or plain code that gives turns itself."""

    __slots__ = ("error", "future", "have", "request", "snapshot")

    def __init__(self, request: Request | None, have: Version, future: asyncio.Future[S] | None = None) -> None:
        self.request = request  #: what ``have`` follows from, which depends on the session; None: it stays
        self.have = have
        self.future = future
        self.snapshot: S | None = None
        self.error: BusyncError | None = None

    def give(self, snapshot: S) -> None:
        """The version that it waits for, or a later one."""
        self.snapshot = snapshot
        if self.future is not None and not self.future.done():
            self.future.set_result(snapshot)

    def fail(self, error: BusyncError) -> None:
        """There will be none."""
        self.error = error
        if self.future is not None and not self.future.done():
            self.future.set_exception(error)
