"""What a core asks its shell to do, as frozen values that tests compare."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from busync.errors import BusyncError
from busync.ids import Incarnation, LeaseId, SegmentId, SessionId, Version
from busync.manifest import Manifest
from busync.protocol.ledger import Devices
from busync.wire import BusDown, DoorDown, DoorUp, Value

# The publisher's shell


class SendDoor(Struct, frozen=True):
    """Send a packet to a session. Welcome goes with the board's descriptor."""

    session: SessionId
    message: DoorDown


class PushSegment(Struct, frozen=True):
    """Send a segment's descriptor to a session, and what opens its memory on each GPU."""

    session: SessionId
    segment: SegmentId


class SendManifest(Struct, frozen=True):
    """Send the parts of a layout to a session."""

    session: SessionId
    layout: bytes


class SendBus(Struct, frozen=True):
    """Send a message to a session."""

    session: SessionId
    message: BusDown


class WriteBoard(Struct, frozen=True):
    """Show a version in a topic's slot: this commits it."""

    slot: int
    version: Version


class DropSegment(Struct, frozen=True):
    """Close the descriptor and forget the memory, which goes with its last user."""

    segment: SegmentId


class DropLayout(Struct, frozen=True):
    """No version has this layout any more."""

    layout: bytes


class ComputeDigest(Struct, frozen=True):
    """Compute a version's content digest off the loop, then call ``digest_done``."""

    topic: str
    version: Version
    segment: SegmentId
    layout: bytes


class EndSession(Struct, frozen=True):
    """Close a session's connection."""

    session: SessionId
    reason: str


class Reserved(Struct, frozen=True):
    """A reservation has its segment, or none and the reason."""

    reservation: int
    segment: SegmentId  #: 0 when nothing has to be stored
    nbytes: int  #: on the host
    fresh: bool  #: the segment does not exist yet
    waited: float  #: seconds
    blocked_by: tuple[str, ...] = ()  #: names of the sessions that it waited for
    error: BusyncError | None = None
    skipped: bool = False
    devices: Devices = ()


class WaitDone(Struct, frozen=True):
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


class ToDoor(Struct, frozen=True):
    """Send a packet to the publisher."""

    message: DoorUp


class ConnectBus(Struct, frozen=True):
    """Connect to the bus under this routing id and send Join; map the board that came with Welcome."""

    token: bytes
    incarnation: Incarnation
    slot: int


class TakeSegment(Struct, frozen=True):
    """Check the descriptor that came with the packet, and keep it: it is the segment's."""

    segment: SegmentId
    nbytes: int


class TakeDevice(Struct, frozen=True):
    """Keep what opens a segment's memory on a GPU."""

    segment: SegmentId
    device: str
    nbytes: int
    handle: dict[str, Any]


class Attached(Struct, frozen=True):
    """The publisher counts this session."""

    incarnation: Incarnation


class Granted(Struct, frozen=True):
    """A version may be used until its lease is released."""

    lease: LeaseId
    version: Version
    segment: SegmentId
    segment_nbytes: int  #: on the host
    manifest: Manifest
    label: str
    values: dict[str, Value]
    published_at: float


class ForgetSegments(Struct, frozen=True):
    """Drop the descriptors, mappings and imports that are kept of these segments."""

    segments: tuple[SegmentId, ...]


class DigestArrived(Struct, frozen=True):
    """The publisher's content digest of a version."""

    version: Version
    digest: bytes


class Rejected(Struct, frozen=True):
    """The publisher refuses this session."""

    code: str
    text: str


SubscriberEffect = (
    ToDoor | ConnectBus | TakeSegment | TakeDevice | Attached | Granted | ForgetSegments | DigestArrived | Rejected
)  # fmt: skip
