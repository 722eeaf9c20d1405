from __future__ import annotations

import fcntl
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from busync import forks
from busync.errors import AllocationError, AttachError, ClosedError, FdError, ForkedError
from busync.fds import OwnedFd, open_fds
from busync.transport.board import Board, BoardView
from tests.forking import check_in_child
from tests.test_fds import is_open, no_descriptor_left

INCARNATION = (1 << 63) - 5
PAGE = 4096
MAX_SLOT = 255


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board(INCARNATION)
    yield made
    made.close()


@pytest.fixture
def view(board: Board) -> Iterator[BoardView]:
    made = BoardView(board.fd.dup(), INCARNATION)
    yield made
    made.close()


def memfd(nbytes: int, seals: int) -> OwnedFd:
    fd = OwnedFd(os.memfd_create("fake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(fd.fileno(), nbytes)
    fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, seals)
    return fd


def test_what_is_written_is_read(board: Board, view: BoardView) -> None:
    assert [view.read(slot) for slot in range(MAX_SLOT + 1)] == [INCARNATION] + [0] * MAX_SLOT
    for slot in range(1, MAX_SLOT + 1):
        board.write(slot, slot * 1000)
    board.write(7, (1 << 63) - 1)
    assert view.read(7) == (1 << 63) - 1
    assert view.read(MAX_SLOT) == MAX_SLOT * 1000
    assert view.read(8) == 8000


def test_nobody_else_can_change_the_page(board: Board) -> None:
    with board.fd.dup() as fd:
        for refused in (
            lambda: os.ftruncate(fd.fileno(), 0),
            lambda: os.ftruncate(fd.fileno(), 2 * PAGE),
            lambda: os.pwrite(fd.fileno(), b"x", 8),
            lambda: mmap.mmap(fd.fileno(), PAGE),
            lambda: fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(PermissionError):
                refused()
        path = f"/proc/self/fd/{fd.fileno()}"
        with OwnedFd(os.open(path, os.O_RDWR | os.O_CLOEXEC)) as again, pytest.raises(PermissionError):
            mmap.mmap(again.fileno(), PAGE)
    board.write(1, 1)  # the publisher still can


def test_a_view_needs_no_descriptor(board: Board) -> None:
    before = open_fds()
    fd = board.fd.dup()
    view = BoardView(fd, INCARNATION)
    assert fd.closed
    assert open_fds() == before
    view.close()


def test_a_view_outlives_the_board() -> None:
    board = Board(INCARNATION)
    board.write(3, 30)
    view = BoardView(board.fd.dup(), INCARNATION)
    board.close()
    assert view.read(3) == 30
    view.close()


def test_close(board: Board, view: BoardView) -> None:
    for closed in (board, view):
        closed.close()
        closed.close()
    with pytest.raises(ClosedError, match="board is closed"):
        view.read(1)
    with pytest.raises(ClosedError, match="board is closed"):
        board.write(1, 1)


def test_a_view_of_another_incarnation(board: Board) -> None:
    before = open_fds()
    with pytest.raises(AttachError, match="another incarnation"):
        BoardView(board.fd.dup(), INCARNATION - 1)
    assert open_fds() == before


SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10 | fcntl.F_SEAL_SEAL


@pytest.mark.parametrize(
    ("nbytes", "seals"),
    [(0, SEALED), (PAGE - 1, SEALED), (2 * PAGE, SEALED), (PAGE, 0)]
    + [(PAGE, SEALED & ~seal) for seal in (fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, 0x10, fcntl.F_SEAL_SEAL)],
)
def test_what_is_no_board(nbytes: int, seals: int) -> None:
    before = open_fds()
    with pytest.raises(AttachError, match="no board"):
        BoardView(memfd(nbytes, seals), 0)
    assert open_fds() == before


@pytest.mark.parametrize("what", ["pipe", "device", "directory"])
def test_what_is_not_even_memory(what: str) -> None:
    if what == "pipe":
        reader, writer = os.pipe()
        os.close(writer)
        fd = OwnedFd(reader)
    else:
        fd = OwnedFd(os.open("/dev/null" if what == "device" else "/tmp", os.O_RDONLY))
    with pytest.raises(AttachError, match="board"):
        BoardView(fd, 0)
    assert fd.closed


def test_a_fork(board: Board, view: BoardView) -> None:
    board.write(1, 5)
    number = board.fd.fileno()
    descriptors = open_fds()

    def check() -> None:
        assert not is_open(number)
        with pytest.raises(ForkedError, match="board belongs to the parent"):
            board.write(1, 6)
        board.after_fork_in_child()
        board.close()
        with pytest.raises(ForkedError):
            board.write(1, 6)
        assert view.read(1) == 5
        view.close()
        assert "busync-board" not in Path("/proc/self/maps").read_text()

    check_in_child(check)
    board.write(1, 7)
    assert view.read(1) == 7
    assert open_fds() == descriptors


def test_a_child_never_unmaps_what_took_the_place_of_the_page() -> None:
    boards = [Board(INCARNATION)]

    def check() -> None:
        taken = [mmap.mmap(-1, PAGE) for _ in range(64)]  # one of them most likely where the page was
        boards.pop().close()
        gc.collect()
        for page in taken:
            page[0] = 1  # would hit a hole

    check_in_child(check)
    boards.pop().close()


def test_no_descriptor_left() -> None:
    with no_descriptor_left(), pytest.raises(FdError, match="open files"):
        Board(INCARNATION)


def test_no_memory_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = open_fds()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(AllocationError, match=r"4096 bytes.*No space") as caught:
        Board(INCARNATION)
    assert open_fds() == before  # though the traceback keeps what the frames referred to
    del caught


def test_a_board_registers_itself(board: Board) -> None:
    assert board in forks._registered
    board.close()
    assert board not in forks._registered
