"""The fake counts as torch does: these are the statements of the emulator's smoke test, made of the fake."""

from __future__ import annotations

import gc

import torch

from tests.cuda.fake import WRAP, FakeGpu, FakeProcess


def exported(owner: FakeProcess, flat: torch.Tensor) -> tuple[object, ...]:
    reduced = owner.reduce(flat, owner.stream(0))
    assert isinstance(reduced, tuple)
    return tuple(reduced[1])


def counts(gpu: FakeGpu) -> list[int]:
    return list(gpu.counters.values())


def test_an_export_per_reader_is_kept_until_the_last_closes() -> None:
    gpu = FakeGpu()
    owner, readers = gpu.process(), [gpu.process() for _ in range(3)]
    flat = owner.allocate(0, 512)
    opened = [reader.rebuild(exported(owner, flat)) for reader in readers]
    del flat
    while opened:
        assert owner.allocated == 512
        opened.pop()
        gc.collect()
        owner.collect()
    assert owner.allocated == 0
    assert gpu.trouble == []


def test_one_export_for_three_readers_counts_below_zero_and_is_kept_for_ever() -> None:
    gpu = FakeGpu()
    owner, readers = gpu.process(), [gpu.process() for _ in range(3)]
    flat = owner.allocate(0, 512)
    arguments = exported(owner, flat)
    opened = [reader.rebuild(arguments) for reader in readers]
    seen = [*counts(gpu)]
    while opened:
        opened.pop()
        seen += counts(gpu)
    assert seen == [1, 0, WRAP - 1, WRAP - 2]
    del flat
    owner.collect()
    assert owner.allocated == 512
    assert gpu.trouble


def test_one_export_for_two_readers_is_freed_under_the_second() -> None:
    gpu = FakeGpu()
    owner, one, two = gpu.process(), gpu.process(), gpu.process()
    flat = owner.allocate(0, 512)
    owner.write(flat, b"\x01" * 512)
    arguments = exported(owner, flat)
    first, second = one.rebuild(arguments), two.rebuild(arguments)
    del flat, first
    owner.collect()
    owner.write(owner.allocate(0, 512), b"\x07" * 512)
    assert second[3] in (7, 0xDD)
    assert "memory was freed that 1 processes had open" in gpu.trouble


def test_a_second_opening_in_one_process_takes_its_count_away_at_once() -> None:
    gpu = FakeGpu()
    owner, reader = gpu.process(), gpu.process()
    flat = owner.allocate(0, 512)
    first = reader.rebuild(exported(owner, flat))
    second = reader.rebuild(exported(owner, flat))
    assert counts(gpu) == [1, 0]
    assert first.data_ptr() == second.data_ptr()
    del first, second, flat


def test_a_killed_reader_leaves_its_count() -> None:
    gpu = FakeGpu()
    owner, reader = gpu.process(), gpu.process()
    flat = owner.allocate(0, 512)
    arguments = exported(owner, flat)
    opened = reader.rebuild(arguments)
    reader.kill()
    del opened, flat
    owner.collect()
    assert owner.allocated == 512
    owner.release(arguments[11], arguments[12])  # type: ignore[arg-type]
    owner.collect()
    assert owner.allocated == 0


def test_from_a_thousand_events_on_there_is_none_to_wait_for() -> None:
    gpu = FakeGpu()
    owner = gpu.process()
    flat = owner.allocate(0, 512)
    many = [exported(owner, flat) for _ in range(1001)]
    assert many[999][14]
    assert not many[1000][14]


def test_copies_are_late() -> None:
    process = FakeGpu().process()
    stream, target, source = process.stream(0), torch.zeros(4), torch.ones(4)
    stream.copy(target, source)
    moment = stream.mark()
    assert target.tolist() == [0] * 4
    moment.synchronize()
    assert target.tolist() == [1] * 4
