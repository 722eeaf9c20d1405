"""Large mappings are unmapped on a thread.

To unmap what was read takes some 50 ms per GB, and whoever drops the last tensor of a version is often an event loop.
The thread lives while there is a large mapping.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections import deque
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

from msgspec import Struct

from busync import forks
from busync.fds import address_of, vacate

LARGE_BYTES = 32 << 20
_PIECE_BYTES = 16 << 20  # of one call, so that nobody waits long for the kernel's lock of this process's memory

_libc_madvise = ctypes.CDLL(None, use_errno=True).madvise
_libc_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Unmapper(forks.ForkAware):
    """The thread, and what waits for it. Forked children have neither: there, large mappings go at once."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[mmap.mmap, object] | None] = SimpleQueue()
        self._lock = threading.Lock()  #: never taken by a finalizer
        self._living = 0
        self._pending: deque[None] = deque()  #: one for each that was taken and is not gone yet
        self._pid = os.getpid()
        forks.register(self)

    def expect(self) -> bool:
        """There is one more large mapping; False if there can be no thread for it."""
        with self._lock:
            if not self._living:
                try:
                    threading.Thread(target=self._run, name="busync-unmap", daemon=True).start()
                except RuntimeError:  # the system has no thread left, or the interpreter ends
                    return False
            self._living += 1  # last: who is interrupted before has at most one thread too many
        return True

    def expect_not(self) -> None:
        """The mapping did not come."""
        self._queue.put(None)

    def take(self, mapping: mmap.mmap, keep: object) -> bool:
        """Unmap a mapping that was expected, then let go of ``keep``; False if the thread is not in this process."""
        if os.getpid() != self._pid:
            return False
        self._pending.append(None)
        self._queue.put((mapping, keep))
        return True

    @property
    def pending(self) -> bool:
        """Whether something is being unmapped."""
        return bool(self._pending)

    def _run(self) -> None:
        while True:
            taken = self._queue.get()
            if taken is not None:
                _unmap(*taken)
                taken = None  # and with it the lease
                self._pending.popleft()
            with self._lock:
                self._living -= 1
                if self._living <= 0 and not self._pending:
                    self._living = 0
                    return

    def after_fork_in_child(self) -> None:
        """Begin anew in the child."""
        global unmapper
        if unmapper is self:
            unmapper = Unmapper()


unmapper = Unmapper()


def unmapping() -> bool:
    """Whether a version that nobody uses any more is still being unmapped."""
    return unmapper.pending


def _unmap(mapping: mmap.mmap, keep: object) -> None:
    address, nbytes = address_of(mapping), len(mapping)
    for start in range(0, nbytes, _PIECE_BYTES):
        _libc_madvise(address + start, min(_PIECE_BYTES, nbytes - start), mmap.MADV_DONTNEED)
    vacate(address, nbytes)


class _Last(Struct, eq=False, gc=False):
    """Dies with the last tensor. The garbage collector does not see it: see ``memory._Place``."""

    mapping: mmap.mmap
    keep: object
    unmapper: Unmapper

    def __del__(self) -> None:
        if not sys.is_finalizing() and not self.unmapper.take(self.mapping, self.keep):
            vacate(address_of(self.mapping), len(self.mapping))


def expect_large(nbytes: int) -> bool:
    """Whether a mapping of so many bytes that is made now is unmapped on the thread, which is there then.

    To be called before ``map_private``, outside of locks: to start a thread is to wait for it.
    """
    return nbytes >= LARGE_BYTES and unmapper.expect()


def expect_not() -> None:
    """The mapping that was expected could not be made."""
    unmapper.expect_not()


def outlived(mapping: mmap.mmap, keep: object) -> memoryview:
    """The bytes of a mapping that was expected. It is unmapped on the thread when nothing refers to them any more.

    ``keep`` lives until then.
    """
    large = _kind(len(mapping)).from_buffer(mapping)
    large._last = _Last(mapping, keep, unmapper)
    return memoryview(large).cast("B")


@lru_cache(maxsize=16)  # a class is in a cycle, and costs some 50 us
def _kind(nbytes: int) -> Any:
    """A class of objects that lend the bytes of a mapping and, unlike those of ctypes itself, have attributes."""
    return type("LargeMapping", (ctypes.c_char * nbytes,), {})
