"""Large mappings are seen to on a thread: kept for the next version, or unmapped.

To unmap what was read takes some 50 ms per GB, and to look whether it was written to 8; whoever drops the last tensor
of a version is often an event loop. The thread lives while somebody has a large segment mapped, or kept.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from busync import forks
from busync.fds import address_of, vacate

LARGE_BYTES = 32 << 20
_PIECE_BYTES = 16 << 20  # of one call, so that nobody waits long for the kernel's lock of this process's memory

_libc_madvise = ctypes.CDLL(None, use_errno=True).madvise
_libc_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_Taken = tuple[Callable[[mmap.mmap], None], mmap.mmap, object]


class Unmapper(forks.ForkAware):
    """The thread, and what waits for it. Forked children have neither: there, large mappings go at once."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Taken | None] = SimpleQueue()
        self._lock = threading.Lock()  #: never taken by a finalizer
        self._thread: threading.Thread | None = None
        self._living = 0
        self._pending: deque[None] = deque()  #: one for each that was taken and is not gone yet
        self._pid = os.getpid()
        forks.register(self)

    def expect(self) -> bool:
        """Somebody will have large mappings; False if there can be no thread for them."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._living = 0
                self._thread = threading.Thread(target=self._run, name="busync-unmap", daemon=True)
                try:
                    self._thread.start()  # who is interrupted here finds it the next time
                except RuntimeError:  # the system has no thread left, or the interpreter ends
                    return False
            self._living += 1
        return True

    def expect_not(self) -> None:
        """Whoever was expected has none any more. Takes no lock: it may be a finalizer."""
        self._queue.put(None)

    def take(self, let_go: Callable[[mmap.mmap], None], mapping: mmap.mmap, keep: object) -> bool:
        """Have a mapping let go of, then ``keep``; False if the thread is not in this process.

        ``let_go`` or ``keep`` refers to whoever was expected.
        """
        if os.getpid() != self._pid:
            return False
        self._pending.append(None)
        self._queue.put((let_go, mapping, keep))
        return True

    @property
    def pending(self) -> bool:
        """Whether something is being let go of."""
        return bool(self._pending)

    def _run(self) -> None:
        while True:
            taken = self._queue.get()
            if taken is not None:
                let_go, mapping, keep = taken
                let_go(mapping)
                del taken, let_go, mapping, keep  # and with them the lease
                self._pending.popleft()
                continue
            with self._lock:
                self._living -= 1
                if self._living <= 0:
                    self._thread = None
                    return

    def after_fork_in_child(self) -> None:
        """Begin anew in the child."""
        global unmapper
        if unmapper is self:
            unmapper = Unmapper()


unmapper = Unmapper()


def expect() -> Unmapper | None:
    """The thread, for somebody who will have large mappings until ``expect_not``; None if there can be none.

    To be called outside of locks: to start a thread is to wait for it.
    """
    current = unmapper
    return current if current.expect() else None


def unmapping() -> bool:
    """Whether a version that nobody uses any more is still being looked at, or unmapped."""
    return unmapper.pending


def unmap(mapping: mmap.mmap) -> None:
    """Take the memory of a mapping out of the address space, piece by piece. The object keeps the range."""
    address, nbytes = address_of(mapping), len(mapping)
    for start in range(0, nbytes, _PIECE_BYTES):
        _libc_madvise(address + start, min(_PIECE_BYTES, nbytes - start), mmap.MADV_DONTNEED)
    vacate(address, nbytes)
