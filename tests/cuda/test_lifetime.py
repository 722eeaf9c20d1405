"""From export to the end of the last tensor, with the production handles on a fake GPU."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from busync import forks
from busync.errors import AllocationError, AttachError, ClosedError, DeviceError, ForkedError
from busync.handles import cuda_reader
from busync.handles.cuda import CudaHandle, buffer_bytes
from busync.handles.cuda_import import CudaImporter, ReceivedSegment
from busync.handles.cuda_memory import WORN_EXPORTS, CudaExporter
from busync.handles.cuda_reader import Reader
from tests.cuda import worlds
from tests.cuda.fake import FakeGpu, FakeProcess, FakeStream
from tests.cuda.worlds import (
    MANIFEST,
    NBYTES,
    FakeReader,
    PublisherSide,
    ReaderSide,
    broadcast,
    plan,
    settle,
    shows,
    state,
)


def world(readers: int = 1) -> tuple[FakeGpu, PublisherSide, list[ReaderSide]]:
    gpu = FakeGpu()
    return gpu, PublisherSide(gpu.process()), [ReaderSide(gpu.process()) for _ in range(readers)]


# The whole way


@pytest.mark.parametrize("readers", [1, 2, 3, 8])
def test_every_version_reaches_every_reader_and_everything_comes_back(readers: int) -> None:
    gpu, publisher, sides = world(readers)
    broadcast(gpu, publisher, sides, rounds=6)


def test_exports_openings_and_closings_are_one_to_one_to_one() -> None:
    gpu, publisher, sides = world(4)
    broadcast(gpu, publisher, sides, rounds=20)
    assert len(gpu.opened_on) == 4 * 2  # readers times segments, however many versions


def test_nothing_grows_over_a_thousand_versions_with_one_reader_killed_and_replaced() -> None:
    gpu, publisher, (one, two) = world(2)
    segments = {number: publisher.segment() for number in (1, 2)}
    sides, before = [one, two], publisher.process.allocated
    for version in range(1, 1001):
        number = 1 + version % 2
        publisher.write(segments[number], version % 256)
        if version == 400:
            two.process.kill()
            assert [export.reader for export in publisher.exporter.reap()] == [two.reader] * 2
            sides = [one, ReaderSide(gpu.process())]
        for side in sides:
            if number not in side.segments:
                side.receive(number, segments[number].export(side.reader))
            assert shows(side.tensors(number, version), version % 256)
    assert publisher.process.allocated == before
    assert publisher.process.events == 6
    assert len(publisher.exporter.outstanding()) == 4
    assert gpu.trouble == []
    for side in sides:
        side.settle()
        side.close()


def test_tensors_are_as_they_were_published() -> None:
    _, publisher, (side,) = world()
    segment = publisher.segment()
    source = {
        "t": torch.arange(12.0).reshape(3, 4).t(),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "bools": torch.tensor([True, False, True]),
        "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "none": torch.zeros(0, 4),
    }
    planned = plan(source)
    manifest = planned.manifest
    segment.write(planned, []).synchronize()
    side.receive(1, segment.export(side.reader))
    builder = side.map(1, 1, manifest)
    for spec in manifest.tensors:
        made = builder.build(spec)
        assert torch.equal(made, source[spec.name])
        assert made.stride() == source[spec.name].stride()
        assert made.dtype is source[spec.name].dtype
    del made
    builder.drop()
    with pytest.raises(ClosedError):
        builder.build(manifest.tensors[0])
    with pytest.raises(ClosedError):
        builder.address()
    settle(lambda: side.released == [1])
    side.close()


# The end of a version


def test_a_version_ends_with_its_last_view() -> None:
    _, publisher, (side,) = world()
    side.receive(1, publisher.segment().export(side.reader))
    builder = side.map(1, 7)
    view = builder.build(MANIFEST.tensors[0])[2:4].t()
    builder.drop()
    assert builder.live_names() == ["w"]
    gc.collect()
    assert side.released == []
    del view
    settle(lambda: side.released == [7])
    assert builder.live_names() == []
    side.close()


def test_it_ends_without_the_collector_and_not_before_a_cycles_finalizers() -> None:
    _, publisher, (side,) = world()
    side.receive(1, publisher.segment().export(side.reader))
    seen: list[int] = []

    class Cycle:
        def __init__(self) -> None:
            self.me, self.tensors = self, side.tensors(1, 1)

        def __del__(self) -> None:
            seen.append(len(side.released))

    gc.disable()
    try:
        plain = side.tensors(1, 0)
        del plain
        settle_without_collector(side, [0])
        cycle = Cycle()
        del cycle
    finally:
        gc.enable()
    gc.collect()
    settle(lambda: side.released == [0, 1])
    assert seen == [1]  # only version 0 had been released when the finalizer looked
    side.close()


def settle_without_collector(side: ReaderSide, released: list[int]) -> None:
    import time

    stop_at = time.monotonic() + 5
    while side.released != released:
        assert time.monotonic() < stop_at
        time.sleep(0.001)


def test_what_was_queued_on_any_stream_is_done_before_the_release() -> None:
    assert read_late(CudaImporter) == 1


def test_tests_notice_a_release_before_the_streams() -> None:
    assert read_late(worlds.ReleasesBeforeTheStreams) == 2


def read_late(importer: type[CudaImporter]) -> float:
    """Queue a read on a stream, drop the tensors; at the release the publisher writes. What was read?"""
    gpu = FakeGpu()
    publisher, side = PublisherSide(gpu.process()), ReaderSide(gpu.process(), importer)
    segment = publisher.segment()
    publisher.write(segment, 1)
    side.receive(1, segment.export(side.reader))
    tensors, mine = side.tensors(1, 1), torch.zeros(8, 4)
    stream = side.process.stream(0)
    address = tensors["w"].data_ptr()
    assert isinstance(stream, FakeStream)
    stream.queue(lambda: mine.copy_(at(address)))  # as a GPU's queue knows it: it keeps no version alive
    del tensors
    settle(lambda: side.released == [1])
    publisher.write(segment, 2)
    side.process.synchronize(0)
    side.close()
    return float(mine[0, 0])


def at(address: int) -> torch.Tensor:
    import ctypes

    return torch.frombuffer((ctypes.c_float * 32).from_address(address), dtype=torch.float32).reshape(8, 4)


def test_a_device_that_does_not_answer_releases_nothing(caplog: pytest.LogCaptureFixture) -> None:
    _, publisher, (side,) = world()
    side.receive(1, publisher.segment().export(side.reader))

    def broken(index: int) -> None:
        raise RuntimeError("device lost")

    side.process.synchronize = broken  # type: ignore[method-assign]
    side.tensors(1, 1)
    settle(lambda: side.importer._uses == 0)
    assert side.released == []
    assert "could not be released" in caplog.text
    side.close()


# Loads


def test_a_load_is_over_when_its_copies_are_done() -> None:
    _, publisher, (side,) = world()
    segment = publisher.segment()
    publisher.write(segment, 3)
    side.receive(1, segment.export(side.reader))
    mine, stream = torch.zeros(8, 4), side.process.stream(0)
    with side.segments[1].load(MANIFEST) as builder:
        stream.copy(mine, builder.build(MANIFEST.tensors[0]))
        assert builder.build(MANIFEST.tensors[2]).shape == (0, 3)
        assert mine[0, 0] == 0
    assert bool((mine == 3).all())
    with pytest.raises(ClosedError):
        builder.build(MANIFEST.tensors[0])
    assert side.released == []  # a load makes no use: its lease is the caller's
    side.close()
    assert list(publisher.process.gpu.counters.values()) == [0]


def test_a_load_that_fails_waits_for_what_it_queued() -> None:
    _, publisher, (side,) = world()
    side.receive(1, publisher.segment().export(side.reader))
    with pytest.raises(KeyError), side.segments[1].load(MANIFEST):
        raise KeyError
    assert side.process.syncs == 1
    side.close()


def test_a_reader_of_another_device_copies_and_never_uses_in_place() -> None:
    gpu = FakeGpu()
    publisher, side = PublisherSide(gpu.process()), ReaderSide(gpu.process(visible=[1]))
    segment = publisher.segment()
    publisher.write(segment, 4)
    side.receive(1, segment.export(side.reader), on=gpu.devices[1])
    with side.segments[1].load(MANIFEST) as builder:
        assert bool((builder.build(MANIFEST.tensors[0]) == 4).all())
    assert gpu.opened_on == [(gpu.devices[0], gpu.devices[1])]  # through its own, and no context on the other
    assert side.segments[1].foreign
    with pytest.raises(AssertionError, match="in place on another device"):
        side.map(1, 1)
    side.close()
    segment.drop()
    publisher.exporter.reap()
    assert publisher.process.allocated == 0
    assert gpu.trouble == []


# The end of an import


def test_versions_in_use_keep_the_import_beyond_the_session() -> None:
    gpu, publisher, (side,) = world()
    segment = publisher.segment()
    publisher.write(segment, 3)
    side.receive(1, segment.export(side.reader))
    tensors = side.tensors(1, 3)
    side.close()
    segment.drop()
    publisher.exporter.reap()
    assert publisher.process.allocated > 0
    assert shows(tensors, 3)
    del tensors
    settle(lambda: side.released == [3])
    settle(lambda: publisher.exporter.reap() == [] and publisher.process.allocated == 0)
    assert gpu.trouble == []


def test_a_segment_that_was_never_opened_is_given_back_with_the_session() -> None:
    gpu, publisher, (side,) = world()
    segment = publisher.segment()
    side.receive(1, segment.export(side.reader))
    side.close()
    side.close()
    with pytest.raises(AttachError, match="before it was opened"):
        open_closed(side, segment.export(side.reader))
    segment.drop()
    publisher.exporter.reap()
    assert publisher.process.allocated == 0
    assert gpu.trouble == []


def open_closed(side: ReaderSide, handle: CudaHandle) -> None:
    received = side.receive(1, handle)
    received.close()
    received.open()


def test_two_sessions_of_one_process_share_one_import() -> None:
    gpu, publisher, (side,) = world()
    segment = publisher.segment()
    publisher.write(segment, 5)
    first = side.receive(1, segment.export(side.reader))
    second = side.receive(2, segment.export(side.reader))
    assert first.open() is second.open()
    assert sorted(gpu.counters.values()) == [0, 1]
    assert len(gpu.opened_on) == 1
    first.close()
    assert shows(side.tensors(2, 5), 5)
    settle(lambda: side.released == [5])
    second.close()
    segment.drop()
    publisher.exporter.reap()
    assert publisher.process.allocated == 0
    assert gpu.trouble == []


def test_a_subscriber_in_the_publishers_process_gets_the_original_memory() -> None:
    gpu = FakeGpu()
    process = gpu.process()
    publisher, side = PublisherSide(process), ReaderSide(process)
    side.importer = CudaImporter(publisher.exporter)  # one exporter per process
    segment = publisher.segment()
    publisher.write(segment, 4)
    side.receive(1, segment.export(FakeReader(process.number, 1, "me", process=process)))
    tensors = side.tensors(1, 4)
    assert shows(tensors, 4)
    assert tensors["w"].data_ptr() == segment.flat.data_ptr() + MANIFEST.groups[0].offset_bytes
    assert gpu.opened_on == []
    segment.drop()
    assert process.allocated > 0
    del tensors
    settle(lambda: side.released == [4])
    side.close()
    gc.collect()
    publisher.exporter.reap()
    assert process.allocated == 0
    assert gpu.trouble == []


# Readers that fail


@pytest.mark.parametrize("when", ["before it opened", "after it opened", "while it reads"])
def test_a_killed_reader_costs_nothing(when: str) -> None:
    gpu, publisher, (dead, living) = world(2)
    segment = publisher.segment()
    publisher.write(segment, 1)
    dead.receive(1, segment.export(dead.reader))
    living.receive(1, segment.export(living.reader))
    tensors = living.tensors(1, 1)
    kept: list[object] = []
    if when != "before it opened":
        kept.append(dead.segments[1].open())
    if when == "while it reads":
        kept.append(dead.tensors(1, 1))
    dead.process.kill()
    segment.drop()
    assert [str(export.reader) for export in publisher.exporter.reap()] == [str(dead.reader)]
    assert publisher.exporter.reap() == []
    assert publisher.process.allocated > 0  # the other one reads
    assert shows(tensors, 1)
    del tensors
    living.close()
    settle(lambda: publisher.exporter.reap() == [] and publisher.process.allocated == 0)
    assert gpu.trouble == []
    kept.clear()
    dead.close()
    settle(lambda: dead.importer._uses == 0)


def test_a_living_reader_is_never_counted_down() -> None:
    _, publisher, (side,) = world()
    segment = publisher.segment()
    side.receive(1, segment.export(side.reader))
    segment.drop()
    for _ in range(3):
        assert publisher.exporter.reap() == []
    assert [export.reader for export in publisher.exporter.outstanding()] == [side.reader]
    assert publisher.process.allocated > 0
    side.close()
    publisher.exporter.reap()
    assert publisher.process.allocated == 0


def test_a_reader_that_cannot_open_says_why_and_gives_back() -> None:
    gpu = FakeGpu()
    publisher, other = PublisherSide(gpu.process()), ReaderSide(gpu.process(visible=[1]))
    segment = publisher.segment()
    received = other.receive(1, segment.export(other.reader))
    for _ in range(2):  # there is no second try
        with pytest.raises(AttachError, match=r"does not see it; it sees .* \(cuda:0\)") as caught:
            received.open()
    assert publisher.device in str(caught.value)
    assert gpu.devices[1] in str(caught.value)
    assert list(gpu.counters.values()) == [0]
    other.close()
    segment.drop()
    publisher.exporter.reap()
    assert publisher.process.allocated == 0
    assert gpu.trouble == []


def test_masks_renumber_devices_and_nobody_is_confused() -> None:
    gpu = FakeGpu()
    publisher = PublisherSide(gpu.process(visible=[1]))
    sides = [ReaderSide(gpu.process(visible=order)) for order in ([0, 1], [1, 0], [1])]
    broadcast(gpu, publisher, sides)


def test_a_device_that_shows_something_else_is_noticed() -> None:
    gpu, publisher, (side,) = world()
    segment = publisher.segment()
    received = side.receive(1, segment.export(side.reader))
    rebuild = side.process.rebuild
    side.process.rebuild = lambda arguments: rebuild(arguments).clone().zero_()  # type: ignore[method-assign]
    with pytest.raises(AttachError, match="does not show what the publisher wrote"):
        received.open()
    segment.drop()
    publisher.exporter.reap()
    assert publisher.process.allocated == 0
    assert gpu.trouble == []


@pytest.mark.parametrize(
    ("message", "error"), [("invalid resource handle", RuntimeError), ("bad", ValueError), ("", TypeError)]
)
def test_what_torch_says_is_passed_on(message: str, error: type[Exception]) -> None:
    _, publisher, (side,) = world()
    received = side.receive(1, publisher.segment().export(side.reader))

    def broken(arguments: object) -> torch.Tensor:
        raise error(message)

    side.process.rebuild = broken  # type: ignore[method-assign]
    with pytest.raises(AttachError, match=f"segment 1 cannot be attached: cuda:0 cannot open it \\({message}"):
        received.open()


def test_a_publisher_that_is_gone_leaves_an_error_and_no_crash() -> None:
    gpu, publisher, (side,) = world()
    segment = publisher.segment()
    publisher.write(segment, 2)
    handle = segment.export(side.reader)
    side.receive(1, segment.export(side.reader))
    tensors = side.tensors(1, 2)
    publisher.process.kill()
    gpu.counters.clear()
    assert shows(tensors, 2)
    del tensors
    side.close()
    settle(lambda: side.released == [2])
    with pytest.raises(AttachError, match="invalid resource handle"):
        side.receive(2, handle).open()


def test_a_segment_beyond_the_device_is_not_opened() -> None:
    _, publisher, (side,) = world()
    received = side.receive(1, publisher.segment().export(side.reader))
    side.process.total_bytes = lambda index: 100  # type: ignore[method-assign]
    with pytest.raises(AttachError, match="has no"):
        received.open()


# The probe


def test_a_process_without_a_usable_device_says_so() -> None:
    process = FakeGpu().process()
    process.why = "torch finds no CUDA device here"
    with pytest.raises(DeviceError, match=r"no CUDA device here; publish CPU tensors"):
        CudaExporter(process).create(process.visible[0], NBYTES)


def refused(process: FakeProcess) -> DeviceError:
    try:
        CudaExporter(process).create(process.visible[0], NBYTES)
    except DeviceError as error:
        said = error.args
    assert said[0] == process.visible[0]
    gc.collect()
    process.collect()
    assert process.allocated == 0
    return DeviceError(*said)


def test_expandable_segments_are_found() -> None:
    process = FakeGpu().process()
    process.memory_type = b"e"
    with pytest.raises(DeviceError, match="expandable_segments:False"):
        CudaExporter(process).create(process.visible[0], NBYTES)


def test_a_disabled_caching_allocator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    process = FakeGpu().process()
    process.caching = False
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert "unset PYTORCH_NO_CUDA_MEMORY_CACHING" in refused(process).remedy
    with pytest.raises(DeviceError) as kept:
        CudaExporter(process).create(process.visible[0], NBYTES)
    assert process.allocated == 0  # also for whoever keeps the error
    del kept


def fails(message: str) -> None:
    raise RuntimeError(message)


def test_an_allocator_that_cannot_export_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    process = FakeGpu().process()
    process.share = lambda: fails("cudaMallocAsync does not yet support shareIpcHandle.\nmore")
    process.allocator = lambda: "cudaMallocAsync"  # type: ignore[method-assign]
    error = refused(process)
    assert "does not yet support shareIpcHandle.)" in error.reason
    assert "cudaMallocAsync" in error.remedy


def test_the_setting_for_expandable_segments_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    process = FakeGpu().process()
    process.share = lambda: fails("no")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:1, expandable_segments:True")
    assert "expandable_segments:False" in refused(process).remedy


def test_a_probe_that_cannot_be_allocated_is_a_refusal() -> None:
    process = FakeGpu().process()
    process.allocate = lambda index, nbytes: fails("operation not supported")  # type: ignore[method-assign,assignment,return-value]
    assert "could not be allocated (operation not supported)" in refused(process).reason


def test_counting_in_another_way_is_a_refusal() -> None:
    process = FakeGpu().process()
    process.count = lambda counter, slot: 1  # type: ignore[method-assign]
    assert "counts the openings of an export as [1, 1]" in refused(process).reason


def test_a_full_device_is_an_allocation_error_and_leaves_nothing() -> None:
    _, publisher, _ = world()
    with pytest.raises(AllocationError):
        publisher.segment(1 << 40)
    assert publisher.process.allocated == 0


def test_the_probe_is_made_once_per_device() -> None:
    gpu = FakeGpu()
    process = gpu.process()
    exporter = CudaExporter(process)
    made = [exporter.create(device, NBYTES) for device in (*gpu.devices, *gpu.devices)]
    assert process.given_out == 2 + 4
    assert [exporter.device(segment.index) for segment in made] == [*gpu.devices, *gpu.devices]


# Copies


def test_copies_wait_for_what_the_caller_queued() -> None:
    _, publisher, (side,) = world()
    segment, weights = publisher.segment(), state(1)
    training = publisher.process.current
    for tensor in weights.values():
        training.copy(tensor, torch.full_like(tensor, 2))  # queued on the caller's stream, and not done yet
    moment = segment.write(plan(weights), [publisher.process.mark(0)])
    moment.synchronize()
    side.receive(1, segment.export(side.reader))
    assert shows(side.tensors(1, 1), 2)
    settle(lambda: side.released == [1])
    side.close()


def test_without_waiting_the_old_values_would_travel() -> None:
    _, publisher, _ = world()
    segment, weights = publisher.segment(), state(1)
    publisher.process.current.copy(weights["w"], torch.full((8, 4), 2.0))
    segment.write(plan(weights), []).synchronize()
    assert segment.flat[:4].view(torch.float32).item() == 1


def test_nothing_is_written_before_somebody_waits() -> None:
    _, publisher, _ = world()
    segment = publisher.segment()
    publisher.write(segment, 1)
    moment = segment.write(plan(state(2)), [])
    assert segment.flat[:4].view(torch.float32).item() == 1
    moment.synchronize()
    assert segment.flat[:4].view(torch.float32).item() == 2


def test_a_copy_never_leaves_its_segment() -> None:
    _, publisher, _ = world()
    segment = publisher.segment(64)
    with pytest.raises(AssertionError, match="out of the segment"):
        segment.write(plan(state(1)), [])


def test_a_segment_wears_out_before_torch_runs_out_of_events() -> None:
    _, publisher, _ = world()
    segment = publisher.segment()
    reader = FakeReader(1, 1, process=publisher.process)
    for _ in range(WORN_EXPORTS - 1):
        segment.export(reader)
    assert not segment.worn
    segment.export(reader)
    assert segment.worn


def test_a_wrong_count_is_said_and_not_mended(caplog: pytest.LogCaptureFixture) -> None:
    _, publisher, (side,) = world()
    segment = publisher.segment()
    handle = segment.export(side.reader)
    publisher.process.gpu.counters[handle.counter, handle.slot] = 2
    assert publisher.exporter.reap() == []
    assert publisher.exporter.outstanding() == []
    assert "counts 2 openings" in caplog.text


# Processes and forks


def test_a_reader_is_gone_when_its_process_is() -> None:
    here = Reader.of(os.getpid(), "me")
    assert not here.gone
    assert str(here) == f"me (pid {os.getpid()})"
    pid = os.fork()
    if not pid:
        os._exit(0)
    child = Reader.of(pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert child.gone  # a zombie has nothing open
    os.waitpid(pid, 0)
    assert child.gone
    assert Reader.of(pid).gone
    assert Reader(os.getpid(), here.started + 1).gone  # another process with this number


def test_a_reader_that_cannot_be_seen_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Reader.of(0).gone  # what another PID namespace's processes read as
    monkeypatch.setattr(cuda_reader, "_state", lambda pid: None)  # /proc with hidepid
    hidden = Reader.of(os.getpid())
    assert not hidden.gone
    assert not Reader.of(1).gone
    pid = os.fork()
    if not pid:
        os._exit(0)
    child = Reader.of(pid)
    os.waitpid(pid, 0)
    assert child.gone
    monkeypatch.undo()
    assert not hidden.gone


def test_memory_that_is_open_is_not_taken_for_another_size() -> None:
    _, publisher, (side,) = world()
    segment = publisher.segment()
    first, handle = side.receive(1, segment.export(side.reader)), segment.export(side.reader)
    first.open()
    other = buffer_bytes(NBYTES + 4096)
    second = ReceivedSegment(side.importer, 2, replace(handle, nbytes=other), NBYTES + 4096)
    with pytest.raises(AttachError, match="open here with 4096 bytes"):
        second.open()
    assert sorted(publisher.process.gpu.counters.values()) == [0, 1]
    side.close()


def test_a_subscriber_at_home_is_told_when_the_segment_is_gone() -> None:
    process = FakeGpu().process()
    publisher, side = PublisherSide(process), ReaderSide(process)
    side.importer = CudaImporter(publisher.exporter)
    segment = publisher.segment()
    received = side.receive(1, segment.export(FakeReader(process.number, 1, "me", process=process)))
    segment.drop()
    with pytest.raises(AttachError, match="has dropped it"):
        received.open()
    publisher.exporter.reap()
    assert process.allocated == 0


def test_a_forked_child_frees_and_counts_nothing(tmp_path: Path) -> None:
    gpu, publisher, (side,) = world()
    segment = publisher.segment()
    publisher.write(segment, 6)
    side.receive(1, segment.export(side.reader))
    tensors, other = side.tensors(1, 6), publisher.segment()
    before = publisher.process.allocated
    pid = os.fork()
    if not pid:
        try:
            del tensors
            side.segments.clear()
            segment.drop()
            other.drop()
            gc.collect()
            said = []
            for call in (publisher.exporter.reap, lambda: publisher.exporter.create(publisher.device, 64)):
                try:
                    call()
                except ForkedError:
                    said.append("forked")
            kept = publisher.process.allocated == before and not side.importer._ended
            text = f"{said} {side.released} {list(gpu.counters.values())} {kept}"
            (tmp_path / "child").write_text(text)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "child").read_text() == "['forked', 'forked'] [] [1] True"
    assert shows(tensors, 6)
    del tensors
    settle(lambda: side.released == [6])
    side.close()


def test_objects_are_registered_for_forks() -> None:
    _, publisher, (side,) = world()
    assert publisher.exporter in forks._registered
    assert side.importer in forks._registered


# Tests of these tests: each of these would be a fault, and must be found


@pytest.mark.parametrize("readers", [2, 3])
def test_one_export_for_all_readers_is_found(readers: int) -> None:
    gpu = FakeGpu()
    publisher = PublisherSide(gpu.process(), worlds.OneExportForAll)
    sides = [ReaderSide(gpu.process()) for _ in range(readers)]
    with pytest.raises(AssertionError, match=r"went below zero|had open"):
        broadcast(gpu, publisher, sides)


def test_a_release_with_the_snapshot_is_found() -> None:
    gpu = FakeGpu()
    publisher, side = PublisherSide(gpu.process()), ReaderSide(gpu.process(), worlds.ReleasesWithTheSnapshot)
    with pytest.raises(AssertionError, match="released while its tensors were there"):
        broadcast(gpu, publisher, [side])
    settle(lambda: side.importer._uses == 0)


def test_an_index_instead_of_the_uuid_is_found() -> None:
    gpu = FakeGpu()
    publisher = PublisherSide(gpu.process())
    side = ReaderSide(gpu.process(visible=[1, 0]), worlds.OpensByIndex)
    with pytest.raises(AssertionError, match="opened on another device"):
        broadcast(gpu, publisher, [side])
    settle(lambda: side.importer._uses == 0)


def test_an_opening_per_version_is_found() -> None:
    gpu = FakeGpu()
    publisher, side = PublisherSide(gpu.process()), ReaderSide(gpu.process(), worlds.OpensAgain)
    segment = publisher.segment()
    received = side.receive(1, segment.export(side.reader))
    kept = [side.importer.open(1, received.handle, NBYTES, received.handle.device) for _ in range(2)]
    kept.clear()
    gc.collect()
    assert "went below zero" in gpu.trouble[0]
    received._closed = True  # its export has been counted down already


def test_a_count_taken_down_for_a_living_reader_is_found() -> None:
    gpu = FakeGpu()
    publisher = PublisherSide(gpu.process(), worlds.ReapsTheLiving)
    side = ReaderSide(gpu.process())
    segment = publisher.segment()
    side.receive(1, segment.export(side.reader)).open()
    segment.drop()
    publisher.exporter.reap()
    assert "memory was freed that 1 processes had open" in gpu.trouble
    side.close()


def test_a_refusal_is_remembered_and_not_tried_again() -> None:
    process = FakeGpu().process()
    process.share = lambda: fails("no")
    exporter = CudaExporter(process)
    errors = []
    for _ in range(3):
        with pytest.raises(DeviceError) as caught:
            exporter.create(process.visible[0], NBYTES)
        errors.append(caught.value)
    assert process.given_out == 1
    assert len({id(error) for error in errors}) == 3
    assert len({str(error) for error in errors}) == 1
