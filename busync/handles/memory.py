"""Segments: shared memory that its publisher alone can write, and that nobody can resize.

The publisher maps a memfd, then seals it. What a subscriber receives is checked before it is mapped, and mapped either
privately (copy-on-write, for tensors that callers get) or for reading only (for loading). No mapping keeps a
descriptor open.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass, field

from busync.errors import AllocationError, AttachError, FdError
from busync.fds import SEALS, OwnedFd, check_sealed, map_fd
from busync.forks import ForkAware, fork_lock, immortal, register
from busync.handles.layout import Views

#: Up to so many bytes, a copy takes less time and memory than a mapping with its page tables and page faults.
COPY_BYTES = 64 * 1024


@dataclass(slots=True, eq=False)
class Segment:
    """The publisher's side of a segment: a sealed descriptor, to be passed on, and the only writable mapping."""

    fd: OwnedFd
    mapping: mmap.mmap
    nbytes: int
    views: Views = field(default_factory=Views)  #: over the mapping


def open_segment(name: str) -> OwnedFd:
    """A file in memory, without a byte yet. ``name`` shows in /proc/PID/maps.

    Raises:
        FdError: the process has no descriptor left.
        AllocationError: the kernel refuses for another reason.
    """
    try:
        return OwnedFd(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        raise _translate(error, 0) from error


def create_segment(fd: OwnedFd, nbytes: int) -> Segment:
    """Reserve and map ``nbytes`` bytes (whole pages) of zeroed memory in a fresh file. Blocks for about 0.3 s per GiB.

    The mapping is kept from forked children. The descriptor is taken over, and closed when this raises.

    Raises:
        AllocationError: the machine has not that much memory to spare.
        FdError: the process has no descriptor left.
    """
    try:
        available = available_bytes()
        if nbytes > available:
            raise AllocationError(
                nbytes, f"the machine has {available} bytes available", "publish less, or free memory"
            )
        os.posix_fallocate(fd.fileno(), 0, nbytes)
        mapping = _map_shared(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, SEALS)  # after the mapping: no other writable one from now on
    except OSError as error:
        fd.close()
        raise _translate(error, nbytes) from error
    except BaseException:
        fd.close()
        raise
    return Segment(fd, mapping, nbytes)


def check_segment(fd: OwnedFd, segment: int, nbytes: int) -> None:
    """Check a received descriptor before it is mapped: a file of exactly ``nbytes`` bytes that can never change size.

    Raises:
        AttachError: it is something else.
    """
    try:
        check_sealed(fd, nbytes)
    except ValueError as error:
        raise AttachError(segment, str(error)) from error


def map_private(fd: OwnedFd, nbytes: int) -> mmap.mmap:
    """Map a checked segment copy-on-write: what is written stays in this process. Forked children get it too.

    Raises:
        AllocationError: the kernel refuses the mapping.
    """
    try:
        return map_fd(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, mmap.mmap)
    except OSError as error:
        raise _translate(error, nbytes) from error


def map_readonly(fd: OwnedFd, nbytes: int) -> mmap.mmap:
    """Map a checked segment for reading. Forked children do not get it.

    The object does not know that it is read-only: to write to it, or to a tensor made from it, ends the process with
    SIGSEGV. Never hand such a tensor to a caller.

    Raises:
        AllocationError: the kernel refuses the mapping.
    """
    try:
        return _map_shared(fd, nbytes, mmap.PROT_READ)
    except OSError as error:
        raise _translate(error, nbytes) from error


def available_bytes() -> int:
    """Memory that the kernel says can be used without swapping."""
    with open("/proc/meminfo", "rb") as lines:
        for line in lines:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62  # before Linux 3.14; fallocate still speaks up


class _KeptFromChildren(ForkAware):
    """The shared mappings of this process. A forked child has their objects, but not their memory."""

    def __init__(self) -> None:
        self.mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def after_fork_in_child(self) -> None:
        """Keep the objects for ever: to deallocate one would unmap addresses that may be in use again."""
        for mapping in list(self.mappings):
            immortal(mapping)
        self.mappings.clear()


_kept_from_children = _KeptFromChildren()


def _map_shared(fd: OwnedFd, nbytes: int, prot: int) -> mmap.mmap:
    with fork_lock:  # no child may get the mapping in the moment before it is kept from children
        mapping = map_fd(fd, nbytes, prot, mmap.MAP_SHARED, mmap.mmap)
        mapping.madvise(mmap.MADV_DONTFORK)
        register(_kept_from_children)
        _kept_from_children.mappings.add(mapping)
    return mapping


def _translate(error: OSError, nbytes: int) -> AllocationError | FdError:
    """The one place where errors of the kernel about memory become ours."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return FdError("no descriptor is left for shared memory", "raise the limit on open files (ulimit -n)")
    return AllocationError(nbytes, error.strerror or str(error), "free memory, or publish less")
