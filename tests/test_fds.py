from __future__ import annotations

import fcntl
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from busync.errors import ClosedError, FdError
from busync.fds import OwnedFd, address_of, fd_budget, map_fd, open_fds, raise_fd_limit, vacate

PAGE = 4096


def is_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def null() -> OwnedFd:
    return OwnedFd(os.open(os.devnull, os.O_RDONLY))


def memfd(nbytes: int = PAGE) -> OwnedFd:
    fd = OwnedFd(os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(fd.fileno(), nbytes)
    return fd


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Take every descriptor that the process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, open_fds() + 64), hard))
    taken = []
    try:
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_closes_once() -> None:
    fd = null()
    number = fd.fileno()
    assert not fd.closed
    fd.close()
    assert fd.closed
    assert not is_open(number)
    again = os.open(os.devnull, os.O_RDONLY)  # most likely the same number
    fd.close()
    del fd
    assert is_open(again)
    os.close(again)


def test_closes_when_it_dies() -> None:
    fd = null()
    number = fd.fileno()
    del fd
    assert not is_open(number)


def test_a_number_that_was_closed_behind_its_back_is_silent_at_death() -> None:
    fd = null()
    os.close(fd.fileno())
    del fd  # an exception here would be an unraisable warning, which is an error in tests


def test_context_manager() -> None:
    with null() as fd:
        number = fd.fileno()
    assert fd.closed
    assert not is_open(number)


def test_is_not_inheritable() -> None:
    raw = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(raw, True)
    with OwnedFd(raw) as fd, fd.dup() as copy:
        assert not os.get_inheritable(fd.fileno())
        assert not os.get_inheritable(copy.fileno())


def test_dup_is_independent() -> None:
    fd = null()
    copy = fd.dup()
    assert copy.fileno() != fd.fileno()
    assert os.path.sameopenfile(copy.fileno(), fd.fileno())
    fd.close()
    assert is_open(copy.fileno())
    copy.close()


@pytest.mark.parametrize("use", ["fileno", "dup"])
def test_use_after_close(use: str) -> None:
    fd = null()
    fd.close()
    with pytest.raises(ClosedError, match="descriptor is closed"):
        getattr(fd, use)()
    assert repr(fd) == "OwnedFd(-1)"


@pytest.mark.parametrize("number", [-1, 987_654, 1 << 40])
def test_a_number_that_is_not_open_is_refused(number: int) -> None:
    with pytest.raises(FdError, match="not an open descriptor"):
        OwnedFd(number)


def test_dup_without_descriptors() -> None:
    with null() as fd, no_descriptor_left(), pytest.raises(FdError, match="ulimit"):
        fd.dup()


def test_close_from_many_threads() -> None:
    for _ in range(50):
        fd = null()
        failures: list[OSError] = []
        start = threading.Barrier(4)

        def close(fd: OwnedFd = fd, start: threading.Barrier = start, failures: list[OSError] = failures) -> None:
            start.wait()
            try:
                fd.close()
            except OSError as error:
                failures.append(error)

        threads = [threading.Thread(target=close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def test_open_fds_counts() -> None:
    before = open_fds()
    assert before == len(os.listdir("/proc/self/fd")) - 1
    with null(), null():
        assert open_fds() == before + 2
    assert open_fds() == before


def test_open_fds_of_an_older_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = open_fds()
    real = os.stat("/proc/self/fd")
    monkeypatch.setattr(os, "stat", lambda _: os.stat_result((*real[:6], 0, *real[7:])))
    assert open_fds() == expected
    with no_descriptor_left():
        assert open_fds() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_fd_budget_falls_to_zero() -> None:
    before = fd_budget()
    with null():
        assert fd_budget() == before - 1
    with no_descriptor_left():
        assert fd_budget() == 0
    assert fd_budget() == before


def test_raise_fd_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 20)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert raise_fd_limit() == wanted
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_map_fd_shares_and_keeps_no_descriptor() -> None:
    with memfd(2 * PAGE) as fd:
        before = open_fds()
        mapping = map_fd(fd, 2 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, mmap.mmap)
        assert open_fds() == before
        assert len(mapping) == 2 * PAGE
        mapping[PAGE] = 7
        assert os.pread(fd.fileno(), 1, PAGE) == b"\7"
    mapping[0] = 8  # lives without the descriptor
    mapping.close()


def test_map_fd_makes_subclasses_and_private_copies() -> None:
    class Mine(mmap.mmap):
        pass

    with memfd() as fd:
        mapping = map_fd(fd, PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, Mine)
        assert type(mapping) is Mine
        mapping[0] = 9
        assert os.pread(fd.fileno(), 1, 0) == b"\0"
        mapping.close()


def test_map_fd_gives_the_pages_back() -> None:
    with memfd() as fd:
        mapping = map_fd(fd, PAGE, mmap.PROT_READ, mmap.MAP_SHARED, mmap.mmap)
        assert "/memfd:test" in Path("/proc/self/maps").read_text()
        mapping.close()
        assert "/memfd:test" not in Path("/proc/self/maps").read_text()


def test_what_is_vacated_lets_go_of_the_file_and_keeps_its_place() -> None:
    with memfd() as fd:
        mapping = map_fd(fd, PAGE, mmap.PROT_READ, mmap.MAP_PRIVATE, mmap.mmap)
        address = address_of(mapping)
        assert "/memfd:test" in Path("/proc/self/maps").read_text()
        vacate(address, PAGE)
        maps = Path("/proc/self/maps").read_text()
        assert "/memfd:test" not in maps
        ranges = [line.split()[:2] for line in maps.splitlines()]
        (mode,) = [mode for where, mode in ranges if _covers(where, address)]
        assert mode == "---p"
        mapping.close()
        assert not any(_covers(line.split()[0], address) for line in Path("/proc/self/maps").read_text().splitlines())


def _covers(where: str, address: int) -> bool:
    low, high = (int(number, 16) for number in where.split("-"))
    return low <= address < high


def test_map_fd_refused_by_a_seal() -> None:
    with memfd() as fd:
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, 0x10)  # FUTURE_WRITE
        with pytest.raises(PermissionError):
            map_fd(fd, PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, mmap.mmap)
        map_fd(fd, PAGE, mmap.PROT_READ, mmap.MAP_SHARED, mmap.mmap).close()


def test_map_fd_needs_bytes() -> None:
    with memfd() as fd, pytest.raises(ValueError, match="at least one byte"):
        map_fd(fd, 0, mmap.PROT_READ, mmap.MAP_SHARED, mmap.mmap)
