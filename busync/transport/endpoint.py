"""The directory where a publisher is found: ``bus`` and ``door`` (sockets) and ``lock`` (who holds it).

The lock is held with flock for as long as the publisher lives, so the kernel lets go of it with the process. It is
never unlinked: two publishers could otherwise hold two files of that name. Nothing but our sockets is ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Collection
from dataclasses import dataclass

from busync import forks
from busync.errors import EndpointError, EndpointInUse, FdError
from busync.fds import OwnedFd

MAX_SOCKET_PATH_BYTES = 107  #: what fits sockaddr_un with its closing NUL
_SOCKETS = ("bus", "door")
_LOCK = "lock"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_RUNTIME_REMEDY = "choose another name, or set BUSYNC_RUNTIME_DIR to a directory of your own"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a publisher is found. Made by ``Endpoint.resolve``; touches no file before ``claim``."""

    text: str  #: as the user wrote it
    directory: str  #: absolute
    runtime: str | None  #: the directory of all endpoints with a bare name, None for an explicit path

    @property
    def bus_path(self) -> str:
        """Path of the bus socket."""
        return f"{self.directory}/bus"

    @property
    def door_path(self) -> str:
        """Path of the door socket."""
        return f"{self.directory}/door"

    @property
    def lock_path(self) -> str:
        """Path of the lock file."""
        return f"{self.directory}/{_LOCK}"

    @classmethod
    def resolve(cls, where: str | os.PathLike[str]) -> Endpoint:
        """The endpoint that ``where`` names.

        A bare name (no slash) lies in ``$BUSYNC_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/busync``, else
        ``/tmp/busync-UID``. A path object, a text with a slash and ``ipc://PATH`` name the directory itself.

        Raises:
            EndpointError: it is empty, "." or "..", holds a NUL, has another scheme, is not UTF-8, or is too long for
                a socket.
        """
        text = os.fspath(where)
        if not isinstance(text, str):
            raise EndpointError(repr(text), "is not text", "use a name or a path")
        path = text.removeprefix("ipc://")
        if not path or path in (".", "..") or "\0" in path:
            raise EndpointError(repr(text), "is not a name or a path", "use a name such as 'policy', or a path")
        if "://" in path:
            raise EndpointError(text, "only ipc:// is spoken here", "use a name such as 'policy', or ipc://PATH")
        try:
            if "/" in path or path != text or isinstance(where, os.PathLike):
                endpoint = cls(text, os.path.abspath(path), None)
            else:
                runtime = _runtime_directory()
                endpoint = cls(text, os.path.join(runtime, path), runtime)
            endpoint.directory.encode()  # ZeroMQ takes nothing but UTF-8
            nbytes = len(os.fsencode(endpoint.door_path))
        except (OSError, UnicodeEncodeError) as error:  # OSError: the working directory is gone
            raise EndpointError(repr(text), f"cannot be resolved: {error}", "use an absolute path in UTF-8") from error
        if nbytes > MAX_SOCKET_PATH_BYTES:
            limit = f"more than the {MAX_SOCKET_PATH_BYTES} of a Unix socket"
            reason = f"the path {endpoint.door_path} has {nbytes} bytes, {limit}"
            raise EndpointError(text, reason, "use a shorter path or name, or set BUSYNC_RUNTIME_DIR to a short one")
        return endpoint

    def claim(self, allow_uids: Collection[int] = ()) -> Claim:
        """Make the directory, take its lock, and sweep what a dead publisher left. Blocks for at most 20 ms.

        The directory is never more open than 0700, or 0711 with ``allow_uids``, at any moment.

        Raises:
            EndpointInUse: a living publisher holds it.
            EndpointError: the directory is not ours alone, or something else is in the way.
            FdError: the process has no descriptor left.
        """
        mode = 0o711 if allow_uids else 0o700
        try:
            if self.runtime is not None:
                _prepare_runtime(self.text, self.runtime, mode)
            _prepare_directory(self.text, self.directory, mode)
            with forks.fork_lock:
                lock = _take_lock(self.text, self.lock_path)
                try:
                    os.chmod(self.directory, mode)  # not before it is ours: another publisher may live there
                    for name in _SOCKETS:
                        _sweep(self, name)
                except BaseException:
                    lock.close()
                    raise
                return Claim(self, lock, 0o666 if allow_uids else 0o600)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise FdError("no descriptor is left for the lock", "raise the limit on open files") from error
            remedy = "choose another name or path" if self.runtime is None else _RUNTIME_REMEDY
            raise EndpointError(self.text, _describe(error), remedy) from error

    def check_client(self) -> None:
        """Check that nobody but the publisher can put a socket into the directory. A missing one is fine.

        Raises:
            EndpointError: somebody else could, or an endpoint with a bare name is not of this user.
        """
        try:
            if self.runtime is not None:
                _check_directory(self.text, self.runtime, (os.geteuid(), 0), _RUNTIME_REMEDY)
            _check_directory(self.text, self.directory, None if self.runtime is None else (os.geteuid(), 0))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise EndpointError(self.text, _describe(error), "check the endpoint's path") from error


class Claim(forks.ForkAware):
    """The right to serve an endpoint. Ends by ``release`` or with the process, whatever its forked children do."""

    def __init__(self, endpoint: Endpoint, lock: OwnedFd, socket_mode: int) -> None:
        self.endpoint = endpoint
        self._lock = lock
        self._socket_mode = socket_mode
        self._pid = os.getpid()
        forks.register(self)

    def open_sockets(self) -> None:
        """Let the allowed users, or else nobody else, connect to the sockets. Call after both are bound.

        Raises:
            EndpointError: a socket has vanished.
        """
        try:
            for name in _SOCKETS:
                os.chmod(os.path.join(self.endpoint.directory, name), self._socket_mode)
        except OSError as error:
            raise EndpointError(self.endpoint.text, _describe(error)) from error

    def release(self) -> None:
        """Remove the sockets and let go of the lock. May be called again; does nothing in a forked child."""
        if self._lock.closed or os.getpid() != self._pid:
            return
        if self._is_ours():
            for name in _SOCKETS:
                with contextlib.suppress(OSError, EndpointError):
                    _sweep(self.endpoint, name)
        with contextlib.suppress(OSError):
            os.ftruncate(self._lock.fileno(), 0)
        # A child that Python's fork hooks did not see shares the lock: unlocking ends it there too, closing does not.
        fcntl.flock(self._lock.fileno(), fcntl.LOCK_UN)
        self._lock.close()

    def _is_ours(self) -> bool:
        """Whether the path still leads to the lock held here. Its directory may have been removed and made anew."""
        try:
            return os.path.samestat(os.lstat(self.endpoint.lock_path), os.fstat(self._lock.fileno()))
        except OSError:
            return False

    def after_fork_in_child(self) -> None:
        """Let go of the child's share of the lock, which would outlive a killed publisher."""
        self._lock.close()


def _runtime_directory() -> str:
    if chosen := os.environ.get("BUSYNC_RUNTIME_DIR"):
        return os.path.abspath(chosen)
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(os.path.abspath(session), "busync")
    return f"/tmp/busync-{os.geteuid()}"  # noqa: S108 - its owner and mode are checked before use


def _describe(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def _check_directory(
    text: str, path: str, owners: tuple[int, ...] | None, remedy: str = "choose another name or path"
) -> os.stat_result:
    """Check that ``path`` is a directory of one of ``owners`` that only its owner can write to."""
    found = os.lstat(path)
    remedy = f"remove it, fix it, or {remedy}"
    if not stat.S_ISDIR(found.st_mode):
        raise EndpointError(text, f"{path} is not a directory", remedy)
    if owners is not None and found.st_uid not in owners:
        raise EndpointError(text, f"{path} belongs to uid {found.st_uid}", remedy)
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise EndpointError(text, f"others may write to {path} (mode {stat.S_IMODE(found.st_mode):04o})", remedy)
    return found


def _make_directory(path: str, mode: int) -> None:
    """Make ``path`` and what is missing above it, unless it exists. Never looser than ``mode``, whatever the umask."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_directory(os.path.dirname(path), mode)
        os.mkdir(path, 0o700)
    os.chmod(path, mode)  # a strict umask may have taken too much away


def _prepare_runtime(text: str, path: str, mode: int) -> None:
    _make_directory(path, mode)
    found = _check_directory(text, path, (os.geteuid(),), _RUNTIME_REMEDY)
    if mode & ~found.st_mode:  # it exists and is narrower: other users must be able to pass
        os.chmod(path, stat.S_IMODE(found.st_mode) | mode)


def _prepare_directory(text: str, path: str, mode: int) -> None:
    _make_directory(os.path.dirname(path), mode)
    _make_directory(path, 0o700)
    _check_directory(text, path, (os.geteuid(),))
    entries = set(os.listdir(path))
    if _LOCK not in entries and not entries.issubset(_SOCKETS):  # do not shut somebody's home directory
        raise EndpointError(text, f"{path} holds other files", "use a directory of its own")


def _take_lock(text: str, path: str) -> OwnedFd:
    """Open and lock the lock file, and write our pid into it. Called under the fork lock."""
    lock = OwnedFd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))
    try:
        found = os.fstat(lock.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise EndpointError(text, f"{path} is not a lock file of ours", "remove it, or choose another name")
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EndpointInUse(text, _read_pid(lock)) from None
        os.ftruncate(lock.fileno(), 0)
        os.pwrite(lock.fileno(), str(os.getpid()).encode(), 0)
    except BaseException:
        lock.close()  # now, not when the last traceback that refers to it dies
        raise
    return lock


def _read_pid(lock: OwnedFd) -> int:
    """The pid in the lock file; 0 when its holder does not write one within 20 ms of taking it."""
    for _ in range(20):
        with contextlib.suppress(ValueError):
            return int(os.pread(lock.fileno(), 20, 0))
        time.sleep(0.001)
    return 0


def _sweep(endpoint: Endpoint, name: str) -> None:
    """Remove a socket of ours that a dead publisher left."""
    path = os.path.join(endpoint.directory, name)
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise EndpointError(endpoint.text, f"{path} is in the way and is not a socket of ours", "remove or rename it")
    os.unlink(path)
