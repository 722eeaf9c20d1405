"""The board: one shared page with the newest version of every topic.

The publisher writes it and everybody else maps it read-only, so "is there something new?" costs a memory read. A slot
is one aligned 8-byte number in native order, stored and read in one piece; slot 0 holds the incarnation.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from busync import forks
from busync.errors import AllocationError, AttachError, ClosedError, FdError
from busync.fds import SEALS, OwnedFd, check_sealed, map_fd

_NBYTES = 4096


class Board(forks.ForkAware):
    """The publisher's board. Useless in a forked child, which gets neither its page nor its descriptor.

    Raises:
        AllocationError: there is no memory for the page.
        FdError: the process has no descriptor left.
    """

    def __init__(self, incarnation: int) -> None:
        with forks.fork_lock:
            try:
                #: To be sent to subscribers.
                self.fd = OwnedFd(os.memfd_create("busync-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            except OSError as error:
                raise FdError("no descriptor is left for the board", "raise the limit on open files") from error
            try:
                os.posix_fallocate(self.fd.fileno(), 0, _NBYTES)
                self._page = map_fd(self.fd, _NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, mmap.mmap)
                self._page.madvise(mmap.MADV_DONTFORK)
                fcntl.fcntl(self.fd.fileno(), fcntl.F_ADD_SEALS, SEALS)
            except OSError as error:
                self.fd.close()
                raise AllocationError(_NBYTES, f"the board cannot be made: {error.strerror}") from error
            self._pid = os.getpid()
            self._slots = memoryview(self._page).cast("Q")
            self._slots[0] = incarnation
            forks.register(self)

    def write(self, slot: int, version: int) -> None:
        """Store ``version`` in ``slot`` (1 to 255). Readers see the old or the new number, nothing else.

        Raises:
            ClosedError: the board is closed, or belongs to the parent of this process.
        """
        try:
            self._slots[slot] = version
        except ValueError:  # what a released view raises, which costs a living one no check
            forks.ensure_same_process(self._pid, "board")
            if self.fd.closed:
                raise ClosedError("board") from None
            raise

    def close(self) -> None:
        """Unmap the page and close the descriptor. Subscribers keep theirs. May be called again."""
        forks.unregister(self)
        self._slots.release()
        if os.getpid() == self._pid:
            self._page.close()
        self.fd.close()

    def after_fork_in_child(self) -> None:
        """Close the child's descriptor, and never unmap the page that the child does not have."""
        forks.immortal(self._page)
        self._slots.release()
        self.fd.close()


class BoardView:
    """A subscriber's view of the board. Takes ``fd`` over and closes it, also when it raises. Works in forked children.

    Raises:
        AttachError: it is not a sealed page of ``incarnation``.
    """

    def __init__(self, fd: OwnedFd, incarnation: int) -> None:
        with fd:
            try:
                check_sealed(fd, _NBYTES)
                self._page = map_fd(fd, _NBYTES, mmap.PROT_READ, mmap.MAP_SHARED, mmap.mmap)
            except ValueError as error:
                raise AttachError(0, f"it is no board: {error}") from error
            except OSError as error:
                raise AttachError(0, f"the board cannot be mapped: {error.strerror}") from error
        self._slots = memoryview(self._page).toreadonly().cast("Q")
        if self._slots[0] != incarnation:
            self.close()
            raise AttachError(0, "the board belongs to another incarnation")

    def read(self, slot: int) -> int:
        """The newest version of the topic with ``slot`` (1 to 255); 0 before its first.

        Raises:
            ClosedError: the view is closed.
        """
        try:
            return self._slots[slot]
        except ValueError:
            raise ClosedError("board") from None

    def close(self) -> None:
        """Unmap the page. May be called again."""
        self._slots.release()
        self._page.close()
