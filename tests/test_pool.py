from __future__ import annotations

import contextlib
import mmap
import os
import threading

import pytest

from busync.errors import AllocationError, ClosedError
from busync.fds import open_fds
from busync.ids import SegmentId
from busync.pool import Pool
from tests.forking import check_in_child

PAGE = mmap.PAGESIZE
ONE, TWO = SegmentId(1), SegmentId(2)


def inherited() -> list[str]:
    """The segments that this process has descriptors of."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return [link for link in links if "busync-" in link]


def test_segments_are_kept_by_id() -> None:
    before = open_fds()
    pool = Pool()
    first = pool.create(ONE, PAGE)
    second = pool.create(TWO, 3 * PAGE)
    assert (pool.get(ONE), pool.get(TWO)) == (first, second)
    assert (len(first.mapping), len(second.mapping)) == (PAGE, 3 * PAGE)
    assert open_fds() == before + 2
    pool.drop(ONE)
    assert open_fds() == before + 1
    with pytest.raises(KeyError):
        pool.get(ONE)
    first.mapping[0] = 1  # whoever still has it may use it
    pool.close()
    pool.close()
    assert open_fds() == before


def test_a_closed_pool_makes_no_segments() -> None:
    before = open_fds()
    pool = Pool()
    pool.close()
    with pytest.raises(ClosedError):
        pool.create(ONE, PAGE)
    assert open_fds() == before


def test_what_cannot_be_reserved_leaves_nothing() -> None:
    before = open_fds()
    pool = Pool()
    with pytest.raises(AllocationError):
        pool.create(ONE, 1 << 45)
    assert open_fds() == before


def test_a_child_keeps_neither_descriptors_nor_memory() -> None:
    pool = Pool()
    kept, dropped = pool.create(ONE, PAGE), pool.create(TWO, PAGE)
    pool.drop(TWO)

    def check() -> None:
        nonlocal kept, dropped
        assert inherited() == []
        for segment in (ONE, TWO):
            with pytest.raises(KeyError):
                pool.get(segment)
        with pytest.raises(ClosedError):
            pool.create(SegmentId(3), PAGE)
        taken = [mmap.mmap(-1, PAGE) for _ in range(64)]
        del kept, dropped
        for mapping in taken:
            mapping[0] = 1

    check_in_child(check)
    kept.mapping[0] = 1
    assert pool.get(ONE) is kept
    pool.close()


def test_a_fork_does_not_wait_for_a_segment_that_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    started, go_on, fallocate = threading.Event(), threading.Event(), os.posix_fallocate

    def check() -> None:
        assert inherited() == []

    def slow(*arguments: int) -> None:
        started.set()
        go_on.wait(10)
        fallocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    thread = threading.Thread(target=pool.create, args=(ONE, PAGE))
    thread.start()
    started.wait()
    check_in_child(check)
    go_on.set()
    thread.join()
    assert len(pool.get(ONE).mapping) == PAGE
    pool.close()
