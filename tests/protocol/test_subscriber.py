"""SubscriberProtocol: what it says, and what it refuses to believe."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from busync.errors import ViolationError
from busync.ids import Incarnation, LeaseId, SegmentId, Version
from busync.manifest import DeviceSpec, GroupSpec, Manifest, TensorSpec, make_manifest
from busync.protocol import effects as fx
from busync.protocol.subscriber import SubscriberProtocol
from busync.wire import (
    WIRE_VERSION,
    Ack,
    Announce,
    DeviceSegment,
    Digest,
    Forget,
    Hello,
    Joined,
    ManifestPart,
    Nack,
    Refuse,
    Segment,
    Want,
    Welcome,
    Withdraw,
    manifest_parts,
)
from tests.protocol.world import layout_for, one_by_one

ONE = Incarnation(1)
LAYOUT = layout_for(128, 2)
WELCOME = Welcome(wire=WIRE_VERSION, incarnation=ONE, token=b"t" * 16, slot=3, max_held=2)
SEGMENT = Segment(incarnation=ONE, segment=7, nbytes=4096)
PARTS = one_by_one(LAYOUT, ONE)


def announce(**changes: Any) -> Announce:
    fields: dict[str, Any] = {
        "incarnation": ONE, "number": 1, "lease": 5, "version": 1, "layout": LAYOUT.digest, "segment": 7,
        "label": "a", "published_at": 2.0, "values": {"step": 4},
    }  # fmt: skip
    return Announce(**(fields | changes))


def granted(**changes: Any) -> fx.Granted:
    fields: dict[str, Any] = {
        "lease": LeaseId(5), "version": Version(1), "segment": SegmentId(7), "segment_nbytes": 4096,
        "manifest": Manifest(LAYOUT.digest, LAYOUT.nbytes, LAYOUT.groups, LAYOUT.tensors), "label": "a",
        "values": {"step": 4}, "published_at": 2.0,
    }  # fmt: skip
    return fx.Granted(**(fields | changes))


def attached(*, digests: bool = False) -> SubscriberProtocol:
    core = SubscriberProtocol("default", "me", digests=digests)
    core.start()
    core.receive_door(WELCOME)
    core.receive_bus(Joined(incarnation=ONE))
    core.take_effects()
    return core


def feed(
    core: SubscriberProtocol, *messages: Segment | DeviceSegment | Forget | ManifestPart | Announce
) -> list[fx.SubscriberEffect]:
    for message in messages:
        if isinstance(message, Segment | DeviceSegment | Forget):
            core.receive_door(message)
        else:
            core.receive_bus(message)
        core.validate()
    return [effect for effect in core.take_effects() if not isinstance(effect, fx.TakeSegment | fx.TakeDevice)]


def adopted() -> SubscriberProtocol:
    core = attached()
    core.demand(Version(0))
    feed(core, *PARTS, SEGMENT, announce())
    return core


def test_a_session_begins_with_hello_and_is_attached_by_joined_once() -> None:
    core = SubscriberProtocol("default", "me")
    core.demand(Version(0))
    assert core.take_effects() == [], "nothing is asked before the session is attached"
    core.start()
    assert core.take_effects() == [fx.ToDoor(Hello(wire=WIRE_VERSION, topic="default", name="me"))]
    core.receive_door(WELCOME)
    assert core.take_effects() == [fx.ConnectBus(b"t" * 16, ONE, 3)]
    core.receive_bus(Joined(incarnation=ONE))
    core.receive_bus(Joined(incarnation=ONE))
    assert core.take_effects() == [fx.Attached(ONE)]


def test_a_second_welcome_is_a_violation() -> None:
    with pytest.raises(ViolationError, match="a second Welcome"):
        attached().receive_door(WELCOME)


def test_another_wire_version_is_rejected() -> None:
    core = SubscriberProtocol("default", "me")
    core.start()
    core.take_effects()
    core.receive_door(Welcome(wire=WIRE_VERSION + 1, incarnation=ONE, token=b"t" * 16, slot=3, max_held=2))
    (effect,) = core.take_effects()
    assert isinstance(effect, fx.Rejected)
    assert effect.code == "wire-version"
    assert not core.greeted


def test_a_refusal_is_passed_on() -> None:
    core = attached()
    core.receive_door(Refuse(code="protocol", text="bye"))
    assert core.take_effects() == [fx.Rejected("protocol", "bye")]


@pytest.mark.parametrize("order", ["mas", "msa", "sma"])  # the bus keeps order: m before a
def test_descriptor_manifest_and_announce_are_joined_in_any_order_of_the_channels(order: str) -> None:
    core = attached()
    core.demand(Version(0))
    assert core.take_effects() == [fx.ToDoor(Want(number=1, have=0))]
    messages: dict[str, list[Segment | ManifestPart | Announce]] = {"m": [*PARTS], "a": [announce()], "s": [SEGMENT]}
    effects = feed(core, *itertools.chain.from_iterable(messages[key] for key in order))
    assert effects == [granted()]
    assert core.leases == {5: 1}
    assert core.adopted == 1


A, B = "0000000a-0000-4000-8000-000000000000", "0000000b-0000-4000-8000-000000000000"
MIXED = make_manifest(
    64, (GroupSpec(0, 64), GroupSpec(0, 64, 1), GroupSpec(0, 64, 2)),
    tuple(TensorSpec(f"t{i}", "float32", (4,), (1,), i, 0, False, False) for i in range(3)),
    (DeviceSpec(A, 64), DeviceSpec(B, 64)),
)  # fmt: skip


def on_device(device: str, nbytes: int = 64, segment: int = 7) -> DeviceSegment:
    return DeviceSegment(incarnation=ONE, segment=segment, device=device, nbytes=nbytes, handle={"slot": 1})


@pytest.mark.parametrize("order", list(itertools.permutations("sabm")))
def test_a_version_is_complete_when_its_memory_is_here_on_every_device(order: tuple[str, ...]) -> None:
    core = attached()
    core.demand(Version(0))
    core.take_effects()
    bus = [*manifest_parts(MIXED, ONE), announce(layout=MIXED.digest)]
    messages: dict[str, list[Any]] = {"s": [SEGMENT], "a": [on_device(A)], "b": [on_device(B)], "m": bus}
    for key in order[:-1]:
        assert feed(core, *messages[key]) == []
    assert feed(core, *messages[order[-1]]) == [granted(manifest=MIXED)]
    assert feed(core, Forget(incarnation=ONE, segments=(7,))) == [fx.ForgetSegments((SegmentId(7),))]
    assert (core.segments, core.devices) == ({}, {})


def test_memory_on_a_device_is_taken_once_and_only_of_this_incarnation() -> None:
    core = attached()
    core.receive_door(msgspec.structs.replace(on_device(A), incarnation=ONE + 1))
    assert core.take_effects() == []
    core.receive_door(on_device(A))
    core.receive_door(on_device(B))
    assert core.take_effects() == [fx.TakeDevice(SegmentId(7), d, 64, {"slot": 1}) for d in (A, B)]
    with pytest.raises(ViolationError, match="second time"):
        core.receive_door(on_device(A))


def test_memory_on_a_device_that_is_too_small_is_a_violation() -> None:
    core = attached()
    core.demand(Version(0))
    feed(core, SEGMENT, on_device(A), on_device(B, nbytes=63), *manifest_parts(MIXED, ONE))
    with pytest.raises(ViolationError, match="64 bytes in a segment of 63"):
        feed(core, announce(layout=MIXED.digest))


def test_a_segment_of_this_incarnation_is_taken_and_no_other() -> None:
    core = attached()
    core.receive_door(Segment(incarnation=ONE + 1, segment=7, nbytes=64))
    assert core.take_effects() == []
    core.receive_door(SEGMENT)
    assert core.take_effects() == [fx.TakeSegment(SegmentId(7), 4096)]


@pytest.mark.parametrize("wrong", [{"lease": 5}, {"label": "a\0b"}, {"label": "a\x1b[31m"}])
def test_an_announce_that_cannot_be(wrong: dict[str, Any]) -> None:
    core = adopted()
    core.demand(Version(1))
    core.take_effects()
    with pytest.raises(ViolationError):
        feed(core, announce(**{"number": 2, "lease": 6, "version": 4, **wrong}))


def test_the_next_version_of_a_layout_needs_only_its_announce() -> None:
    core = adopted()
    core.demand(Version(1))
    assert core.take_effects() == [fx.ToDoor(Want(number=2, have=1))]
    effects = feed(core, announce(number=2, lease=6, version=4))
    assert effects == [granted(lease=LeaseId(6), version=Version(4))]


def test_a_version_without_bytes_needs_no_segment() -> None:
    core = attached()
    core.demand(Version(0))
    empty = layout_for(0, 1)
    effects = feed(core, *one_by_one(empty, ONE), announce(layout=empty.digest, segment=0))
    manifest = Manifest(empty.digest, 0, empty.groups, empty.tensors)
    assert effects[1:] == [granted(segment=SegmentId(0), segment_nbytes=0, manifest=manifest)]


def test_an_announce_before_its_layout_is_a_violation() -> None:
    core = attached()
    core.demand(Version(0))
    with pytest.raises(ViolationError, match="never sent"):
        core.receive_bus(announce())


def test_an_announce_within_a_manifest_is_a_violation() -> None:
    core = adopted()
    core.demand(Version(1))
    core.receive_bus(PARTS[0])
    with pytest.raises(ViolationError, match="never sent"):
        core.receive_bus(announce(number=2, lease=6, version=2))


@pytest.mark.parametrize("parts", [PARTS[1:], [PARTS[0], PARTS[0]], [PARTS[0], one_by_one(layout_for(256, 2), ONE)[1]]])
def test_parts_out_of_order_or_of_two_layouts_are_a_violation(parts: list[ManifestPart]) -> None:
    core = attached()
    with pytest.raises(ViolationError, match="does not follow"):
        feed(core, *parts)


def test_a_manifest_that_cannot_be_is_a_violation() -> None:
    bad = ManifestPart(
        incarnation=ONE, layout=LAYOUT.digest, part=0, parts=1, nbytes=64, groups=LAYOUT.groups, tensors=LAYOUT.tensors
    )
    with pytest.raises(ViolationError, match="cannot be"):
        attached().receive_bus(bad)


def test_a_segment_that_is_too_small_is_a_violation() -> None:
    core = attached()
    core.demand(Version(0))
    with pytest.raises(ViolationError, match="in a segment of 64"):
        feed(core, *PARTS, announce(), Segment(incarnation=ONE, segment=7, nbytes=64))


def test_what_does_not_carry_the_incarnation_is_ignored() -> None:
    core = attached()
    core.demand(Version(0))
    core.take_effects()
    other = 2
    core.receive_bus(Joined(incarnation=other))
    core.receive_bus(Digest(incarnation=other, version=1, digest=b"d" * 32))
    effects = feed(core, Segment(incarnation=other, segment=7, nbytes=4096), *one_by_one(LAYOUT, Incarnation(other)))
    assert effects == []
    assert core.segments == {}
    assert feed(core, announce(incarnation=other)) == []


def test_nothing_is_believed_before_welcome() -> None:
    core = adopted()
    core.stop()
    core.start()
    core.take_effects()
    core.receive_bus(Joined(incarnation=ONE))
    assert feed(core, SEGMENT, *PARTS) == []
    assert (core.attached, core.segments) == (False, {})


def test_one_want_at_a_time() -> None:
    core = attached()
    core.demand(Version(0))
    core.demand(Version(0))
    assert core.take_effects() == [fx.ToDoor(Want(number=1, have=0))]
    core.demand(Version(3))
    assert core.take_effects() == [fx.ToDoor(Withdraw(number=1)), fx.ToDoor(Want(number=2, have=3))]
    core.demand(None)
    core.demand(None)
    assert core.take_effects() == [fx.ToDoor(Withdraw(number=2))]


def test_a_lease_that_is_not_needed_ends_with_the_next_want() -> None:
    core = adopted()
    core.take_effects()
    assert (core.held, core.taken) == (1, 1)
    core.spared(LeaseId(5))
    core.spared(LeaseId(99))
    assert (core.held, core.taken, core.leases) == (0, 0, {5: 1})
    assert core.take_effects() == [], "nothing is said for it alone"
    core.demand(Version(1))
    assert core.take_effects() == [fx.ToDoor(Want(number=2, have=1, released=(5,)))]
    core.validate()
    assert core.leases == {}
    core.ended(LeaseId(5))
    core.spared(LeaseId(5))
    core.demand(Version(2))
    assert core.take_effects() == [fx.ToDoor(Withdraw(number=2)), fx.ToDoor(Want(number=3, have=2))]


def test_a_lease_that_has_ended_first_is_not_said_again() -> None:
    core = adopted()
    core.take_effects()
    core.spared(LeaseId(5))
    core.ended(LeaseId(5))
    core.validate()
    core.demand(Version(1))
    assert core.take_effects() == [fx.ToDoor(Want(number=2, have=1))]


def test_what_was_withdrawn_is_never_granted() -> None:
    core = attached()
    core.demand(Version(0))
    feed(core, *PARTS, announce())  # its descriptor is still under way
    assert core.leases == {5: 1}
    core.demand(None)
    assert core.leases == {}
    core.take_effects()
    assert feed(core, SEGMENT, announce()) == []
    core.demand(Version(0))
    core.take_effects()
    assert feed(core, announce(number=2, lease=6)) == [granted(lease=LeaseId(6))]


def test_an_older_version_is_a_violation() -> None:
    core = adopted()
    core.demand(Version(1))
    feed(core, announce(number=2, lease=6, version=5))
    core.demand(Version(0))
    with pytest.raises(ViolationError, match="version 4 after version 5"):
        core.receive_bus(announce(number=3, lease=7, version=4))


def test_segments_are_forgotten_when_the_publisher_says_so() -> None:
    core = adopted()
    feed(core, Segment(incarnation=ONE, segment=8, nbytes=4096), Segment(incarnation=ONE, segment=9, nbytes=4096))
    assert feed(core, Forget(incarnation=ONE, segments=(5, 7, 8))) == [fx.ForgetSegments((SegmentId(7), SegmentId(8)))]
    assert set(core.segments) == {9}
    assert feed(core, Forget(incarnation=ONE + 1, segments=(9,))) == []
    assert set(core.segments) == {9}, "another incarnation's numbers mean nothing here"


def test_ack_is_cumulative_and_only_for_what_this_session_granted() -> None:
    core = adopted()
    core.ack(Version(1))
    core.ack(Version(1))
    core.ack(Version(2))
    assert core.take_effects() == [fx.ToDoor(Ack(version=1))]
    core.stop()
    core.start()
    core.receive_door(WELCOME)
    core.take_effects()
    core.ack(Version(1))
    assert core.take_effects() == [], "the new session was granted nothing, so an ack would be a violation"


def test_a_text_is_cut_to_what_the_wire_allows() -> None:
    core = attached()
    core.nack(Version(1), "apply", "x" * 5000)
    (effect,) = core.take_effects()
    assert isinstance(effect, fx.ToDoor)
    assert isinstance(effect.message, Nack)
    assert len(effect.message.text) == 1000


def test_a_new_session_starts_clean_but_remembers_how_far_it_came() -> None:
    core = adopted()
    core.stop()
    assert (core.leases, core.segments, core.attached, core.adopted) == ({}, {}, False, 1)
    core.start()
    core.receive_door(WELCOME)
    core.receive_bus(Joined(incarnation=ONE))
    core.take_effects()
    core.demand(Version(1))
    assert core.take_effects() == [fx.ToDoor(Want(number=2, have=1))], "numbers are not used twice"


def test_a_new_incarnation_starts_at_its_first_version() -> None:
    core = adopted()
    core.stop()
    core.start()
    core.receive_door(Welcome(wire=WIRE_VERSION, incarnation=2, token=b"t" * 16, slot=1, max_held=2))
    assert (core.incarnation, core.adopted) == (2, 0)


def test_digests_are_asked_for_and_passed_on() -> None:
    core = attached(digests=True)
    core.demand(Version(0))
    assert core.take_effects() == [fx.ToDoor(Want(number=1, have=0, digest=True))]
    core.receive_bus(Digest(incarnation=ONE, version=1, digest=b"d" * 32))
    assert core.take_effects() == [fx.DigestArrived(Version(1), b"d" * 32)]


def test_a_lease_ends_by_its_release() -> None:
    core = adopted()
    core.ended(LeaseId(5))
    core.ended(LeaseId(5))
    assert core.leases == {}
