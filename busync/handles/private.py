"""The copy-on-write mappings of a segment, which callers' tensors are made from; one is kept for the next version.

To map a version afresh costs a page fault for every 64 KiB that is read, and a walk over all of it when it is unmapped.
So when the last tensor has died and no page of the mapping was written to, it stays: its pages are the segment's own,
and show the next version once the publisher has written it. Nobody can read it meanwhile: nothing refers to it, and
forked children do not get it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections import deque
from functools import lru_cache
from typing import Any

from msgspec import Struct

from busync import forks
from busync.errors import AllocationError
from busync.fds import OwnedFd, address_of
from busync.handles.memory import map_private
from busync.handles.pagemap import Pagemap, locks_memory, pagemap
from busync.handles.unmapper import LARGE_BYTES, Unmapper, expect, unmap

_all: weakref.WeakSet[PrivateMappings] = weakref.WeakSet()


def _give_up_kept() -> bool:
    """Unmap whatever is kept in this process; says whether there was anything."""
    found = [mapping for mappings in list(_all) if (mapping := mappings._pop()) is not None]
    for mapping in found:
        unmap(mapping)
    return bool(found)


class PrivateMappings:
    """Those of one checked segment in this process. The descriptor stays the caller's.

    What is kept ends with ``end``, or with this object. What is in use lives as long as its bytes do.
    """

    def __init__(self, fd: OwnedFd, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = fd
        self._pid = os.getpid()
        self._pagemap: Pagemap | None = None
        self._unmapper: Unmapper | None = None  #: if it is large: the thread expects it until this object dies
        self._kept: deque[mmap.mmap] = deque()  #: one; more if two threads let go of one at the same moment
        self._ended = False
        _all.add(self)

    def prepare(self) -> None:
        """To be called before ``map``, outside of locks: to start a thread is to wait for it."""
        if self._pagemap is None:
            self._pagemap = pagemap()
        if self._unmapper is None and self.nbytes >= LARGE_BYTES:
            unmapper = expect()
            with forks.fork_lock:
                if self._unmapper is None:
                    self._unmapper, unmapper = unmapper, None
            if unmapper is not None:  # another thread was faster
                unmapper.expect_not()

    def map(self, keep: object = None) -> memoryview:
        """The segment's bytes, copy-on-write: what is written stays in this process. Forked children get them too.

        The mapping is in use as long as the bytes that are returned, or any part of them, live. ``keep`` lives until
        nothing of it can be read any more: it is gone from /proc/PID/maps, or kept, as the segment's own pages, without
        a reference to it and out of the reach of children.

        Raises:
            AllocationError: the kernel refuses the mapping.
        """
        with forks.fork_lock:
            mapping = self._take() or self._fresh()
            lent = _kind(self.nbytes).from_buffer(mapping)
            lent._last = _Last(mapping, self, keep)
        return memoryview(lent).cast("B")

    def _fresh(self) -> mmap.mmap:
        try:
            return map_private(self._fd, self.nbytes)
        except AllocationError:  # perhaps what is kept takes up the room
            if not _give_up_kept():
                raise
        return map_private(self._fd, self.nbytes)

    def let_go(self, mapping: mmap.mmap) -> None:
        """Nothing refers to the bytes of ``mapping`` any more: keep it, or unmap it. Takes no lock."""
        if not self._store(mapping):
            unmap(mapping)

    def end(self) -> None:
        """Keep nothing any more. What is large goes on the thread. May be called again, and from any thread."""
        self._ended = True
        while (mapping := self._pop()) is not None:
            if self._unmapper is not None:
                self._unmapper.take(unmap, mapping, self)

    def after_fork_in_child(self) -> None:
        """What was kept does not exist in the child: to deallocate it would unmap what has taken its place."""
        self._ended = True
        while (mapping := self._pop()) is not None:
            forks.immortal(mapping)

    def _take(self) -> mmap.mmap | None:
        """What was kept, for use."""
        mapping = self._pop()
        if mapping is None or self._pagemap is None:
            return None
        # To lock all memory of the process makes every page of a writable mapping its own.
        if (
            locks_memory()
            if self.nbytes >= LARGE_BYTES
            else not self._pagemap.untouched(address_of(mapping), self.nbytes)
        ):
            return None
        try:
            mapping.madvise(mmap.MADV_DOFORK)
        except OSError:  # somebody has unmapped parts of it
            return None
        return mapping

    def _store(self, mapping: mmap.mmap) -> bool:
        """Keep a mapping for the next version; False if it cannot be, or need not."""
        if self._ended or self._kept or self._pagemap is None or os.getpid() != self._pid:
            return False
        if not self._pagemap.untouched(address_of(mapping), self.nbytes):
            return False
        try:
            mapping.madvise(mmap.MADV_DONTFORK)  # before it can be found: what is found is not in a child
        except OSError:
            return False
        self._kept.append(mapping)
        if self._ended:  # meanwhile, on another thread
            self.end()
        return True

    def _pop(self) -> mmap.mmap | None:
        try:
            return self._kept.pop()
        except IndexError:
            return None

    def __del__(self) -> None:
        if self._unmapper is not None and not sys.is_finalizing():
            self._unmapper.expect_not()


class _Last(Struct, eq=False, gc=False):
    """Dies with the last tensor, while the object that lends the mapping's bytes is being deallocated.

    So it sees to the mapping first, and lets go of ``keep`` then. The garbage collector does not see it, and therefore
    cannot take ``keep`` down earlier, with a cycle whose finalizers may still use the tensors.
    """

    mapping: mmap.mmap
    mappings: PrivateMappings
    keep: object

    def __del__(self) -> None:
        if sys.is_finalizing():  # modules are half gone, and the memory goes with the process
            return
        mappings = self.mappings
        unmapper = mappings._unmapper
        if unmapper is None or not unmapper.take(mappings.let_go, self.mapping, self.keep):
            mappings.let_go(self.mapping)


@lru_cache(maxsize=16)  # a class is in a cycle, and costs some 50 us
def _kind(nbytes: int) -> Any:
    """A class of objects that lend the bytes of a mapping and, unlike those of ctypes itself, have attributes."""
    return type("LentMapping", (ctypes.c_char * nbytes,), {})
