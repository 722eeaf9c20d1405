"""Readers that join, open, read, copy, let go, close and die in any order: what is counted always ends at nothing."""

from __future__ import annotations

import gc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cuda.fake import FakeGpu
from tests.cuda.worlds import MANIFEST, PublisherSide, ReaderSide, shows

STEPS = ("publish", "join", "take", "load", "let go", "close", "kill", "replace", "reap")
steps = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), max_size=60)


class Run:
    """One publisher with two segments; leases are what the ledger would know of them."""

    def __init__(self) -> None:
        self.gpu = FakeGpu()
        self.publisher = PublisherSide(self.gpu.process())
        self.segments = {1: self.publisher.segment(), 2: self.publisher.segment()}
        self.dropped: list[object] = []
        self.content = {1: 0, 2: 0}  #: the version in a segment, modulo what a half can hold
        self.version = 0
        self.sides: list[ReaderSide] = []
        self.held: list[tuple[ReaderSide, int, int, dict[str, torch.Tensor]]] = []  #: reader, segment, version
        self.number = 2
        for segment in self.segments.values():
            self.publisher.write(segment, 0)

    def reader(self, choice: int) -> ReaderSide | None:
        living = [side for side in self.sides if not side.process.dead]
        return living[choice % len(living)] if living else None

    def step(self, name: str, choice: int) -> None:
        side = self.reader(choice)
        numbers = sorted(self.segments)
        number = numbers[choice % len(numbers)]
        if name == "publish":
            if all(held != number or reader.process.dead for reader, held, *_ in self.held):
                self.version += 1
                self.publisher.write(self.segments[number], self.version % 100)
                self.content[number] = self.version
        elif name == "join":
            self.sides.append(ReaderSide(self.gpu.process(visible=[[0, 1], [1, 0]][choice % 2])))
        elif name == "reap":
            dead = {side.reader for side in self.sides if side.process.dead}
            assert {export.reader for export in self.publisher.exporter.reap()} <= dead
        elif name == "replace":  # the pool gives a segment up: its readers keep what they have
            self.segments.pop(number).drop()
            self.number += 1
            self.segments[self.number] = self.publisher.segment()
            self.content[self.number] = 0
            self.publisher.write(self.segments[self.number], 0)
        elif side is None:
            return
        elif name in ("take", "load"):
            if number not in side.segments:
                side.receive(number, self.segments[number].export(side.reader))
            if name == "take":
                self.held.append((side, number, self.content[number], side.tensors(number, self.content[number])))
            else:
                with side.segments[number].load(MANIFEST) as builder:
                    weights = {spec.name: builder.build(spec) for spec in MANIFEST.tensors}
                    assert shows(weights, self.content[number] % 100)
        elif name == "let go":
            mine = [held for held in self.held if held[0] is side]
            if mine:
                before = len(side.released)
                self.held.remove(mine[0])
                mine.clear()
                side.settle_count(before + 1)
        elif name == "close":
            side.close()
        elif name == "kill":
            side.process.kill()

    def check(self) -> None:
        for side, _, version, tensors in self.held:
            if not side.process.dead:
                assert shows(tensors, version % 100), "a version changed under its reader"
        assert self.gpu.trouble == [], self.gpu.trouble

    def finish(self) -> None:
        self.held.clear()
        for side in self.sides:
            side.settle()
            if not side.process.dead:
                side.close()
        for segment in self.segments.values():
            segment.drop()
        gc.collect()
        self.publisher.exporter.reap()
        assert self.publisher.exporter.outstanding() == []
        assert self.publisher.process.allocated == 0
        assert self.publisher.process.events == 0
        assert self.gpu.trouble == [], self.gpu.trouble
        for side in self.sides:
            side.segments.clear()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps)
def test_in_any_order_nothing_is_torn_and_everything_comes_back(todo: list[tuple[str, int]]) -> None:
    run = Run()
    for name, choice in todo:
        run.step(name, choice)
        run.check()
    run.finish()
