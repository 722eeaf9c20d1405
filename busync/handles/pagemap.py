"""Which pages of a private mapping are this process's own: the kernel's look at the page tables.

A page of a copy-on-write mapping that was never written to is the file's own page, and shows what the file holds now.
One that was written to is a copy, and shows for ever what was written.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import weakref

from busync import forks
from busync.errors import BusyncError
from busync.fds import OwnedFd

_PAGEMAP_SCAN = 0xC0606610  # Linux 6.7; ioctl's number holds the size of its argument, which is 96 bytes
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4  # categories of pages
_PIECE_BYTES = 64 << 20  # of one call, which takes half a millisecond under the kernel's lock of this process's memory


_shared: weakref.ref[Pagemap] | None = None


class Pagemap(forks.ForkAware):
    """Looks at this process's page tables, through one descriptor. In a forked child it knows nothing."""

    def __init__(self) -> None:
        self._fd: OwnedFd | None = None
        with forks.fork_lock:
            try:
                self._fd = OwnedFd(os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC))
            except (OSError, BusyncError):
                return  # no /proc, no descriptor left, or a process that nobody may look at
            forks.register(self)

    def untouched(self, address: int, nbytes: int) -> bool:
        """Whether every page in the range is the file's own. False as well if the kernel does not say.

        Takes some 8 ms for 1 GiB of which every page was read. Takes no lock and gives up the GIL.
        """
        if self._fd is None:
            return False
        try:
            pieces = range(address, address + nbytes, _PIECE_BYTES)
            return not any(_own_page(self._fd, at, min(_PIECE_BYTES, address + nbytes - at)) for at in pieces)
        except (OSError, BusyncError):  # an older kernel; closed, as this is a child
            return False

    def after_fork_in_child(self) -> None:
        """Close the child's descriptor, which shows the parent's tables. The child may have one of its own."""
        global _shared
        _shared = None
        if self._fd is not None:
            self._fd.close()


def locks_memory() -> bool:
    """Whether memory of this process is locked (mlockall), or that cannot be told. Takes some 25 us."""
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:
            return b"\nVmLck:\t       0 kB" not in file.read()
    except OSError:
        return True


def _own_page(fd: OwnedFd, address: int, nbytes: int) -> bool:
    """Whether a page in the range is in memory or swapped out, and not a file's.

    Raises:
        OSError: the kernel does not know the question.
    """
    found = (ctypes.c_uint64 * 3)()
    question = bytearray(
        struct.pack(
            "=12Q",
            96, 0, address, address + nbytes, 0,  # size, flags, start, end, where the kernel got to
            ctypes.addressof(found), 1, 1,  # room for one range, of one page: it need not look further
            _FILE, _FILE, _PRESENT | _SWAPPED, _FILE,  # inverted: not a file's; and one of the two
        )
    )  # fmt: skip
    ranges: int = fcntl.ioctl(fd.fileno(), _PAGEMAP_SCAN, question)
    return ranges > 0


def pagemap() -> Pagemap:
    """The one of this process. It lives as long as somebody refers to it."""
    global _shared
    with forks.fork_lock:
        shared = _shared() if _shared is not None else None
        if shared is None:
            shared = Pagemap()
            _shared = weakref.ref(shared)
        return shared
