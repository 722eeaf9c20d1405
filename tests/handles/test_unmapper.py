"""Large mappings go on a thread: whoever drops the last tensor does not wait, and what must outlive them does."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from busync.errors import ClosedError
from busync.handles import PrivateMappings, Segment, create_segment, open_segment, unmapping
from busync.handles.unmapper import LARGE_BYTES, expect
from tests.forking import check_in_child


class Lease:
    """What must outlive a mapping."""


@pytest.fixture
def segment() -> Iterator[Segment]:
    """One that is just large enough."""
    segment = create_segment(open_segment("busync-test"), LARGE_BYTES)
    segment.mapping[:5] = b"hello"
    yield segment
    segment.fd.close()
    del segment


def large(segment: Segment, keep: object = None) -> memoryview:
    """Bytes of a mapping that is not kept, as nothing is told of the others."""
    mappings = PrivateMappings(segment.fd, LARGE_BYTES)
    mappings.prepare()
    memory = mappings.map(keep)
    mappings.end()
    return memory


def mapped() -> int:
    """How many private mappings there are."""
    with open("/proc/self/maps") as maps:
        return sum("busync-test" in line and line.split()[1] == "rw-p" for line in maps)


def eventually(true: Callable[[], bool]) -> bool:
    stop_at = time.monotonic() + 5
    while not true() and time.monotonic() < stop_at:
        time.sleep(0.001)
    return true()


def threads() -> int:
    return sum(thread.name == "busync-unmap" for thread in threading.enumerate())


def test_a_large_mapping_goes_with_the_last_tensor_and_before_its_lease(segment: Segment) -> None:
    lease, at_its_end = Lease(), []
    weakref.finalize(lease, lambda: at_its_end.append((mapped(), threading.current_thread().name)))
    memory = large(segment, lease)
    assert bytes(memory[:5]) == b"hello"
    first, second = torch.frombuffer(memory[:8], dtype=torch.uint8), torch.frombuffer(memory[64:], dtype=torch.uint8)
    second.fill_(3)
    assert segment.mapping[64:66] == bytes(2)
    del lease, memory, first
    time.sleep(0.02)
    assert (mapped(), at_its_end) == (1, [])
    del second
    assert eventually(lambda: bool(at_its_end))
    assert at_its_end == [(0, "busync-unmap")]
    assert eventually(lambda: threads() == 0)


def test_one_thread_for_all_of_them(segment: Segment) -> None:
    memories = [large(segment) for _ in range(5)]
    assert threads() == 1
    while memories:
        memories.pop()
    assert eventually(lambda: mapped() == 0 and threads() == 0)
    assert bytes(large(segment)[:5]) == b"hello"
    assert eventually(lambda: mapped() == 0 and threads() == 0)


def test_without_a_thread_it_goes_at_once(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        memory = large(segment)
    assert bytes(memory[:5]) == b"hello"
    del memory
    assert mapped() == 0


def test_an_interruption_as_the_thread_is_started_does_not_stop_the_next(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            expect()
    memory = large(segment)
    assert threads() == 1
    del memory
    assert eventually(lambda: mapped() == 0 and threads() == 0 and not unmapping())


def test_a_mapping_that_cannot_be_made_is_not_waited_for(segment: Segment) -> None:
    closed = segment.fd.dup()
    closed.close()
    mappings = PrivateMappings(closed, LARGE_BYTES)
    mappings.prepare()
    assert threads() == 1
    with pytest.raises(ClosedError):
        mappings.map()
    del mappings
    assert eventually(lambda: threads() == 0)


def test_an_owner_that_many_threads_prepare_is_expected_once(segment: Segment) -> None:
    owner, barrier = [PrivateMappings(segment.fd, LARGE_BYTES)], threading.Barrier(8)

    def prepare() -> None:
        barrier.wait()
        owner[0].prepare()

    workers = [threading.Thread(target=prepare) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert threads() == 1
    owner.clear()
    assert eventually(lambda: threads() == 0)


def test_a_forked_child_has_what_it_inherits_and_a_thread_of_its_own(segment: Segment) -> None:
    memories = [large(segment)]

    def check() -> None:
        assert mapped() == 1
        assert bytes(memories[0][:5]) == b"hello"
        memories.append(large(segment))
        assert threads() == 1
        del memories[0]  # at once: its thread is not here
        assert mapped() == 1
        memories.clear()
        assert eventually(lambda: mapped() == 0 and threads() == 0)

    check_in_child(check)
    memories.clear()
    assert eventually(lambda: mapped() == 0 and threads() == 0)
