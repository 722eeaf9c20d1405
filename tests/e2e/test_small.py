"""Versions of up to 64 KiB: copied when they are first needed, and their leases over with the next request."""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

import busync
from busync import blocking, holds
from busync.fds import open_fds
from busync.handles import COPY_BYTES
from tests.support import patterns

pytestmark = pytest.mark.usefixtures("runtime_dir")


def state(version: int) -> dict[str, torch.Tensor]:
    return patterns.state(1, version, patterns.SMALL)


def right(tensors: Mapping[str, torch.Tensor], version: int) -> bool:
    return patterns.check(tensors, 1, version, patterns.SMALL) > 0


@pytest.fixture
def bus() -> Iterator[tuple[blocking.Publisher, blocking.Subscriber]]:
    with (
        blocking.Publisher("p", max_segments=2, max_held=2, lease_timeout=30) as pub,
        blocking.Subscriber("p", name="a") as sub,
    ):
        yield pub, sub


Bus = tuple[blocking.Publisher, blocking.Subscriber]


def leases(pub: blocking.Publisher) -> list[int]:
    found: list[int] = pub.status()["subscribers"][0]["leases"]
    return found


def test_tensors_of_many_versions_pin_nothing(bus: Bus) -> None:
    pub, sub = bus
    kept = {}
    for version in range(1, 20):  # with two segments, and a lease_timeout that no publish may reach
        pub.publish(state(version))
        kept[version] = dict(sub.next(timeout=5).tensors)
    for version, tensors in kept.items():
        assert right(tensors, version)


def test_the_lease_ends_with_the_next_request_and_not_before(bus: Bus) -> None:
    pub, sub = bus
    pub.publish(state(1))
    snapshot = sub.next(timeout=5)
    tensors = dict(snapshot.tensors)
    assert leases(pub) == [1], "nothing is said for it alone"
    pub.publish(state(2))
    newer = sub.next(timeout=5)
    assert leases(pub) == [2]
    assert newer.version == 2
    assert right(tensors, 1)


def test_a_snapshot_that_is_dropped_ends_its_lease_at_once(bus: Bus) -> None:
    pub, sub = bus
    pub.publish(state(1))
    tensors = dict(sub.next(timeout=5).tensors)
    pub.publish(state(2))
    pub.wait(1, "released", timeout=5)
    assert right(tensors, 1)


def test_an_untouched_snapshot_keeps_its_lease(bus: Bus) -> None:
    pub, sub = bus
    held = []
    for version in (1, 2):
        pub.publish(state(version))
        held.append(sub.next(timeout=5))
    assert leases(pub) == [1, 2]
    with pytest.raises(busync.PinnedError, match="its snapshot"):
        sub.next(timeout=0.1)
    assert right(held[0].tensors, 1)


def test_a_load_after_the_lease_gives_what_was_published(bus: Bus) -> None:
    pub, sub = bus
    pub.publish(state(1))
    snapshot = sub.next(timeout=5)
    for tensor in snapshot.tensors.values():
        tensor.fill_(-1)
    for version in range(2, 6):  # its segment is written again
        pub.publish(state(version))
        assert sub.next(timeout=5).version == version
    module = patterns.Module(patterns.SMALL)
    snapshot.load_into(module)
    assert right(module.state_dict(), 1)


def test_the_newest_version_is_shared_after_its_lease(bus: Bus) -> None:
    pub, sub = bus
    pub.publish(state(1))
    snapshot = sub.next(timeout=5)
    assert right(snapshot.tensors, 1)
    with pytest.raises(busync.WaitTimeout):
        sub.next(timeout=0.01)
    again = sub.latest(timeout=5)
    assert again.version == 1
    assert right(again.tensors, 1)


def test_it_outlives_publisher_and_subscriber(runtime_dir: Path) -> None:
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        pub.publish(state(1))
        snapshot = sub.next(timeout=5)
        assert right(snapshot.tensors, 1)
    assert right(snapshot.tensors, 1)


def test_many_threads_ask_while_leases_end(bus: Bus) -> None:
    pub, sub = bus
    wrong: list[str] = []

    def look(snapshot: blocking.Snapshot, version: int) -> None:
        try:
            right(snapshot.tensors, version)
        except AssertionError as error:
            wrong.append(str(error))

    threads: list[threading.Thread] = []
    for version in range(1, 60):
        pub.publish(state(version))
        snapshot = sub.next(timeout=5)
        threads = [threading.Thread(target=look, args=(snapshot, version)) for _ in range(3)]
        for thread in threads:
            thread.start()
        right(snapshot.tensors, version)
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("more", [0, 1])
def test_the_bound_is_where_the_documents_say(bus: Bus, more: int) -> None:
    pub, sub = bus
    pub.publish({"w": torch.ones(COPY_BYTES // 4 + more)})
    tensors = dict(sub.next(timeout=5).tensors)
    pub.publish({"w": torch.zeros(3)})
    snapshot = sub.next(timeout=5)
    assert leases(pub) == ([1, 2] if more else [2])
    assert snapshot.version == 2
    assert bool((tensors["w"] == 1).all())


def test_a_handler_inside_the_copy_changes_nothing(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the tensors itself and asks for the next version, which ends the lease before the copy has begun."""
    pub, sub = bus
    pub.publish(state(1))
    snapshot = sub.next(timeout=5)
    readonly, inside = holds.AttachedSegment.readonly, False

    def struck(segment: holds.AttachedSegment) -> mmap.mmap:
        nonlocal inside
        if not inside:
            inside = True
            assert right(snapshot.tensors, 1)
            for version in (2, 3, 4):
                pub.publish(state(version))
                assert sub.next(timeout=5).version == version
        return readonly(segment)

    monkeypatch.setattr(holds.AttachedSegment, "readonly", struck)
    assert right(snapshot.tensors, 1)


@pytest.mark.asyncio
async def test_a_request_that_stands_is_said_again_when_leases_are_not_needed() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        await pub.publish(state(1))
        first = await sub.next(timeout=5)
        late = asyncio.create_task(sub.wait_version(4, timeout=5))
        await asyncio.sleep(0)
        next_one = asyncio.create_task(sub.next(timeout=5))
        await asyncio.sleep(0.02)
        await pub.publish(state(2))
        second = await next_one
        kept = [dict(first.tensors), dict(second.tensors)]  # the request that stands was said before these were copied
        await pub.publish(state(3))
        await pub.publish(state(4))
        assert (await late).version == 4
        assert right(kept[0], 1)
        assert right(kept[1], 2)


def test_many_small_snapshots_keep_few_descriptors() -> None:
    with blocking.Publisher("p", max_segments=2) as pub, blocking.Subscriber("p") as sub:
        kept = []
        for version in range(30):
            pub.publish({"w": torch.ones(4000 * (1 + version % 3))})
            kept.append(sub.next(timeout=5))
            assert kept[-1].tensors["w"].sum() > 0
            if version == 6:
                before = open_fds()
        assert open_fds() <= before + 1
        assert all(bool((snapshot.tensors["w"] == 1).all()) for snapshot in kept)
