"""Readers keep mappings between versions: whatever they did to the last one, the next is whole and as published."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
from typing import Any

import pytest
import torch

import busync
from busync import blocking
from busync.handles.unmapper import LARGE_BYTES
from tests.forking import check_in_child
from tests.support import patterns
from tests.support.kernel import keeps
from tests.support.processes import Cast
from tests.support.roles import wait_until

pytestmark = pytest.mark.skipif(not keeps(), reason="this kernel does not say which pages were written to")

SHAPES = {"a": (100, 101), "b": (9_000,), "c": (3,), "last": ()}  #: 19 pages
FEWER = {"b": (9_000,), "d": (8_000,)}


def private_mappings(pid: int | str = "self") -> int:
    """Copy-on-write mappings of segments, in use or kept."""
    with open(f"/proc/{pid}/maps") as maps:
        return sum("/memfd:busync-" in line and " rw-p " in line for line in maps)


def kept(sub: blocking.Subscriber) -> int:
    """How many mappings a subscriber keeps."""
    session: Any = sub._inner._session
    return sum(len(segment.private._kept) for segment in session.segments.values())


def edit(rng: random.Random, tensors: Any) -> None:
    """What readers do, and should not, or may: nothing, most of the time."""
    names = list(tensors)
    match rng.randrange(8):
        case 0:
            tensors[rng.choice(names)].fill_(-1)
        case 1:
            tensors[names[-1]].view(-1)[-1] = 3
        case 2:
            tensors[names[0]].numpy().reshape(-1)[0] = 3
        case 3:
            tensors[names[0]].copy_(tensors[names[0]].clone())
        case 4:
            before = tensors["b"][5].clone()
            tensors["b"][5] += 1
            tensors["b"][5] = before


def lines_of_maps() -> int:
    with open("/proc/self/maps") as maps:
        return len(list(maps))


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
def test_thousands_of_versions_for_a_reader_that_edits(prefetch: bool) -> None:
    rng = random.Random(7)
    sizes: list[tuple[int, int]] = []
    most = 0
    with blocking.Publisher("p", max_segments=3) as pub, blocking.Subscriber("p", prefetch=prefetch) as sub:
        module = patterns.Module(SHAPES)
        held: list[Any] = []
        for version in range(1, 2001):
            shapes = SHAPES if version % 5 else FEWER
            pub.publish(patterns.state(1, version, shapes))
            snapshot = sub.wait_version(version, timeout=5)
            assert snapshot.version == version
            if version % 7 == 0 and shapes is SHAPES:
                snapshot.load_into(module)
                patterns.check(module.state_dict(), 1, version, SHAPES)
            else:
                tensors = dict(snapshot.tensors)
                patterns.check(tensors, 1, version, shapes)
                edit(rng, tensors)
                held = [tensors] if rng.random() < 0.5 else []
                del tensors
            del snapshot
            most = max(most, kept(sub))
            if version % 500 == 0:
                held.clear()
                sizes.append((lines_of_maps(), len(os.listdir("/proc/self/fd"))))
        assert 1 <= most <= 3
    assert max(lines for lines, _ in sizes) - min(lines for lines, _ in sizes) <= 4, sizes
    assert len({fds for _, fds in sizes}) == 1, sizes


@pytest.mark.asyncio
async def test_a_reader_on_a_loop() -> None:
    rng = random.Random(8)
    async with busync.Publisher("p", max_segments=3) as pub, busync.Subscriber("p") as sub:
        module = patterns.Module(SHAPES)
        for version in range(1, 201):
            await pub.publish(patterns.state(1, version, SHAPES))
            snapshot = await sub.next(timeout=5)
            tensors = dict(snapshot.tensors)
            patterns.check(tensors, 1, version, SHAPES)
            edit(rng, tensors)
            if version % 3 == 0:
                await snapshot.load_into(module)
                patterns.check(module.state_dict(), 1, version, SHAPES)
            del tensors, snapshot
        await asyncio.sleep(0)


def test_large_versions() -> None:
    with blocking.Publisher("p", max_segments=3) as pub, blocking.Subscriber("p") as sub:
        state = {"w": torch.zeros(LARGE_BYTES // 4 + 1)}
        held: list[torch.Tensor] = []
        for version in range(1, 13):
            state["w"].fill_(version)
            pub.publish(state)
            held = [sub.next(timeout=5).tensors["w"]]
            assert bool((held[0] == version).all())
            if version % 4 == 0:
                held[0][-1] = -1
        held.clear()
        wait_until(lambda: kept(sub) >= 1)


def test_what_is_kept_is_no_lease_for_a_fork() -> None:
    """A fork abandons what is in use, and nothing that is kept; a child gets what is in use, and reads on."""
    with blocking.Publisher("p", max_segments=4) as pub, blocking.Subscriber("p") as sub:
        for version in range(1, 4):
            pub.publish(patterns.state(1, version, SHAPES))
            patterns.check(sub.next(timeout=5).tensors, 1, version, SHAPES)
        assert kept(sub) >= 2
        segments = pub.status()["topics"]["default"]["segments"]
        before = set(_segments(sub))

        def child() -> None:
            assert private_mappings() == 0

        check_in_child(child)
        for version in range(4, 10):
            pub.publish(patterns.state(1, version, SHAPES))
            patterns.check(sub.next(timeout=5).tensors, 1, version, SHAPES)
        assert pub.status()["topics"]["default"]["segments"] == segments
        assert set(_segments(sub)) == before, "a segment was given up"

        pub.publish(patterns.state(1, 10, SHAPES))
        held = sub.next(timeout=5).tensors
        patterns.check(held, 1, 10, SHAPES)  # over a mapping that was kept
        reader, writer = os.pipe()

        def inheritor() -> None:
            assert private_mappings() == 1
            os.close(writer)
            os.read(reader, 1)  # until the parent has published on
            patterns.check(held, 1, 10, SHAPES)

        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                inheritor()
                status = 0
            finally:
                os._exit(status)
        held = {}  # type: ignore[assignment]
        for version in range(11, 19):
            pub.publish(patterns.state(1, version, SHAPES))
            patterns.check(sub.next(timeout=5).tensors, 1, version, SHAPES)
        os.close(writer)
        os.close(reader)
        assert os.waitpid(pid, 0)[1] == 0


def _segments(sub: blocking.Subscriber) -> list[int]:
    session: Any = sub._inner._session
    return list(session.segments)


def test_a_segment_that_leaves_the_pool_takes_what_is_kept_along() -> None:
    with blocking.Publisher("p", max_segments=2, lease_timeout=0.2) as pub, blocking.Subscriber("p") as sub:
        for version in range(1, 4):
            pub.publish(patterns.state(1, version, SHAPES))
            patterns.check(sub.next(timeout=5).tensors, 1, version, SHAPES)
        assert private_mappings() == 2
        held = sub.latest(timeout=5).tensors  # its segment is abandoned while it is in use
        old = set(_segments(sub))
        for version in range(4, 8):
            pub.publish({"w": torch.full((300_000,), float(version))})
            assert float(sub.next(timeout=5).tensors["w"].sum()) == 300_000 * version
        patterns.check(held, 1, 3, SHAPES)
        held = {}  # type: ignore[assignment]
        wait_until(lambda: sub.poll() is None and private_mappings() <= 2 and set(_segments(sub)).isdisjoint(old))


def test_a_publisher_that_starts_again() -> None:
    """What was kept goes with the session; what is held from it is not kept afterwards."""
    first = blocking.Publisher("p").__enter__()
    with blocking.Subscriber("p") as sub:
        for version in range(1, 4):
            first.publish(patterns.state(1, version, SHAPES))
            held = sub.next(timeout=5).tensors
            patterns.check(held, 1, version, SHAPES)
        assert private_mappings() > 1
        first.close()
        wait_until(lambda: not sub.connected)
        assert private_mappings() == 1
        with blocking.Publisher("p") as second:
            for version in range(1, 6):
                second.publish(patterns.state(2, version, SHAPES))
                patterns.check(sub.next(timeout=5).tensors, 2, version, SHAPES)
            patterns.check(held, 1, 3, SHAPES)
            before = private_mappings()
            del held
            assert private_mappings() == before - 1
            wait_until(lambda: kept(sub) > 0)
    assert private_mappings() == 0


def test_a_killed_publisher(cast: Cast) -> None:
    learner = cast.publisher("p")
    reader = cast.subscriber("p", name="actor")
    for version in range(1, 5):
        learner.call("publish")
        assert reader.call("next")[0] == version
        reader.call("keep")
        reader.call("drop")
    assert private_mappings(reader.pid) > 1
    learner.kill()
    wait_until(lambda: not reader.call("connected"), timeout=2, what="the loss was noticed")
    assert private_mappings(reader.pid) == 1
    assert reader.call("check") == 1
    again = cast.publisher("p")
    wait_until(lambda: bool(reader.call("connected")), what="the reconnection")
    for version in range(1, 5):
        again.call("publish")
        assert reader.call("next")[0] == version
        reader.call("keep")
        reader.call("drop")
    reader.call("check")


def test_without_the_kernels_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.7 every version is mapped afresh."""

    def refuse(*_: object) -> int:
        raise OSError(25, "Inappropriate ioctl for device")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    with blocking.Publisher("p", max_segments=2) as pub, blocking.Subscriber("p") as sub:
        for version in range(1, 20):
            pub.publish(patterns.state(1, version, SHAPES))
            patterns.check(sub.next(timeout=5).tensors, 1, version, SHAPES)
            assert kept(sub) == private_mappings() == 0
