"""Messages: their shape, their limits, their bytes.

``msgspec`` structs say what a message looks like, and encode it. What comes by the bus is decoded by the ``msgpack``
package with every limit set, and then checked; packets of the door, which are small and many, by msgspec at once.
Unknown fields are ignored, so that a later revision may add some; whatever cannot be ignored gets a new WIRE_VERSION,
which is exchanged in Hello and Welcome. Nothing received is ever executed, looked up or unpickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

import msgpack
import msgspec
from msgspec import Meta, Struct

from busync.errors import DecodeError
from busync.manifest import (
    MAX_DEVICES,
    MAX_SEGMENT_BYTES,
    MAX_TENSORS,
    DeviceName,
    DeviceSpec,
    GroupSpec,
    Manifest,
    Name,
    TensorSpec,
)

WIRE_VERSION = 3

MAX_PACKET_BYTES = 32 * 1024  #: one packet on the door
MAX_MESSAGE_BYTES = 8 * 1024 * 1024  #: one message on the bus
MAX_VALUES_BYTES = 1024 * 1024  #: the plain values of one version, encoded
MAX_TEXT = 1000  #: characters of a text for people
PART_TENSORS = 512  #: tensors in one ManifestPart, so that decoding one never holds a loop for long

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Label = Annotated[str, Meta(max_length=200)]
Digest16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Digest32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
Seconds = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
#: A plain value that travels beside tensors.
Value = bool | int | float | str | bytes | None
VALUE_TYPES: tuple[type, ...] = (bool, int, float, str, bytes, type(None))
RefuseCode = Literal["uid", "wire-version", "descriptors", "topics", "protocol", "device"]
NackCode = Literal["attach", "apply"]


class Message(Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    """Base of all messages; the field ``type`` says which one it is."""


# Door, upstream


class Hello(Message, frozen=True, kw_only=True):
    """The first packet of a session."""

    wire: Number  #: WIRE_VERSION of the subscriber
    topic: Annotated[str, Meta(min_length=1, max_length=200)]  #: the stream it reads
    name: Label  #: what reports call it; may be empty


class Want(Message, frozen=True, kw_only=True):
    """The reader's code waits for a version newer than ``have``. At most one Want of a session is open."""

    number: Number  #: grows by at least 1 with each Want of the session
    have: Number  #: 0: anything
    digest: bool = False  #: also compute and send the version's content digest
    ack: Number = 0  #: as Ack with this version, said before; 0: nothing
    released: Annotated[tuple[Number, ...], Meta(max_length=1024)] = ()  #: as Release with each of these, said before


class Withdraw(Message, frozen=True, kw_only=True):
    """The reader no longer waits, and promises never to map a grant of this Want."""

    number: Number  #: of the Want


class Ack(Message, frozen=True, kw_only=True):
    """``version`` is in use here; stands for every version up to it."""

    version: Number  #: at most the newest that this session was granted


class Release(Message, frozen=True, kw_only=True):
    """The process can no longer read this lease's version in its segment; copies of it may live on."""

    lease: Number  #: of this session; unknown ones are ignored


class Abandon(Message, frozen=True, kw_only=True):
    """The process cannot promise any more when these leases end (it forks): never write to their segments again."""

    leases: Annotated[tuple[Number, ...], Meta(max_length=1024)]  #: of this session; unknown ones are ignored


class Nack(Message, frozen=True, kw_only=True):
    """``version`` could not be attached or applied here."""

    version: Number  #: as granted
    code: NackCode  #: which step failed
    text: Text  #: for people


# Door, downstream


class Welcome(Message, frozen=True, kw_only=True):
    """The session exists. Comes with the descriptor of the board."""

    wire: Number  #: WIRE_VERSION of the publisher
    incarnation: Number  #: everything else of the session carries it
    token: Digest16  #: the session's routing id on the bus
    slot: Annotated[int, Meta(ge=1, le=255)]  #: the topic's slot on the board
    max_held: Annotated[int, Meta(ge=1, le=1024)]  #: leases that the session may hold at a time


class Refuse(Message, frozen=True, kw_only=True):
    """There will be no session, or it ends now."""

    code: RefuseCode  #: the reason, for programs
    text: Text  #: the reason, for people


class Segment(Message, frozen=True, kw_only=True):
    """Comes with the descriptor of a segment that this session has not seen yet: of its memory on the host."""

    incarnation: Number  #: as in Welcome
    segment: Number  #: its number, never used again
    nbytes: Annotated[int, Meta(ge=1, le=MAX_SEGMENT_BYTES)]  #: its size, whole pages


class DeviceSegment(Message, frozen=True, kw_only=True):
    """A segment's memory on one GPU, which this session has not seen yet. To be opened at most once."""

    incarnation: Number  #: as in Welcome
    segment: Number  #: as in Segment; it may have memory on the host besides, and on other GPUs
    device: DeviceName  #: the GPU's UUID
    nbytes: Annotated[int, Meta(ge=1, le=MAX_SEGMENT_BYTES)]  #: that tensors may use
    handle: dict[Label, Any]  #: what opens it, for this session alone; the GPU's side checks it


class Forget(Message, frozen=True, kw_only=True):
    """These segments have left the pool: close what is kept of them. The session holds no lease on them."""

    incarnation: Number  #: the publisher's
    segments: Annotated[tuple[Number, ...], Meta(max_length=1024)]  #: will never be announced again


# Bus


class Join(Message, frozen=True, kw_only=True):
    """Upstream, once: this routing id is connected."""


class Joined(Message, frozen=True, kw_only=True):
    """The answer to Join: the session is attached."""

    incarnation: Number  #: as in Welcome


class ManifestPart(Message, frozen=True, kw_only=True):
    """A slice of a manifest; part ``part`` of ``parts``, in order. Sent once per session and layout."""

    incarnation: Number  #: as in Welcome
    layout: Digest16  #: digest of the whole layout
    part: Annotated[int, Meta(ge=0, lt=MAX_TENSORS)]  #: which one this is, from 0
    parts: Annotated[int, Meta(ge=1, le=MAX_TENSORS)]  #: how many there are
    #: bytes of the host's memory in use, 0 when no tensor there has an element
    nbytes: Annotated[int, Meta(ge=0, le=MAX_SEGMENT_BYTES)]
    #: of the whole layout, in each part
    devices: Annotated[tuple[DeviceSpec, ...], Meta(max_length=MAX_DEVICES)] = ()
    #: those that the tensors below are the first to use
    groups: Annotated[tuple[GroupSpec, ...], Meta(max_length=PART_TENSORS)]
    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=PART_TENSORS)]  #: see TensorSpec


def manifest_parts(manifest: Manifest, incarnation: int) -> list[ManifestPart]:
    """The messages that carry a manifest: at most PART_TENSORS tensors each, far below MAX_MESSAGE_BYTES.

    A part brings the groups that its tensors are the first to use. A manifest without tensors is one part.
    """
    starts = range(0, max(1, len(manifest.tensors)), PART_TENSORS)
    parts: list[ManifestPart] = []
    used = 0  # groups in the parts so far
    for part, start in enumerate(starts):
        tensors = manifest.tensors[start : start + PART_TENSORS]
        first, used = used, max([used, *(spec.group + 1 for spec in tensors)])
        parts.append(
            ManifestPart(
                incarnation=incarnation, layout=manifest.digest, part=part, parts=len(starts), nbytes=manifest.nbytes,
                devices=manifest.devices, groups=manifest.groups[first:used], tensors=tensors,
            )
        )  # fmt: skip
    return parts


class Announce(Message, frozen=True, kw_only=True):
    """The answer to Want ``number``: a lease on ``version``, whose bytes are in ``segment``. By the door or the bus."""

    incarnation: Number  #: as in Welcome
    number: Number  #: of the Want
    lease: Number  #: what Release will name
    version: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]  #: newer than what the Want has
    layout: Digest16  #: digest of a layout that was sent before
    segment: Number  #: 0 when no tensor of the version has an element
    label: Label  #: given by the publisher
    published_at: Seconds  #: CLOCK_MONOTONIC of the machine
    values: dict[Name, Any]  #: each a Value; msgspec has no union of str and bytes, so decoding checks it


class Digest(Message, frozen=True, kw_only=True):
    """SHA-256 over the content of a version; see ``handles.content_digest``."""

    incarnation: Number  #: as in Welcome
    version: Number  #: one that this session was granted with ``digest``
    digest: Digest32  #: 32 bytes


DoorUp = Hello | Want | Withdraw | Ack | Release | Abandon | Nack
DoorDown = Welcome | Refuse | Segment | DeviceSegment | Forget | Announce
BusUp = Join
BusDown = Joined | ManifestPart | Announce | Digest


def encode(message: Message) -> bytes:
    """The bytes of a message. Whoever made the values has checked their size; see ``handles.flatten``."""
    return _encoder.encode(message)


_encoder = msgspec.msgpack.Encoder()


#: What decoding raises. A MsgspecError was no ValueError in earlier versions of msgspec.
_BAD = (msgspec.MsgspecError, msgpack.UnpackException, ValueError, TypeError, RecursionError)


def _door_decoder(union: Any) -> Callable[[bytes], Any]:
    # msgspec reads straight into the message. It bounds only what has a type, and a packet is small: what is in an
    # untyped field takes less than 120 bytes of memory for each of its own.
    decoder = msgspec.msgpack.Decoder(union)

    def decode(data: bytes) -> Any:
        if len(data) > MAX_PACKET_BYTES:
            raise DecodeError("door", f"{len(data)} bytes are more than the {MAX_PACKET_BYTES} allowed")
        try:
            message = decoder.decode(data)
        except _BAD as error:
            raise DecodeError("door", str(error)[:200] or type(error).__name__) from None
        if isinstance(message, Announce):
            _check_values("door", message)
        return message

    return decode


def _bus_decoder(union: Any, max_bytes: int, max_items: int) -> Callable[[bytes], Any]:
    # msgspec looks at a union anew in each call, which takes ten times as long as the rest of decoding.
    kinds: dict[object, type[Message]] = {kind.__struct_config__.tag: kind for kind in get_args(union) or (union,)}

    # Memory for an array is taken before its items are read, on every level of nesting: max_items bounds that.
    def decode(data: bytes) -> Any:
        if len(data) > max_bytes:
            raise DecodeError("bus", f"{len(data)} bytes are more than the {max_bytes} allowed")
        try:
            tree = msgpack.unpackb(
                data, raw=False, strict_map_key=True, use_list=False,
                max_str_len=max_bytes, max_bin_len=max_bytes, max_array_len=max_items,
                max_map_len=max_bytes, max_ext_len=0,
            )  # fmt: skip
            kind = kinds.get(tree.get("type")) if type(tree) is dict else None
            if kind is None:
                raise DecodeError("bus", "it is of no known type")
            message = msgspec.convert(tree, kind)
        except _BAD as error:
            raise DecodeError("bus", str(error)[:200] or type(error).__name__) from None
        if isinstance(message, Announce):
            _check_values("bus", message)
        return message

    return decode


def _check_values(channel: str, announce: Announce) -> None:
    if not all(type(value) in VALUE_TYPES for value in announce.values.values()):
        raise DecodeError(channel, "a value is not plain")


#: Decode one packet or message of a channel and direction, or raise DecodeError.
decode_door_up: Callable[[bytes], DoorUp] = _door_decoder(DoorUp)
decode_door_down: Callable[[bytes], DoorDown] = _door_decoder(DoorDown)
decode_bus_up: Callable[[bytes], BusUp] = _bus_decoder(BusUp, 256, 16)
decode_bus_down: Callable[[bytes], BusDown] = _bus_decoder(BusDown, MAX_MESSAGE_BYTES, 4096)
