"""What a fork must do to objects that hold descriptors or mappings.

A forked child shares its parent's sockets, locks and memory, and may outlive it. Objects with something that must not
survive in a child register here; Python runs their hooks around each fork that it does itself (``os.fork``,
``multiprocessing``). A ``subprocess`` needs none: every descriptor of busync is closed by the exec.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from typing import Protocol

from busync.errors import ForkedError

logger = logging.getLogger(__name__)

#: Held while a process forks. Take it around steps that a fork must not see half done, such as mapping memory and then
#: keeping it from children, or opening a socket and then registering it. Never wait for another thread under it.
fork_lock = threading.RLock()


class ForkAware(Protocol):
    """Something with hooks for a fork. Subclasses override the hooks they need."""

    def before_fork(self) -> None:
        """Called in the parent, in the forking thread, before the fork. Must not wait for another thread."""
        return  # a body, so that subclasses need not override it

    def after_fork_in_child(self) -> None:
        """Called in the child. Must be safe to call twice: an owner may hand it on to its parts."""
        return


#: This process. Not for finalizers: the hook of another library may run one in a child before it is told here.
_pid = os.getpid()
_registered: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register(aware: ForkAware) -> None:
    """Run the hooks of ``aware`` at every fork for as long as it lives. It is referred to weakly."""
    with fork_lock:
        _registered.add(aware)


def unregister(aware: ForkAware) -> None:
    """No longer run the hooks of ``aware``, for instance because it was closed."""
    with fork_lock:
        _registered.discard(aware)


def _before() -> None:
    fork_lock.acquire()
    for aware in list(_registered):
        try:
            aware.before_fork()
        except BaseException:  # the fork happens in any case, so the other hooks must run
            logger.exception("before_fork of %r failed", aware)


def _after_in_child() -> None:
    global _pid
    _pid = os.getpid()
    for aware in list(_registered):
        try:
            aware.after_fork_in_child()
        except BaseException:
            logger.exception("after_fork_in_child of %r failed", aware)
    fork_lock.release()


def ensure_same_process(pid: int, what: str) -> None:
    """Check that ``what``, made in process ``pid``, is used in that process.

    Raises:
        ForkedError: it is used in a forked child.
    """
    if _pid != pid:
        raise ForkedError(what)


def immortal(value: object) -> None:
    """Never let ``value`` be deallocated, not even when the interpreter ends.

    For mappings in a forked child that the kernel did not copy (MADV_DONTFORK): their deallocation would unmap an
    address range that by then may belong to something else.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


os.register_at_fork(before=_before, after_in_parent=fork_lock.release, after_in_child=_after_in_child)
