"""The pieces of a fake world around the real cores: memory, mappings, connections.

Memory is modelled honestly. A segment has one content cell. Whoever maps it has noted the content that was promised
to him, and must find it there at every later moment, whoever died, forked or reconnected in between.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from busync.ids import Incarnation, LeaseId, SegmentId, SessionId, Version
from busync.manifest import GroupSpec, Manifest, TensorSpec, make_manifest
from busync.protocol.ledger import State
from busync.wire import ManifestPart

if TYPE_CHECKING:
    from tests.protocol.publisher_process import PublisherProcess
    from tests.protocol.subscriber_process import SubscriberProcess

QueueName = Literal["door_up", "door_down", "bus_up", "bus_down"]
UP: tuple[QueueName, ...] = ("door_up", "bus_up")
DOWN: tuple[QueueName, ...] = ("door_down", "bus_down")

NO_SEGMENT = SegmentId(0)
Payload = tuple[int, int]  #: what was written: incarnation and number of the publish


class Fault(AssertionError):
    """The world shows something that must never happen."""


def require(condition: object, text: str) -> None:
    """Raise Fault unless ``condition`` holds."""
    if not condition:
        raise Fault(text)


@dataclass(eq=False)
class Memory:
    """A segment as the kernel has it. Identity counts, not its number: numbers are those of one incarnation."""

    incarnation: Incarnation
    segment: SegmentId
    nbytes: int
    content: Payload | str = "fresh"
    dropped: bool = False  #: the publisher has forgotten it

    def write(self, content: Payload | str) -> None:
        """Write as the pool does."""
        require(not self.dropped, f"segment {self.segment} was written after it was dropped")
        self.content = content


@dataclass(eq=False)
class Mapping:
    """Somebody reads a version. ``memory`` is None when the version has no bytes."""

    memory: Memory | None
    payload: Payload
    version: Version
    who: str
    in_place: bool = True  #: inherited by forked children; else a cached read-only mapping, which is not
    lease: LeaseId | None = None
    disarmed: bool = False  #: named in an Abandon

    def check(self) -> None:
        """What was promised must still be there."""
        if self.memory is not None and self.memory.content != self.payload:
            raise Fault(
                f"{self.who} reads {self.memory.content} in segment {self.memory.segment} instead of {self.payload}"
            )


@dataclass(frozen=True)
class Packet:
    """One message under way, perhaps with a descriptor. No bytes: the connection ended."""

    data: bytes
    memory: Memory | None = None


END = Packet(b"")


@dataclass(eq=False)
class Link:
    """One session: a door and a bus, each with a FIFO queue either way."""

    publisher: PublisherProcess
    reader: SubscriberProcess
    session: SessionId
    queues: dict[QueueName, deque[Packet]] = field(default_factory=lambda: {q: deque() for q in (*UP, *DOWN)})
    seen: list[tuple[QueueName, Packet]] = field(default_factory=list)  #: delivered, for repetition
    at_publisher: bool = True  #: the publisher counts the session
    disturbed: bool = False  #: something was delivered that a kernel would not deliver, so violations may be found

    def push(self, queue: QueueName, data: bytes, memory: Memory | None = None) -> None:
        """Send a message."""
        self.queues[queue].append(Packet(data, memory))

    def end(self, queue: QueueName) -> None:
        """Close one side of the door."""
        self.queues[queue].append(END)


@dataclass(eq=False)
class Job:
    """One publish or loan in the publisher's process."""

    id: int
    topic: str
    state: State
    nbytes: int
    manifest: Manifest
    phase: Literal["waiting", "reserved", "written", "straggling"] = "waiting"
    segment: SegmentId = NO_SEGMENT
    segment_nbytes: int = 0
    fresh: bool = False


def layout_for(nbytes: int, tensors: int) -> Manifest:
    """A layout of ``tensors`` tensors in ``nbytes`` bytes (a multiple of 64 for each of them, or 0)."""
    if nbytes == 0:
        empty = tuple(TensorSpec(f"e{i}", "float32", (0,), (1,), i, 0, False, False) for i in range(tensors))
        return make_manifest(0, tuple(GroupSpec(0, 0) for _ in empty), empty)
    share = nbytes // tensors
    assert share % 64 == 0, "every tensor starts at a multiple of 64"
    groups = tuple(GroupSpec(i * share, share) for i in range(tensors))
    specs = tuple(
        TensorSpec(f"t{i}", "float32", (share // 4,), (1,), i, 0, False, True) for i in range(tensors)
    )  # fmt: skip
    return make_manifest(nbytes, groups, specs)


def one_by_one(manifest: Manifest, incarnation: Incarnation) -> list[ManifestPart]:
    """A manifest in as many parts as it has tensors; ``layout_for`` gives each of them a group of its own."""
    return [
        ManifestPart(
            incarnation=incarnation, layout=manifest.digest, part=i, parts=len(manifest.tensors),
            nbytes=manifest.nbytes, groups=(manifest.groups[i],), tensors=(tensor,),
        )
        for i, tensor in enumerate(manifest.tensors)
    ]  # fmt: skip


def digest_of(payload: Payload) -> bytes:
    """Stands for the content digest."""
    return hashlib.sha256(repr(payload).encode()).digest()
