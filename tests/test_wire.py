"""Messages survive the trip, and nothing but DecodeError comes out of bytes that are not messages."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busync import wire
from busync.errors import DecodeError
from busync.manifest import DeviceSpec, GroupSpec, TensorSpec, check_part, make_manifest
from busync.wire import Message, decode_bus_down, decode_bus_up, decode_door_down, decode_door_up, encode

Decode = Callable[[bytes], Any]
DECODERS: list[Decode] = [decode_door_up, decode_door_down, decode_bus_up, decode_bus_down]

NUMBERS = st.integers(0, (1 << 63) - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
BYTES16 = st.binary(min_size=16, max_size=16)
VALUES: st.SearchStrategy[wire.Value] = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(allow_nan=False), TEXTS,
    st.binary(max_size=50),
)  # fmt: skip
DIMS = st.lists(NUMBERS, max_size=32).map(tuple)
GROUPS = st.builds(GroupSpec, offset_bytes=NUMBERS, nbytes=NUMBERS, memory=st.integers(0, 3))
DEVICES = st.uuids().map(str)
TENSORS = st.builds(
    TensorSpec, name=TEXTS.filter(bool), dtype=TEXTS, size=DIMS, stride=DIMS, group=NUMBERS, offset=NUMBERS,
    requires_grad=st.booleans(), parameter=st.booleans(),
)  # fmt: skip

MESSAGES: dict[type[Message], tuple[st.SearchStrategy[Any], Decode]] = {
    wire.Hello: (
        st.builds(wire.Hello, wire=NUMBERS, topic=TEXTS.filter(bool), name=TEXTS),
        decode_door_up,
    ),
    wire.Want: (st.builds(wire.Want, number=NUMBERS, have=NUMBERS, digest=st.booleans()), decode_door_up),
    wire.Withdraw: (st.builds(wire.Withdraw, number=NUMBERS), decode_door_up),
    wire.Ack: (st.builds(wire.Ack, version=NUMBERS), decode_door_up),
    wire.Release: (st.builds(wire.Release, lease=NUMBERS), decode_door_up),
    wire.Abandon: (st.builds(wire.Abandon, leases=st.lists(NUMBERS, max_size=64).map(tuple)), decode_door_up),
    wire.Nack: (
        st.builds(wire.Nack, version=NUMBERS, code=st.sampled_from(["attach", "apply"]), text=TEXTS),
        decode_door_up,
    ),
    wire.Welcome: (
        st.builds(
            wire.Welcome, wire=NUMBERS, incarnation=NUMBERS, token=BYTES16, slot=st.integers(1, 255),
            max_held=st.integers(1, 1024),
        ),
        decode_door_down,
    ),
    wire.Refuse: (st.builds(wire.Refuse, code=st.sampled_from(["uid", "protocol"]), text=TEXTS), decode_door_down),
    wire.Segment: (
        st.builds(wire.Segment, incarnation=NUMBERS, segment=NUMBERS, nbytes=st.integers(1, 1 << 46)),
        decode_door_down,
    ),
    wire.DeviceSegment: (
        st.builds(
            wire.DeviceSegment, incarnation=NUMBERS, segment=NUMBERS, device=DEVICES, nbytes=st.integers(1, 1 << 46),
            handle=st.dictionaries(TEXTS, VALUES, max_size=9),
        ),
        decode_door_down,
    ),
    wire.Forget: (
        st.builds(wire.Forget, incarnation=NUMBERS, segments=st.lists(NUMBERS, max_size=9).map(tuple)),
        decode_door_down,
    ),
    wire.Join: (st.builds(wire.Join), decode_bus_up),
    wire.Joined: (st.builds(wire.Joined, incarnation=NUMBERS), decode_bus_down),
    wire.ManifestPart: (
        st.builds(
            wire.ManifestPart, incarnation=NUMBERS, layout=BYTES16, part=st.integers(0, 9), parts=st.integers(1, 10),
            nbytes=st.integers(0, 1 << 46),
            devices=st.lists(st.builds(DeviceSpec, device=DEVICES, nbytes=st.integers(1, 99)), max_size=2).map(tuple),
            groups=st.lists(GROUPS, max_size=3).map(tuple),
            tensors=st.lists(TENSORS, max_size=3).map(tuple),
        ),
        decode_bus_down,
    ),
    wire.Announce: (
        st.builds(
            wire.Announce, incarnation=NUMBERS, number=NUMBERS, lease=NUMBERS, version=st.integers(1, 99),
            layout=BYTES16, segment=NUMBERS,
            label=TEXTS, published_at=st.floats(0, 1e9), values=st.dictionaries(TEXTS.filter(bool), VALUES, max_size=5),
        ),
        decode_bus_down,
    ),
    wire.Digest: (
        st.builds(wire.Digest, incarnation=NUMBERS, version=NUMBERS, digest=st.binary(min_size=32, max_size=32)),
        decode_bus_down,
    ),
}  # fmt: skip

SAMPLES: dict[type[Message], Message] = {
    wire.Hello: wire.Hello(wire=1, topic="default", name="a"),
    wire.Want: wire.Want(number=1, have=0),
    wire.Withdraw: wire.Withdraw(number=1),
    wire.Ack: wire.Ack(version=1),
    wire.Release: wire.Release(lease=1),
    wire.Abandon: wire.Abandon(leases=(1, 2)),
    wire.Nack: wire.Nack(version=1, code="apply", text="no"),
    wire.Welcome: wire.Welcome(wire=1, incarnation=1, token=b"t" * 16, slot=1, max_held=2),
    wire.Refuse: wire.Refuse(code="uid", text="no"),
    wire.Segment: wire.Segment(incarnation=1, segment=1, nbytes=4096),
    wire.DeviceSegment: wire.DeviceSegment(
        incarnation=1, segment=1, device="00000001-0000-4000-8000-000000000001", nbytes=4096, handle={"slot": 1}
    ),
    wire.Forget: wire.Forget(incarnation=1, segments=(1, 2)),
    wire.Join: wire.Join(),
    wire.Joined: wire.Joined(incarnation=1),
    wire.ManifestPart: wire.ManifestPart(
        incarnation=1, layout=b"l" * 16, part=0, parts=1, nbytes=64, groups=(GroupSpec(0, 64),),
        tensors=(TensorSpec("w", "float32", (4, 4), (4, 1), 0, 0, True, True),),
    ),
    wire.Announce: wire.Announce(
        incarnation=1, number=1, lease=1, version=1, layout=b"l" * 16, segment=1,
        label="", published_at=1.0, values={"step": 1},
    ),
    wire.Digest: wire.Digest(incarnation=1, version=1, digest=b"d" * 32),
}  # fmt: skip

EVERY = pytest.mark.parametrize("kind", MESSAGES)


def tree_of(message: Message) -> dict[str, Any]:
    """The message as plain data."""
    tree: dict[str, Any] = msgpack.unpackb(encode(message))
    return tree


def subclasses(kind: type[Any]) -> set[type[Any]]:
    return set(kind.__subclasses__())


def test_every_message_is_tested() -> None:
    assert set(MESSAGES) == set(SAMPLES) == subclasses(Message)


@EVERY
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_message_survives_the_trip(kind: type[Message], data: st.DataObject) -> None:
    strategy, decode = MESSAGES[kind]
    message = data.draw(strategy)
    assert decode(encode(message)) == message


@EVERY
def test_only_its_own_channel_and_direction_takes_a_message(kind: type[Message]) -> None:
    data = encode(SAMPLES[kind])
    own = {MESSAGES[kind][1]} | ({decode_door_down} if kind is wire.Announce else set())
    for decode in DECODERS:
        if decode in own:
            assert decode(data) == SAMPLES[kind]
        else:
            with pytest.raises(DecodeError):
                decode(data)


@EVERY
def test_what_is_cut_prolonged_or_doubled_is_refused(kind: type[Message]) -> None:
    data = encode(SAMPLES[kind])
    decode = MESSAGES[kind][1]
    for bad in [*(data[:i] for i in range(len(data))), data + b"\x00", data + b"\xc1", data + data, b"\x00" + data]:
        with pytest.raises(DecodeError):
            decode(bad)


@EVERY
def test_unknown_fields_are_ignored(kind: type[Message]) -> None:
    tree = tree_of(SAMPLES[kind]) | {"later": [1, {"deep": b"x"}], "more": None}
    assert MESSAGES[kind][1](msgpack.packb(tree)) == SAMPLES[kind]


@EVERY
def test_a_missing_field_or_one_of_a_wrong_type_is_refused(kind: type[Message]) -> None:
    tree = tree_of(SAMPLES[kind])
    optional = {f.encode_name for f in msgspec.structs.fields(kind) if not f.required}
    wrong: list[Any] = [None, -1, 1 << 63, 1.5, "x" * 2000, b"", b"x" * 17, [None] * 5000, {1: 2}, {"a": []}]
    for name in tree:
        if name not in optional:
            with pytest.raises(DecodeError):
                MESSAGES[kind][1](msgpack.packb({k: v for k, v in tree.items() if k != name}))
        accepted = 0
        for value in wrong:
            with suppress(DecodeError):
                MESSAGES[kind][1](msgpack.packb(tree | {name: value}, use_bin_type=True))
                accepted += 1
        assert accepted <= 2, f"{kind.__name__}.{name} takes nearly everything"


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "tree",
    [None, 0, "hello", b"hello", [], {}, {"type": 1}, {"type": None}, {"type": "nothing"}, {b"type": "join"}, [{}]],
)
def test_what_is_not_a_message_is_refused(decode: Decode, tree: object) -> None:
    with pytest.raises(DecodeError):
        decode(msgpack.packb(tree))


@pytest.mark.parametrize("decode", DECODERS)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused(decode: Decode, data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(data)


@EVERY
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_changed_byte_gives_a_message_or_a_decode_error(kind: type[Message], data: st.DataObject) -> None:
    good = bytearray(encode(SAMPLES[kind]))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with suppress(DecodeError):
        MESSAGES[kind][1](bytes(good))


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1x", b"\x81\x91"])
def test_deep_nesting_is_refused(decode: Decode, opening: bytes) -> None:
    for depth in (100, 5_000):
        with pytest.raises(DecodeError):
            decode(opening * depth + b"\x90")


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "header", [b"\xdd\x00\x7f\xff\xff", b"\xdc\x7f\xff", b"\xdf\x00\x7f\xff\xff", b"\xc6\x7f\xff\xff\xff"]
)
def test_memory_is_not_taken_because_a_header_says_so(decode: Decode, header: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decode(header * 600)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "item",
    [
        b"\x90", b"\x80", b"\xa0", b"\xc4\x00", b"\x91\x90", b"\x81\xa0\x80", b"\x81\x00\x80",
        b"\x91" * 300 + b"\x90", b"\x81\xa0" * 300 + b"\x80", b"\x81\x00" * 300 + b"\x80",
    ],
)  # fmt: skip
def test_what_an_untyped_field_takes_is_bounded_by_the_packet(item: bytes) -> None:
    tree = tree_of(SAMPLES[wire.DeviceSegment])
    count = (wire.MAX_PACKET_BYTES - 300) // len(item)
    data = msgpack.packb(tree | {"handle": {"a": 0}})[:-1] + b"\xdd" + count.to_bytes(4, "big") + item * count
    tracemalloc.start()
    try:
        message = decode_door_down(data)
        assert isinstance(message, wire.DeviceSegment)
        assert len(message.handle["a"]) == count
        assert tracemalloc.get_traced_memory()[1] < 120 * wire.MAX_PACKET_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("decode", "limit"),
    [
        (decode_door_up, wire.MAX_PACKET_BYTES),
        (decode_door_down, wire.MAX_PACKET_BYTES),
        (decode_bus_up, 256),
        (decode_bus_down, wire.MAX_MESSAGE_BYTES),
    ],
)
def test_what_is_too_large_is_not_even_looked_at(decode: Decode, limit: int) -> None:
    with pytest.raises(DecodeError, match="more than the"):
        decode(b"\xc1" * (limit + 1))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("decode", DECODERS)
def test_pickles_are_refused(decode: Decode, protocol: int) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (pytest.fail, ("unpickled",))

    for value in (Bomb(), {"type": "join"}):
        with pytest.raises(DecodeError):
            decode(pickle.dumps(value, protocol))


@pytest.mark.parametrize("value", [[], [1], {}, {"a": 1}, msgpack.ExtType(4, b""), msgpack.Timestamp(1)])
def test_only_plain_values_travel(value: object) -> None:
    tree = tree_of(SAMPLES[wire.Announce]) | {"values": {"v": value}}
    with pytest.raises(DecodeError):
        decode_bus_down(msgpack.packb(tree))


def test_text_must_be_utf8() -> None:
    data = encode(SAMPLES[wire.Hello]).replace(b"default", b"\xff\xfe\xed\xa0\x80\x80\x80")
    with pytest.raises(DecodeError):
        decode_door_up(data)


def test_a_part_has_at_most_part_tensors() -> None:
    part = SAMPLES[wire.ManifestPart]
    assert isinstance(part, wire.ManifestPart)
    large = msgspec.structs.replace(part, tensors=part.tensors * (wire.PART_TENSORS + 1))
    with pytest.raises(DecodeError):
        decode_bus_down(encode(large))


@pytest.mark.parametrize("count", [0, 1, 512, 513, 1500])
def test_a_manifest_is_cut_into_parts_that_pass_the_check(count: int) -> None:
    groups = tuple(GroupSpec(64 * i, 64) for i in range(count))
    tensors = tuple(TensorSpec(f"t{i}", "float32", (16,), (1,), i, 0, False, False) for i in range(count))
    manifest = make_manifest(64 * count, groups, tensors)
    parts = [decode_bus_down(encode(part)) for part in wire.manifest_parts(manifest, 7)]
    seen_groups: list[GroupSpec] = []
    seen: list[TensorSpec] = []
    for i, part in enumerate(parts):
        assert isinstance(part, wire.ManifestPart)
        assert (part.part, part.parts, part.layout, part.incarnation) == (i, len(parts), manifest.digest, 7)
        check_part(
            part.nbytes, part.groups, part.tensors, groups_before=seen_groups, names_before={t.name for t in seen}
        )
        seen_groups += part.groups
        seen += part.tensors
    assert (tuple(seen_groups), tuple(seen)) == (groups, tensors)
