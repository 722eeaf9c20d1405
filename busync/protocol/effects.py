"""What a core asks its shell to do, as frozen values that tests compare."""

from __future__ import annotations

from dataclasses import dataclass

from busync.errors import BusyncError
from busync.ids import Incarnation, LeaseId, SegmentId, SessionId, Version
from busync.manifest import Manifest
from busync.wire import BusDown, DoorDown, DoorUp, Value

# The publisher's shell


@dataclass(frozen=True, slots=True)
class SendDoor:
    """Send a packet to a session. Welcome goes with the board's descriptor."""

    session: SessionId
    message: DoorDown


@dataclass(frozen=True, slots=True)
class PushSegment:
    """Send a segment's descriptor to a session."""

    session: SessionId
    segment: SegmentId


@dataclass(frozen=True, slots=True)
class SendManifest:
    """Send the parts of a layout to a session."""

    session: SessionId
    layout: bytes


@dataclass(frozen=True, slots=True)
class SendBus:
    """Send a message to a session."""

    session: SessionId
    message: BusDown


@dataclass(frozen=True, slots=True)
class WriteBoard:
    """Show a version in a topic's slot: this commits it."""

    slot: int
    version: Version


@dataclass(frozen=True, slots=True)
class DropSegment:
    """Close the descriptor and forget the mapping; the memory goes with its last user."""

    segment: SegmentId


@dataclass(frozen=True, slots=True)
class DropLayout:
    """No version has this layout any more."""

    layout: bytes


@dataclass(frozen=True, slots=True)
class ComputeDigest:
    """Compute a version's content digest off the loop, then call ``digest_done``."""

    topic: str
    version: Version
    segment: SegmentId
    layout: bytes


@dataclass(frozen=True, slots=True)
class EndSession:
    """Close a session's connection."""

    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True)
class Reserved:
    """A reservation has its segment, or none and the reason."""

    reservation: int
    segment: SegmentId  #: 0 when nothing has to be stored
    nbytes: int
    fresh: bool  #: the segment does not exist yet
    waited: float  #: seconds
    blocked_by: tuple[str, ...] = ()  #: names of the sessions that it waited for
    error: BusyncError | None = None
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class WaitDone:
    """A wait for acks or releases is over."""

    wait: int
    acked: tuple[str, ...]
    pending: tuple[str, ...]
    gone: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]  #: name and reason


PublisherEffect = (
    SendDoor | PushSegment | SendManifest | SendBus | WriteBoard | DropSegment | DropLayout | ComputeDigest
    | EndSession | Reserved | WaitDone
)  # fmt: skip

# The subscriber's shell


@dataclass(frozen=True, slots=True)
class ToDoor:
    """Send a packet to the publisher."""

    message: DoorUp


@dataclass(frozen=True, slots=True)
class ConnectBus:
    """Connect to the bus under this routing id and send Join; map the board that came with Welcome."""

    token: bytes
    incarnation: Incarnation
    slot: int


@dataclass(frozen=True, slots=True)
class TakeSegment:
    """Check the descriptor that came with the packet, and keep it: it is the segment's."""

    segment: SegmentId
    nbytes: int


@dataclass(frozen=True, slots=True)
class Attached:
    """The publisher counts this session."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Granted:
    """A version may be used until its lease is released."""

    lease: LeaseId
    version: Version
    segment: SegmentId
    segment_nbytes: int
    manifest: Manifest
    label: str
    values: dict[str, Value]
    published_at: float


@dataclass(frozen=True, slots=True)
class ForgetSegments:
    """Drop the cached descriptors and mappings of these segments."""

    segments: tuple[SegmentId, ...]


@dataclass(frozen=True, slots=True)
class DigestArrived:
    """The publisher's content digest of a version."""

    version: Version
    digest: bytes


@dataclass(frozen=True, slots=True)
class Rejected:
    """The publisher refuses this session."""

    code: str
    text: str


SubscriberEffect = (
    ToDoor | ConnectBus | TakeSegment | Attached | Granted | ForgetSegments | DigestArrived | Rejected
)  # fmt: skip
