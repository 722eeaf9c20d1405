from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import resource
import socket
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from busync.errors import AllocationError, AttachError, FdError
from busync.fds import SEALS, OwnedFd, open_fds
from busync.handles import (
    PrivateMappings,
    Segment,
    check_segment,
    create_segment,
    map_private,
    map_readonly,
    open_segment,
)
from busync.handles.memory import available_bytes
from tests.forking import check_in_child

PAGE = mmap.PAGESIZE
_PUNCH_HOLE = 1 | 2  # with KEEP_SIZE


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = create_segment(open_segment("busync-test"), 2 * PAGE)
    yield made
    made.fd.close()


def memfd(nbytes: int, seals: int) -> OwnedFd:
    fd = OwnedFd(os.memfd_create("busync-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(fd.fileno(), nbytes)
    fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, seals)
    return fd


def test_the_publisher_writes_and_readers_see_it(segment: Segment) -> None:
    check_segment(segment.fd, 1, 2 * PAGE)
    private, readonly = map_private(segment.fd, 2 * PAGE), map_readonly(segment.fd, 2 * PAGE)
    segment.mapping[PAGE : PAGE + 5] = b"hello"
    assert private[PAGE : PAGE + 5] == readonly[PAGE : PAGE + 5] == b"hello"


def test_what_a_reader_writes_stays_its_own(segment: Segment) -> None:
    private = map_private(segment.fd, 2 * PAGE)
    private[:5] = b"mine!"
    assert segment.mapping[:5] == bytes(5)


def test_memory_is_reserved_at_once(segment: Segment) -> None:
    assert os.fstat(segment.fd.fileno()).st_blocks * 512 == 2 * PAGE


def test_nobody_else_can_change_a_segment(segment: Segment) -> None:
    fd = segment.fd.fileno()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 3 * PAGE)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    again = OwnedFd(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
    with again, pytest.raises(PermissionError):
        mmap.mmap(again.fileno(), PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.fallocate(fd, _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(PAGE)) == -1
    assert ctypes.get_errno() == errno.EPERM


def test_mappings_keep_no_descriptor() -> None:
    before = open_fds()
    segment = create_segment(open_segment("busync-test"), PAGE)
    private, readonly = map_private(segment.fd, PAGE), map_readonly(segment.fd, PAGE)
    segment.fd.close()
    assert open_fds() == before
    segment.mapping[:1] = b"x"
    assert private[:1] == readonly[:1] == b"x"


def test_more_than_the_machine_has_is_refused_with_both_figures() -> None:
    wanted = 1 << 45
    with pytest.raises(AllocationError, match=rf"{wanted} bytes.*has \d+ bytes available") as caught:
        create_segment(open_segment("busync-test"), wanted)
    assert caught.value.wanted_bytes == wanted
    assert 0 < available_bytes() < wanted


@pytest.mark.parametrize(("code", "kind"), [(28, AllocationError), (12, AllocationError), (24, FdError)])
def test_what_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    before = open_fds()
    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(kind) as caught:
        create_segment(open_segment("busync-test"), PAGE)
    assert isinstance(caught.value.__cause__, OSError)
    assert open_fds() == before


def test_the_descriptor_limit_is_a_clear_error() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        with pytest.raises(FdError, match="descriptor"):
            create_segment(open_segment("busync-test"), PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_mapping_that_the_kernel_refuses_is_a_clear_error() -> None:
    with memfd(PAGE, 0) as fd:
        full = OwnedFd(os.open(f"/proc/self/fd/{fd.fileno()}", os.O_WRONLY | os.O_CLOEXEC))
        with full, pytest.raises(AllocationError, match="Permission denied"):
            map_private(full, PAGE)
        with full, pytest.raises(AllocationError):
            map_readonly(fd, 1 << 50)


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, 0x10, fcntl.F_SEAL_SEAL])
def test_a_segment_without_a_seal_is_refused(missing: int) -> None:
    with memfd(PAGE, SEALS & ~missing) as fd, pytest.raises(AttachError, match="seals"):
        check_segment(fd, 5, PAGE)


@pytest.mark.parametrize("nbytes", [PAGE - 1, PAGE + 1, 0])
def test_a_segment_of_another_size_is_refused(nbytes: int) -> None:
    with memfd(PAGE, SEALS) as fd, pytest.raises(AttachError, match="should have") as caught:
        check_segment(fd, 5, nbytes)
    assert caught.value.segment == 5


def test_what_is_not_a_sealed_file_is_refused(tmp_path: os.PathLike[str]) -> None:
    left, right = socket.socketpair()
    with left, right, OwnedFd(os.dup(left.fileno())) as fd, pytest.raises(AttachError, match="not a file"):
        check_segment(fd, 5, 0)
    path = os.path.join(tmp_path, "file")
    with open(path, "wb") as file:
        file.write(bytes(PAGE))
    with OwnedFd(os.open(path, os.O_RDONLY)) as fd, pytest.raises(AttachError, match="seals"):
        check_segment(fd, 5, PAGE)


def test_a_mapping_holds_and_lets_go(segment: Segment) -> None:
    class Lease:
        pass

    lease = Lease()
    at_its_end: list[list[str]] = []
    weakref.finalize(lease, lambda: at_its_end.append(mapped()))
    mapping = PrivateMappings(segment.fd, PAGE).map(keep=lease)  # without prepare(): nothing is kept
    view = memoryview(mapping)
    del lease, mapping
    assert mapped() == ["rw-p", "rw-s"]
    assert not at_its_end
    del view
    assert at_its_end == [["rw-s"]]  # the segment's own: the private one had gone by then


def test_a_mapping_in_a_cycle_lets_go_after_the_finalizers_of_the_cycle(segment: Segment) -> None:
    class Lease:
        pass

    class Agent:
        def __init__(self, memory: memoryview) -> None:
            self.memory = memory
            self.me = self

        def __del__(self) -> None:
            said.append(bytes(self.memory[:4]))

    segment.mapping[:4] = b"here"
    said: list[Any] = []
    lease = Lease()
    mapping = PrivateMappings(segment.fd, PAGE).map(keep=lease)
    weakref.finalize(lease, lambda: said.append(mapped()))
    Agent(memoryview(mapping))
    del lease, mapping
    assert not said
    gc.collect()
    assert said == [b"here", ["rw-s"]]


def mapped() -> list[str]:
    """The modes of all mappings of test segments."""
    with open("/proc/self/maps") as maps:
        return sorted(line.split()[1] for line in maps if "busync-test" in line)


def test_a_child_inherits_only_private_mappings(segment: Segment) -> None:
    segment.mapping[:2] = b"hi"
    private, readonly = map_private(segment.fd, PAGE), map_readonly(segment.fd, PAGE)

    def check() -> None:
        assert mapped() == ["rw-p"]
        assert bytes(private[:2]) == b"hi"

    check_in_child(check)
    assert mapped() == ["r--s", "rw-p", "rw-s"]
    del readonly


def test_a_child_unmaps_nothing_that_is_not_its_own() -> None:
    kept = [create_segment(open_segment("busync-test"), PAGE)]
    kept[0].fd.close()

    def check() -> None:
        taken = [mmap.mmap(-1, PAGE) for _ in range(64)]  # the free addresses are used again
        kept.clear()
        gc.collect()
        for mapping in taken:
            mapping[0] = 1

    check_in_child(check)
    kept[0].mapping[0] = 1
