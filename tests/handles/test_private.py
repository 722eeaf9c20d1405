"""Copy-on-write mappings, and when one is kept for the next version: never if written to, nor while it is in use."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch

from busync.errors import AllocationError
from busync.fds import address_of, open_fds
from busync.handles import PrivateMappings, Segment, create_segment, map_private, open_segment, private, unmapping
from busync.handles.pagemap import Pagemap, pagemap
from busync.handles.unmapper import LARGE_BYTES
from tests.forking import check_in_child
from tests.support.kernel import keeps

pytestmark = pytest.mark.skipif(not keeps(), reason="this kernel does not say which pages were written to")

PAGE = mmap.PAGESIZE
SMALL_BYTES = 40 * PAGE
SIZES = pytest.mark.parametrize("segment", [SMALL_BYTES, LARGE_BYTES], ids=["small", "large"], indirect=True)


@pytest.fixture
def segment(request: pytest.FixtureRequest) -> Iterator[Segment]:
    segment = create_segment(open_segment("busync-test"), getattr(request, "param", SMALL_BYTES))
    yield segment
    segment.fd.close()
    del segment


@pytest.fixture
def mappings(segment: Segment) -> Iterator[PrivateMappings]:
    mappings = PrivateMappings(segment.fd, segment.nbytes)
    mappings.prepare()
    yield mappings
    mappings.end()


def smaps() -> list[dict[str, str]]:
    """What the kernel says of each private mapping of a segment in this process; "at" is its address."""
    found: list[dict[str, str]] = []
    ours = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            word, _, rest = line.partition(" ")
            if not word.endswith(":"):
                ours = "busync-test" in line and " rw-p " in line
                word, rest = "at", str(int(word.partition("-")[0], 16))
                if ours:
                    found.append({})
            if ours:
                found[-1][word.rstrip(":")] = rest.strip().removesuffix(" kB")
    return found


def mapped() -> list[tuple[int, int, bool]]:
    """Of each: its address, the kB that are this process's own copies, and whether children get it."""
    return [(int(one["at"]), int(one["Anonymous"]), "dc" not in one["VmFlags"].split()) for one in smaps()]


def settle() -> None:
    """Wait for the thread."""
    stop_at = time.monotonic() + 5
    while unmapping() and time.monotonic() < stop_at:
        time.sleep(0.001)
    assert not unmapping()


def tensor_of(mappings: PrivateMappings, keep: object = None) -> torch.Tensor:
    """All bytes, every page of which was read."""
    tensor = torch.frombuffer(mappings.map(keep), dtype=torch.uint8)
    tensor.sum()
    return tensor


@SIZES
def test_a_mapping_that_was_only_read_shows_the_next_version(segment: Segment, mappings: PrivateMappings) -> None:
    segment.mapping[:3] = b"one"
    tensor = tensor_of(mappings)
    address = tensor.data_ptr()
    del tensor
    settle()
    assert mapped() == [(address, 0, False)]
    for version in range(12):
        segment.mapping[:] = bytes([version]) * segment.nbytes
        tensor = torch.frombuffer(mappings.map(), dtype=torch.uint8)
        assert tensor.data_ptr() == address
        assert int(smaps()[0]["Rss"]) == segment.nbytes // 1024, "it is there without a page fault"
        assert bool((tensor[::PAGE] == version).all())
        assert int(tensor[-1]) == version
        assert mapped() == [(address, 0, True)]
        del tensor
        settle()


def fill(tensor: torch.Tensor) -> None:
    tensor.fill_(9)


def first_byte(tensor: torch.Tensor) -> None:
    tensor[0] = 9


def last_byte(tensor: torch.Tensor) -> None:
    tensor.numpy()[-1] = 9


def equal_bytes(tensor: torch.Tensor) -> None:
    tensor.copy_(tensor.clone())


def and_back(tensor: torch.Tensor) -> None:
    before = tensor[PAGE : PAGE + 8].clone()
    tensor[PAGE : PAGE + 8] += 1
    tensor[PAGE : PAGE + 8] = before


def by_the_kernel(tensor: torch.Tensor) -> None:
    with open("/dev/zero", "rb", buffering=0) as zeros:
        zeros.readinto(tensor.numpy()[5 * PAGE : 5 * PAGE + 1].data)


EDITS = (fill, first_byte, last_byte, equal_bytes, and_back, by_the_kernel)


@pytest.mark.parametrize("edit", EDITS)
@SIZES
def test_a_mapping_that_was_written_to_is_not_kept(
    segment: Segment, mappings: PrivateMappings, edit: Callable[[torch.Tensor], None]
) -> None:
    """Whatever was written, the next version shows nothing of it, in no page."""
    segment.mapping[:] = b"\x01" * segment.nbytes
    tensor = tensor_of(mappings)
    edit(tensor)
    del tensor
    settle()
    assert mapped() == []
    segment.mapping[:] = b"\x02" * segment.nbytes
    tensor = tensor_of(mappings)
    assert bool((tensor == 2).all())
    del tensor
    settle()
    assert [own for _, own, _ in mapped()] == [0]


def test_what_was_written_and_discarded_is_the_segments_own_again(segment: Segment, mappings: PrivateMappings) -> None:
    libc = ctypes.CDLL(None)
    tensor = tensor_of(mappings)
    tensor.fill_(1)
    assert libc.madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(segment.nbytes), mmap.MADV_DONTNEED) == 0
    del tensor
    assert len(mapped()) == 1
    segment.mapping[:] = b"\x02" * segment.nbytes
    assert bool((tensor_of(mappings) == 2).all())


def test_a_locked_mapping_is_not_kept(segment: Segment, mappings: PrivateMappings) -> None:
    """The kernel copies the pages of what it locks in memory, if it can be written to."""
    libc = ctypes.CDLL(None)
    tensor = tensor_of(mappings)
    if libc.mlock(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(segment.nbytes)) != 0:
        pytest.skip("nothing may be locked here")
    del tensor
    assert mapped() == []


@SIZES
def test_a_mapping_that_is_locked_while_it_is_kept_is_not_used_again(
    segment: Segment, mappings: PrivateMappings
) -> None:
    """As mlockall does it, between two versions: every page becomes the reader's own, with the old content."""
    libc = ctypes.CDLL(None)
    segment.mapping[:] = b"\x01" * segment.nbytes
    tensor = tensor_of(mappings)
    assert int(tensor.sum()) == segment.nbytes
    address = tensor.data_ptr()
    del tensor
    settle()
    assert len(mapped()) == 1
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(segment.nbytes)) != 0:
        pytest.skip("nothing may be locked here")
    segment.mapping[:] = b"\x02" * segment.nbytes
    assert bool((tensor_of(mappings) == 2).all())


@SIZES
def test_what_is_kept_makes_room_for_what_is_needed(
    segment: Segment, mappings: PrivateMappings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tensor_of(mappings), tensor_of(mappings)
    del first
    settle()
    assert len(mapped()) == 2, "one in use, one kept"
    other = PrivateMappings(segment.fd, segment.nbytes)
    other.prepare()

    def tight(*arguments: object) -> mmap.mmap:
        if len(mapped()) > 1:
            raise AllocationError(segment.nbytes, "no room")
        return real(*arguments)  # type: ignore[arg-type]

    real = map_private
    monkeypatch.setattr(private, "map_private", tight)
    third = tensor_of(other)
    assert len(mapped()) == 2
    with pytest.raises(AllocationError):
        tensor_of(other)
    del second, third
    settle()
    other.end()


@SIZES
def test_a_mapping_that_is_in_use_is_not_used_again(segment: Segment, mappings: PrivateMappings) -> None:
    segment.mapping[:] = b"\x01" * segment.nbytes
    first, second = tensor_of(mappings), tensor_of(mappings)
    assert first.data_ptr() != second.data_ptr()
    row = first[-3:].view(3, 1)
    del first
    settle()
    assert len(mapped()) == 2
    third = tensor_of(mappings)
    third.fill_(7)
    assert row.tolist() == [[1]] * 3
    assert bool((second == 1).all())
    del row, second
    settle()
    assert len(mapped()) == 2, "one in use, one kept"
    assert len({third.data_ptr(), tensor_of(mappings).data_ptr()}) == 2


@SIZES
def test_what_must_outlive_it_goes_once_it_is_kept_or_gone(segment: Segment, mappings: PrivateMappings) -> None:
    class Lease:
        pass

    for edit, left in ((None, [False]), (fill, [])):
        lease = Lease()
        at_its_end: list[list[bool]] = []
        weakref.finalize(lease, lambda: at_its_end.append([inherited for _, _, inherited in mapped()]))  # noqa: B023
        tensor = tensor_of(mappings, lease)
        del lease
        if edit is not None:
            edit(tensor)
        assert not at_its_end
        del tensor
        settle()
        assert at_its_end == [left]


@SIZES
def test_at_the_end_nothing_is_left(segment: Segment, mappings: PrivateMappings) -> None:
    tensor = tensor_of(mappings)
    address = tensor.data_ptr()
    del tensor
    settle()
    where: list[str] = []
    weakref.finalize(mappings._kept[0], lambda: where.append(threading.current_thread().name))
    in_use = tensor_of(mappings)
    assert in_use.data_ptr() == address
    second = tensor_of(mappings)
    del in_use
    settle()
    mappings.end()
    mappings.end()
    settle()
    assert [found[0] for found in mapped()] == [second.data_ptr()]
    assert where == ["busync-unmap" if segment.nbytes >= LARGE_BYTES else "MainThread"]
    assert int(second.sum()) == 0
    del second
    settle()
    assert mapped() == []
    del mappings


@SIZES
def test_what_is_kept_goes_with_its_owner(segment: Segment) -> None:
    mappings = PrivateMappings(segment.fd, segment.nbytes)
    mappings.prepare()
    tensor_of(mappings)
    settle()
    assert len(mapped()) == 1
    del mappings
    assert mapped() == []


def test_two_threads_let_go_of_two_mappings(segment: Segment, mappings: PrivateMappings) -> None:
    for version in range(200):
        segment.mapping[:] = bytes([version]) * segment.nbytes
        boxes = [[tensor_of(mappings)], [tensor_of(mappings)], [tensor_of(mappings)]]
        assert all(bool((box[0] == version).all()) for box in boxes)
        threads = [threading.Thread(target=box.clear) for box in boxes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 1 <= len(mapped()) <= 3


def refuse(*_: object) -> int:
    raise OSError(25, "Inappropriate ioctl for device")


@SIZES
def test_where_the_kernel_does_not_say_nothing_is_kept(
    segment: Segment, mappings: PrivateMappings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "ioctl", refuse)
        for version in range(3):
            segment.mapping[:] = bytes([version]) * segment.nbytes
            assert bool((tensor_of(mappings) == version).all())
            settle()
            assert mapped() == []
    tensor_of(mappings)
    settle()
    assert len(mapped()) == 1


def test_without_page_tables_to_look_at_nothing_is_kept(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    mappings = PrivateMappings(segment.fd, segment.nbytes)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        mappings.prepare()
    tensor_of(mappings)
    assert mapped() == []


def test_one_descriptor_for_all(segment: Segment) -> None:
    before = open_fds()
    owners = [PrivateMappings(segment.fd, segment.nbytes) for _ in range(5)]
    assert open_fds() == before
    for owner in owners:
        owner.prepare()
        tensor_of(owner)
    assert open_fds() == before + 1
    del owner
    owners.clear()
    assert open_fds() == before


def test_any_range_can_be_looked_at(segment: Segment, mappings: PrivateMappings) -> None:
    tensor = tensor_of(mappings)
    address, pages = tensor.data_ptr(), pagemap()
    tensor[3 * PAGE] = 1
    assert not pages.untouched(address, segment.nbytes)
    assert pages.untouched(address, 3 * PAGE)
    assert not pages.untouched(address, 3 * PAGE + 1)
    assert pages.untouched(address + 4 * PAGE, segment.nbytes - 4 * PAGE)
    own = mmap.mmap(-1, PAGE)
    assert pages.untouched(address_of(own), PAGE), "it was never touched"
    own[0] = 1
    assert pages.untouched(address_of(own), PAGE), "it is shared, and so a file's"


@SIZES
def test_a_child_gets_what_is_in_use_and_nothing_that_is_kept(segment: Segment, mappings: PrivateMappings) -> None:
    segment.mapping[:] = b"\x01" * segment.nbytes
    first, second = tensor_of(mappings), tensor_of(mappings)
    del first
    settle()
    third = tensor_of(mappings)  # was kept meanwhile
    del second
    settle()
    kept = next(address for address, _, inherited in mapped() if not inherited)

    def check() -> None:
        mappings.after_fork_in_child()
        assert [found[0] for found in mapped()] == [third.data_ptr()]
        assert bool((third == 1).all())
        taken = [mmap.mmap(-1, segment.nbytes) for _ in range(8)]  # the free addresses are used again
        assert kept in {address_of(mapping) for mapping in taken} or segment.nbytes < LARGE_BYTES
        box.clear()
        gc.collect()
        for mapping in taken:
            mapping[0] = 1

    box = [mappings]
    check_in_child(check)
    segment.mapping[:] = b"\x02" * segment.nbytes
    tensor = tensor_of(mappings)
    assert tensor.data_ptr() == kept
    assert bool((tensor == 2).all())


def test_a_child_keeps_nothing_and_knows_no_page_tables(segment: Segment, mappings: PrivateMappings) -> None:
    tensor = [tensor_of(mappings)]
    before = open_fds()

    def check() -> None:
        assert open_fds() == before + 2 - 1, "a pipe came, and the page tables went"
        tensor.clear()
        assert mapped() == []
        own = PrivateMappings(segment.fd, segment.nbytes)
        own.prepare()
        tensor_of(own)
        assert [inherited for _, _, inherited in mapped()] == [False], "a child may keep what it maps itself"

    check_in_child(check)
    tensor.clear()
    assert len(mapped()) == 1


def test_versions_without_number_leave_nothing(segment: Segment, mappings: PrivateMappings) -> None:
    def counts() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(list(maps)), open_fds()

    seen = []
    for version in range(6000):
        tensor = torch.frombuffer(mappings.map(), dtype=torch.uint8)
        if version % 3 == 0:
            tensor[version % segment.nbytes] = 1
        del tensor
        if version % 1000 == 999:
            seen.append(counts())
    assert all(after[0] <= before[0] + 2 and after[1] == before[1] for before, after in pairwise(seen[1:])), seen


def test_to_look_takes_little_of_everybodys_time() -> None:
    """Half a million pages at most wait for one look: it goes in pieces, and gives up the GIL."""
    segment = create_segment(open_segment("busync-test"), 256 << 20)
    mappings = PrivateMappings(segment.fd, segment.nbytes)
    mappings.prepare()
    tensor = tensor_of(mappings)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        assert Pagemap().untouched(tensor.data_ptr(), segment.nbytes)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.02, took
    segment.fd.close()
