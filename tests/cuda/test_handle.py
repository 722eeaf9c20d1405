"""What travels: torch's tuple as named fields, and every bound that torch itself does not check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from busync import wire
from busync.errors import AttachError, DeviceError
from busync.handles import cuda
from busync.handles.cuda import PARAMETERS, REBUILD, CudaHandle
from busync.manifest import MAX_SEGMENT_BYTES

NBYTES = 4096
BUFFER = cuda.buffer_bytes(NBYTES)
UUID = "63756461-656d-7500-0000-000000000001"
CANARY = bytes(range(32))

#: As torch 2.14.1 gave it for a flat buffer, on emulated devices; torch 2.6 to 2.13 have the same layout.
RECORDED: tuple[Any, ...] = (
    torch.Tensor, torch.Size([BUFFER]), (1,), 0, torch.storage.TypedStorage, torch.uint8, 0,
    b"\x03cHMEML8\x00\x00\x03\x00\x00\x00\x00\x00\x00\x00\x949" + bytes(46), BUFFER, 0, False,
    b"/torch_14412_701921205_0", 0, b"HNVEL8\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x01" + bytes(47), True,
)  # fmt: skip
HANDLE = cuda.name_fields((REBUILD, RECORDED), UUID, BUFFER, CANARY)


def reduced(**changes: object) -> tuple[object, tuple[Any, ...]]:
    named = dict(zip(PARAMETERS, RECORDED, strict=True)) | changes
    return REBUILD, tuple(named[name] for name in PARAMETERS)


def sent(**changes: object) -> dict[str, object]:
    return {**cuda.encode_handle(HANDLE), **changes}


# The way there and back


def test_the_recorded_tuple_comes_back_with_the_readers_own_index() -> None:
    decoded = cuda.decode_handle(3, NBYTES, cuda.encode_handle(HANDLE))
    assert decoded == HANDLE
    assert cuda.torch_arguments(decoded, 1) == (*RECORDED[:6], 1, *RECORDED[7:])


def test_no_index_travels() -> None:
    assert cuda.name_fields(reduced(storage_device=5), UUID, BUFFER, CANARY) == HANDLE


def test_a_handle_is_plain_values_on_the_wire() -> None:
    message = wire.Announce(
        incarnation=1, number=1, lease=1, version=1, layout=bytes(16), segment=1, label="", published_at=0.0,
        values=cuda.encode_handle(HANDLE),
    )  # fmt: skip
    arrived = wire.decode_bus_down(wire.encode(message))
    assert isinstance(arrived, wire.Announce)
    assert cuda.decode_handle(1, NBYTES, arrived.values) == HANDLE


handles = st.builds(
    CudaHandle,
    device=st.uuids().map(str),
    memory=st.binary(min_size=64, max_size=64).map(lambda tail: b"\x00c" + tail),
    nbytes=st.just(BUFFER),
    offset=st.integers(0, MAX_SEGMENT_BYTES // 512).map(lambda n: 512 * n),
    counter=st.tuples(*[st.integers(0, 2**31)] * 3).map(lambda n: b"/torch_%d_%d_%d" % n),
    slot=st.integers(0, 9999),
    event=st.binary(min_size=64, max_size=64),
    event_sync=st.booleans(),
    canary=st.binary(min_size=32, max_size=32),
)


@settings(deadline=None, derandomize=True)
@given(handles)
def test_every_valid_handle_survives_the_way(handle: CudaHandle) -> None:
    assert cuda.decode_handle(1, NBYTES, cuda.encode_handle(handle)) == handle


@settings(deadline=None, derandomize=True)
@given(handles, st.integers(0, 7))
def test_torch_gets_what_torch_gave(handle: CudaHandle, index: int) -> None:
    arguments = cuda.torch_arguments(handle, index)
    assert cuda.name_fields((REBUILD, arguments), handle.device, BUFFER, handle.canary) == handle
    assert arguments[6] == index


# What is refused

BAD: list[tuple[str, object]] = [
    ("device", "0"), ("device", "GPU-" + UUID), ("device", UUID.upper()), ("device", UUID + "0"), ("device", 0),
    ("memory", HANDLE.memory[:-1]), ("memory", HANDLE.memory + b"\x00"), ("memory", b""), ("memory", HANDLE.memory[2:]),
    ("memory", b"\x03e" + bytes(64)), ("memory", b"\x03\x00" + bytes(64)), ("memory", None), ("memory", "c" * 66),
    ("nbytes", BUFFER - 1), ("nbytes", BUFFER + 1), ("nbytes", -1), ("nbytes", 1 << 63), ("nbytes", float(BUFFER)),
    ("offset", -512), ("offset", 1), ("offset", 1 << 62), ("offset", MAX_SEGMENT_BYTES + 512), ("offset", False),
    ("counter", b""), ("counter", b"/torch_1_2"), ("counter", b"/torch_1_2_3/../x"), ("counter", b"torch_1_2_3"),
    ("counter", b"/../torch_1_2_3"), ("counter", b"/torch_1_2_3\n"), ("counter", b"/torch_1_2_3\x00"),
    ("counter", b"/torch_-1_2_3"), ("counter", None), ("counter", "/torch_1_2_3"), ("counter", b"/torch_" + b"1" * 99),
    ("slot", -1), ("slot", 10_000), ("slot", 1 << 64), ("slot", True),
    ("event", bytes(63)), ("event", bytes(65)), ("event", b""), ("event", None),
    ("event_sync", 1), ("event_sync", None),
    ("canary", bytes(31)), ("canary", b""), ("canary", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value)[:30])
def test_a_field_out_of_bounds_never_reaches_torch(name: str, value: object) -> None:
    with pytest.raises(AttachError, match="segment 9 cannot be attached: its handle"):
        cuda.decode_handle(9, NBYTES, sent(**{name: value}))


@pytest.mark.parametrize("name", [field.name for field in fields(CudaHandle)])
def test_a_field_that_is_missing_is_refused(name: str) -> None:
    values = sent()
    del values[name]
    with pytest.raises(AttachError, match=name):
        cuda.decode_handle(9, NBYTES, values)


def test_unknown_fields_are_ignored_as_everywhere() -> None:
    assert cuda.decode_handle(9, NBYTES, sent(later=1)) == HANDLE


@pytest.mark.parametrize("nbytes", [0, -1, MAX_SEGMENT_BYTES + 1, NBYTES + 4096])
def test_a_handle_of_another_size_than_was_announced_is_refused(nbytes: int) -> None:
    with pytest.raises(AttachError, match=r"impossible size|bytes where"):
        cuda.decode_handle(9, nbytes, sent())


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()


@settings(deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from([field.name for field in fields(CudaHandle)]), scalars))
def test_whatever_comes_is_a_good_handle_or_an_error_of_ours(changes: dict[str, object]) -> None:
    try:
        handle = cuda.decode_handle(9, NBYTES, sent(**changes))
    except AttachError:
        return
    assert type(handle.slot) is int
    assert 0 <= handle.slot < 10_000
    assert len(handle.memory) == 66
    assert handle.memory[1:2] == b"c"
    assert len(handle.event) == 64
    assert handle.nbytes == BUFFER
    assert 0 <= handle.offset <= MAX_SEGMENT_BYTES


# What torch may turn into


def test_the_installed_torch_is_known() -> None:
    assert cuda.LAYOUT_PROBLEM == ""


def _changed(edit: Callable[[list[str]], object]) -> Callable[..., None]:
    names = list(PARAMETERS)
    edit(names)
    space: dict[str, Any] = {}
    exec(f"def rebuild({', '.join(names)}): ...", space)
    return space["rebuild"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda names: names.append("ipc_flags"), r"adds \['ipc_flags'\]"),
        (lambda names: names.remove("event_handle"), r"lacks \['event_handle'\]"),
        (lambda names: names.insert(6, names.pop()), "another order"),
    ],
)
def test_another_signature_refuses_gpus_with_the_cause(edit: Callable[[list[str]], object], said: str) -> None:
    problem = cuda.layout_problem(_changed(edit))
    with pytest.raises(DeviceError, match=said) as caught:
        cuda.ensure_layout(UUID, problem)
    assert torch.__version__ in caught.value.reason
    assert "publish CPU tensors" in caught.value.remedy
    assert caught.value.device == UUID


def test_a_torch_without_the_function_is_refused() -> None:
    assert "no function" in cuda.layout_problem(None)


@pytest.mark.parametrize(
    "given",
    [
        None, (REBUILD,), (print, RECORDED), (REBUILD, RECORDED[:-1]), (REBUILD, (*RECORDED, 0)),
        (REBUILD, list(RECORDED)), reduced(dtype=torch.float32), reduced(tensor_offset=1), reduced(tensor_size=(3,)),
        reduced(requires_grad=True), reduced(storage_handle=None), reduced(event_handle=None),
        reduced(ref_counter_handle=None), reduced(ref_counter_offset=None), reduced(event_sync_required=None),
        reduced(storage_size_bytes=BUFFER + 1), reduced(storage_handle=bytes(64)),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_another_tuple_is_refused_and_never_shifted(given: object) -> None:
    with pytest.raises(DeviceError) as caught:
        cuda.name_fields(given, UUID, BUFFER, CANARY)
    assert caught.value.device == UUID


def test_expandable_segments_are_refused_with_the_setting() -> None:
    with pytest.raises(DeviceError, match=r"expandable segments.*expandable_segments:False"):
        cuda.name_fields(reduced(storage_handle=b"\x03e" + bytes(64)), UUID, BUFFER, CANARY)
    with pytest.raises(AttachError, match="expandable_segments:False"):
        cuda.decode_handle(9, NBYTES, sent(memory=b"\x03e" + bytes(64)))


@pytest.mark.parametrize("nbytes", [1, 255, 256, 257, 4096, 10**9])
def test_the_canary_lies_behind_the_segment(nbytes: int) -> None:
    start = cuda.canary_offset(nbytes)
    assert start >= nbytes
    assert start % 256 == 0
    assert start + 32 <= cuda.buffer_bytes(nbytes)


def test_handles_are_values() -> None:
    assert replace(HANDLE) == HANDLE
    assert hash(HANDLE) == hash(replace(HANDLE))
