"""What a publisher keeps about its topics and sessions. Plain records; ``publisher`` decides over them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from busync.ids import LeaseId, SegmentId, SessionId, Version
from busync.protocol.ledger import NO_VERSION, Devices, Entry, Lease, Ledger, State
from busync.wire import Value, Want


class Arrival(StrEnum):
    """What is known of a layout that was sent to a session."""

    GRANTED = "GRANTED"  #: the grant that it was sent for may still be waiting for it
    OPEN = "OPEN"  #: that grant was withdrawn, and the layout may still be under way
    SURE = "SURE"  #: it has arrived: the reader has asked again after the grant


@dataclass(slots=True, eq=False)
class Session:
    """One connection of one subscriber."""

    id: SessionId
    pid: int
    uid: int
    token: bytes
    name: str = ""
    topic: Topic | None = None
    attached: bool = False
    want: Want | None = None
    last_number: int = 0
    pushed: set[SegmentId] = field(default_factory=set)
    layout: bytes = b""  #: the last one sent; the bus keeps order, so one is enough
    arrival: Arrival = Arrival.SURE  #: of that layout
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    granted: Version = NO_VERSION
    acked: Version = NO_VERSION
    skipped: int = 0
    failed: Version = NO_VERSION  #: what it said it cannot use, last
    reason: str = ""  #: and why
    ended: bool = False  #: the shell was told to close it; nothing that still arrives counts


@dataclass(slots=True, eq=False)
class Content:
    """What travels with every Announce of the newest version."""

    values: dict[str, Value]
    published_at: float


@dataclass(slots=True, eq=False)
class Topic:
    """One stream of versions."""

    name: str
    slot: int
    ledger: Ledger
    version: Version = NO_VERSION
    content: Content | None = None
    sessions: dict[SessionId, Session] = field(default_factory=dict)
    queue: deque[Reservation] = field(default_factory=deque)
    digest_readers: dict[Version, list[SessionId]] = field(default_factory=dict)
    digested: tuple[Version, bytes] = (NO_VERSION, b"")  #: the newest version whose content digest is known

    @property
    def unused(self) -> bool:
        """Whether the publisher has no part in it: subscribers wait for what may never come."""
        return not self.version and not self.queue and not self.ledger.entries


@dataclass(slots=True, eq=False)
class Reservation:
    """A publish or a loan that wants a segment."""

    id: int
    topic: Topic
    nbytes: int  #: on the host
    state: State
    asked_at: float
    deadline_at: float
    entry: Entry | None = None
    blocked_by: tuple[str, ...] = ()  #: who held what it waits for
    devices: Devices = ()
