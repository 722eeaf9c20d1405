from __future__ import annotations

import time
from typing import Any

import pytest

from busync.errors import DecodeError
from busync.manifest import (
    DTYPES,
    MAX_SEGMENT_BYTES,
    DeviceSpec,
    GroupSpec,
    Manifest,
    TensorSpec,
    check_part,
    extent,
    make_manifest,
)
from busync.wire import MAX_MESSAGE_BYTES, PART_TENSORS, ManifestPart, decode_bus_down, encode, manifest_parts


def spec(name: str = "w", **changes: Any) -> TensorSpec:
    fields: dict[str, Any] = {
        "name": name, "dtype": "float32", "size": (2, 3), "stride": (3, 1), "group": 0, "offset": 0,
        "requires_grad": False, "parameter": False,
    }  # fmt: skip
    return TensorSpec(**{**fields, **changes})


def many(count: int) -> Manifest:
    groups = tuple(GroupSpec(64 * index, 24) for index in range(count))
    return make_manifest(64 * count, groups, tuple(spec(f"w{index}", group=index) for index in range(count)))


def test_equal_layouts_have_equal_digests() -> None:
    assert many(3) == many(3)
    assert len(many(3).digest) == 16
    assert many(3).digest != many(4).digest


@pytest.mark.parametrize(
    "change",
    [
        {"name": "v"}, {"dtype": "int32"}, {"size": (3, 2)}, {"stride": (1, 2)}, {"requires_grad": True},
        {"parameter": True}, {"offset": 1},
    ],
)  # fmt: skip
def test_every_field_counts_in_the_digest(change: dict[str, Any]) -> None:
    groups = (GroupSpec(0, 64),)
    assert make_manifest(64, groups, (spec(),)).digest != make_manifest(64, groups, (spec(**change),)).digest


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        ((), (), (1, 1, True)),
        ((2, 3), (3, 1), (6, 6, True)),
        ((2, 3), (1, 2), (6, 6, True)),
        ((2, 3), (10, 1), (6, 13, True)),
        ((2, 3), (0, 1), (3, 3, True)),
        ((1, 3), (99, 1), (3, 3, True)),
        ((3, 3), (1, 1), (9, 5, False)),
        ((3, 2), (2, 3), (6, 8, False)),  # injective in fact, but not by nesting
    ],
)
def test_extent(size: tuple[int, ...], stride: tuple[int, ...], expected: tuple[int, int, bool]) -> None:
    assert extent(size, stride) == expected


GROUP = (GroupSpec(0, 24),)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_passes_when_it_just_fits(dtype: str) -> None:
    nbytes = 6 * DTYPES[dtype]
    check_part(nbytes, [GroupSpec(0, nbytes)], [spec(dtype=dtype)])
    with pytest.raises(ValueError, match="beyond its group"):
        check_part(nbytes, [GroupSpec(0, nbytes - DTYPES[dtype])], [spec(dtype=dtype)])


@pytest.mark.parametrize(
    "good",
    [
        spec(),
        spec(size=(), stride=(), offset=5),
        spec(size=(1 << 40, 6), stride=(0, 1)),
        spec(size=(1, 6), stride=(1 << 62, 1)),
        spec(dtype="uint8", size=(24,), stride=(1,)),
    ],
)
def test_what_fits_passes(good: TensorSpec) -> None:
    check_part(24, GROUP, [good])


def test_a_tensor_without_elements_needs_no_place() -> None:
    check_part(0, [GroupSpec(0, 0)], [spec(size=(0, 1 << 62), stride=(5, 1))])


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"dtype": "quint8"}, "unknown dtype"),
        ({"size": (2,)}, "do not go together"),
        ({"size": (1,) * 33, "stride": (1,) * 33}, "do not go together"),
        ({"offset": 1}, "beyond its group"),
        ({"offset": -1}, "negative"),
        ({"stride": (4, 1)}, "beyond its group"),
        ({"stride": (-3, 1), "offset": 3}, "negative"),
        ({"size": (-2, -3)}, "negative"),
        ({"size": (2, 1 << 62), "stride": (1, 0)}, "more elements"),
        ({"size": (1 << 62, 1 << 62, 4), "stride": (0, 0, 1)}, "more elements"),
        ({"size": (3, 4), "stride": (1, 1)}, "more elements"),
        ({"size": (1 << 63,), "stride": (1,)}, "beyond"),
        ({"size": (1,), "stride": (1 << 63,)}, "far too large"),
        ({"size": (0,), "stride": (1,)}, "has no element"),
        ({"name": "w\x1b[2J"}, "printable"),
        ({"group": 1}, "not the next"),
        ({"group": 1 << 62}, "not the next"),
    ],
)
def test_what_does_not_fit_is_refused(bad: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_part(24, GROUP, [spec(**bad)])


@pytest.mark.parametrize("bad", [spec(size=(0,), stride=(1,), offset=1), spec(size=(0, 1 << 62, 2), stride=(1, 1, 1))])
def test_impossible_tensors_without_elements_are_refused(bad: TensorSpec) -> None:
    with pytest.raises(ValueError, match="no element"):
        check_part(0, [GroupSpec(0, 0)], [bad])


@pytest.mark.parametrize(
    ("nbytes", "groups", "reason"),
    [
        (24, [GroupSpec(0, 32)], "beyond the segment"),
        (128, [GroupSpec(32, 24)], "misaligned"),
        (128, [GroupSpec(64, 0)], "empty"),
        (128, [GroupSpec(0, 65), GroupSpec(64, 24)], "overlap"),
        (128, [GroupSpec(64, 24), GroupSpec(0, 24)], "out of order"),
        (24, [GroupSpec(0, 24), GroupSpec(0, 0)], "has no tensor"),
        (24, [], "not the next"),
        (-1, [], "not a segment"),
        (MAX_SEGMENT_BYTES + 1, [], "not a segment"),
        (24, [GroupSpec(0, 26)], "beyond"),
        (26, [GroupSpec(0, 26)], "beyond its group"),  # not a whole number of elements
    ],
)
def test_bad_groups_are_refused(nbytes: int, groups: list[GroupSpec], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_part(nbytes, groups, [spec()])


A, B = DeviceSpec("0000000a-0000-4000-8000-000000000000", 64), DeviceSpec("0000000b-0000-4000-8000-000000000000", 24)


@pytest.mark.parametrize(
    ("devices", "group", "reason"),
    [
        ([A], GroupSpec(0, 24, 1), ""),
        ([A, B], GroupSpec(0, 24, 2), ""),
        ([], GroupSpec(0, 24, 1), "memory 1 of 1"),
        ([A], GroupSpec(0, 24, 2), "memory 2 of 2"),
        ([A], GroupSpec(0, 65, 1), "beyond the segment"),
        ([A, B], GroupSpec(0, 32, 2), "beyond the segment"),
        ([A], GroupSpec(32, 24, 1), "misaligned"),
        ([A, A], GroupSpec(0, 24, 1), "named twice"),
        ([A], GroupSpec(0, 0, 2), "memory 2 of 2"),
    ],
)
def test_groups_lie_in_memory_that_there_is(devices: list[DeviceSpec], group: GroupSpec, reason: str) -> None:
    if not reason:
        check_part(0, [group], [spec()], devices=devices)
        return
    with pytest.raises(ValueError, match=reason):
        check_part(0, [group], [spec()], devices=devices)


@pytest.mark.parametrize("known", [True, False])
def test_each_memory_has_an_order_of_its_own(known: bool) -> None:
    devices, ends = [A, B], ({0: 24, 1: 24} if known else None)
    before = [GroupSpec(0, 24), GroupSpec(0, 24, 1)]

    def check(group: GroupSpec) -> None:
        check_part(
            24, [group], [spec("v", group=2)], devices=devices, groups_before=before, names_before={"w", "x"},
            ends=dict(ends) if ends is not None else None,
        )  # fmt: skip

    check(GroupSpec(0, 24, 2))
    for group in (GroupSpec(0, 24), GroupSpec(0, 24, 1)):
        with pytest.raises(ValueError, match="overlap"):
            check(group)


def test_names_are_unique_across_parts() -> None:
    with pytest.raises(ValueError, match="one name"):
        check_part(24, GROUP, [spec(), spec()])
    with pytest.raises(ValueError, match="one name"):
        check_part(24, [], [spec()], groups_before=GROUP, names_before={"w"})
    check_part(24, [], [spec("v")], groups_before=GROUP, names_before={"w"})


def test_groups_do_not_overlap_across_parts() -> None:
    with pytest.raises(ValueError, match="overlap"):
        check_part(128, GROUP, [spec("v", group=1)], groups_before=GROUP, names_before={"w"})


@pytest.mark.parametrize("count", [0, 1, PART_TENSORS, PART_TENSORS + 1, 3 * PART_TENSORS])
def test_parts_travel_and_pass_the_check_one_by_one(count: int) -> None:
    manifest = many(count)
    parts = manifest_parts(manifest, 7)
    groups: list[GroupSpec] = []
    tensors: list[TensorSpec] = []
    for number, part in enumerate(parts):
        received = decode_bus_down(encode(part))
        assert isinstance(received, ManifestPart)
        assert (received.part, received.parts, received.layout) == (number, len(parts), manifest.digest)
        check_part(
            received.nbytes, received.groups, received.tensors,
            groups_before=groups, names_before={spec.name for spec in tensors},
        )  # fmt: skip
        groups += received.groups
        tensors += received.tensors
    assert make_manifest(manifest.nbytes, tuple(groups), tuple(tensors)) == manifest


def test_a_later_part_may_refer_to_an_earlier_group() -> None:
    specs = [spec(f"w{index}", group=0) for index in range(PART_TENSORS + 1)]
    first, second = manifest_parts(make_manifest(24, GROUP, tuple(specs)), 7)
    assert (first.groups, second.groups) == (GROUP, ())


def test_the_largest_part_is_far_below_the_limit() -> None:
    big = (1 << 62,) * 32
    specs = tuple(spec("ü" * 508 + f"{index:08}", size=big, stride=big, group=index) for index in range(PART_TENSORS))
    groups = (GroupSpec(1 << 45, 1 << 45),) * PART_TENSORS
    (part,) = manifest_parts(make_manifest(1 << 46, groups, specs), (1 << 63) - 1)
    assert len(encode(part)) < MAX_MESSAGE_BYTES // 4


def test_negative_numbers_do_not_decode() -> None:
    (part,) = manifest_parts(make_manifest(24, GROUP, (spec(size=(-2, -3)),)), 7)
    with pytest.raises(DecodeError):
        decode_bus_down(encode(part))


def test_a_check_does_not_hold_a_loop() -> None:
    manifest = many(PART_TENSORS)
    took = []
    for _ in range(5):
        start = time.perf_counter()
        check_part(manifest.nbytes, manifest.groups, manifest.tensors)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.02  # aim: 3 ms; the machine may be busy
