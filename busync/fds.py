"""File descriptors: each has one owner and is closed exactly once. Files that are mapped, and their seals."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import stat
from types import TracebackType
from typing import Self, TypeVar

from busync.errors import ClosedError, FdError

#: Raising the soft limit further gains nothing, and harms children that close every number below their limit.
_MOST_DESCRIPTORS = 1 << 20
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Linux on x86-64 and arm64; Python's mmap does not name them
_PROT_NONE = 0
_MAP_FAILED = ctypes.c_void_p(-1).value

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python 3.11 does not name it
#: From now on nobody can resize the file, map it writable, or seal it otherwise. A mapping from before stays writable.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL

_Mapping = TypeVar("_Mapping", bound=mmap.mmap)

_libc_mmap = ctypes.CDLL(None, use_errno=True).mmap
_libc_mmap.restype = ctypes.c_void_p
_libc_mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip


class OwnedFd:
    """The one owner of a descriptor: closes it when told to, at the end of a ``with`` block, or when it dies.

    Raises:
        FdError: ``fd`` is not an open descriptor.
    """

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, fd: int) -> None:
        self._fd = -1
        try:
            os.set_inheritable(fd, False)
        except (OSError, OverflowError) as error:
            raise FdError(f"{fd} is not an open descriptor") from error
        self._fd = fd

    def fileno(self) -> int:
        """The number, which stays owned by this object.

        Raises:
            ClosedError: it was closed.
        """
        if self._fd < 0:
            raise ClosedError("descriptor")
        return self._fd

    @property
    def closed(self) -> bool:
        """Whether the descriptor was closed."""
        return self._fd < 0

    def dup(self) -> OwnedFd:
        """A second descriptor of the same open file, with an owner of its own.

        Raises:
            ClosedError: it was closed.
            FdError: the process has no descriptor left.
        """
        try:
            return OwnedFd(os.dup(self.fileno()))
        except OSError as error:
            raise FdError("a descriptor cannot be duplicated", "raise the limit on open files (ulimit -n)") from error

    def close(self) -> None:
        """Close the descriptor. May be called again, and from any thread."""
        fd, self._fd = self._fd, -1  # no call in between: two threads cannot both see the number
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # there is nobody to tell
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OwnedFd({self._fd})"


def open_fds() -> int:
    """How many descriptors this process has open. Costs none itself."""
    count = os.stat("/proc/self/fd").st_size
    if count:
        return count
    try:  # before Linux 6.2 the size is always 0
        return len(os.listdir("/proc/self/fd")) - 1  # without the one that lists
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return _soft_limit()


def fd_budget() -> int:
    """How many more descriptors this process may open before it meets its soft limit; at least 0."""
    return max(0, _soft_limit() - open_fds())


def raise_fd_limit() -> int:
    """Raise the soft limit on open files towards the hard one, as far as that is allowed, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the budget speaks up when it matters
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return _soft_limit()


def _soft_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def check_sealed(fd: OwnedFd, nbytes: int) -> None:
    """Check a received descriptor before it is mapped: a file of exactly ``nbytes`` bytes that can never change size.

    Raises:
        ValueError: it is something else; says what.
    """
    status = os.fstat(fd.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("the descriptor is not a file")
    if status.st_size != nbytes:
        raise ValueError(f"it has {status.st_size} bytes and should have {nbytes}")
    try:
        seals = fcntl.fcntl(fd.fileno(), fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError("the file cannot have seals") from error
    if seals & SEALS != SEALS:
        raise ValueError(f"its seals are {seals:#x}, and {SEALS:#x} are needed")


def address_of(mapping: mmap.mmap) -> int:
    """Where a mapping is in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def vacate(address: int, nbytes: int) -> None:
    """Put nothing where a mapping is: the file behind it is let go of, and a touch ends the process with SIGSEGV.

    The range stays taken, so whoever owns it may unmap it later without hitting what somebody else has put there. Takes
    no lock and gives up the GIL. Without effect if the kernel has no room for one more mapping.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    _libc_mmap(address, nbytes, _PROT_NONE, flags, -1, 0)


def map_fd(fd: OwnedFd, nbytes: int, prot: int, flags: int, kind: type[_Mapping]) -> _Mapping:
    """Map the first ``nbytes`` bytes of a file into a fresh ``kind`` (a class of mmap.mmap) that keeps no descriptor.

    ``mmap.mmap(fd)`` keeps a duplicate of the descriptor for itself: one more descriptor per mapping, and one that
    nobody can close in a forked child, where it would keep the memory alive. So an anonymous mapping is made, which
    has none, and the file is mapped over it: ``len()`` works and ``.size()`` does not. The object takes every mapping
    for a writable one: wrap it in ``memoryview(...).toreadonly()`` where ``prot`` is PROT_READ.

    Raises:
        OSError: the kernel refuses (ENOMEM, EPERM by a seal, EACCES).
        ValueError: ``nbytes`` is not positive.
    """
    if nbytes <= 0:
        raise ValueError("a mapping needs at least one byte")
    mapping = kind(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    if _libc_mmap(address_of(mapping), nbytes, prot, flags | _MAP_FIXED, fd.fileno(), 0) == _MAP_FAILED:
        code = ctypes.get_errno()
        mapping.close()
        raise OSError(code, os.strerror(code))
    return mapping
