"""The door: packets with at most one descriptor each, over a Unix SOCK_SEQPACKET socket.

A packet arrives whole and in order, or the connection has ended. The kernel vouches for who is at the other end.
Nothing here blocks: the shell watches ``fileno()`` for input, and calls ``flush`` now and then while something is
``pending``. (By a timer: a socket without room for another descriptor counts as ready for output.)
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
from array import array
from collections import deque
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from busync import forks
from busync.errors import DecodeError, EndpointError, FdError
from busync.fds import OwnedFd

T = TypeVar("T")

MAX_PACKET_BYTES = 32 * 1024  #: the same as in ``wire``, which this layer does not know
_BACKLOG = 1024
#: Room for the control messages of one packet: a descriptor, and credentials in case they are ever switched on.
_CONTROL_BYTES = socket.CMSG_SPACE(4) + socket.CMSG_SPACE(12)
# Plain ints: the operators of socket's enums are slow.
_SEND_FLAGS = int(socket.MSG_NOSIGNAL)
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)
_DATA_CUT, _CUT = int(socket.MSG_TRUNC), int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_FD = struct.Struct("i")
_SO_PASSRIGHTS = 83  # Linux 6.16; Python does not name it
#: A send that may work later: no room, or too many descriptors of this user are in flight.
_BUSY = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS, errno.EINTR})
#: A send to a connection that has ended, which ``receive`` reports.
_ENDED = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF, errno.ECONNREFUSED, errno.ESHUTDOWN})
_SWALLOWED = 256  #: packets that are remembered of those that came after the end
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LIMIT_REMEDY = "raise the limit on open files (ulimit -n)"


class Credentials(NamedTuple):
    """Who is at the other end, as the kernel noted it when it connected or listened."""

    pid: int
    uid: int
    gid: int


class Packet(NamedTuple):
    """One packet. The receiver owns ``fds`` and closes those that it does not keep."""

    data: bytes
    fds: tuple[OwnedFd, ...]


class DoorConnection(forks.ForkAware):
    """One end of a connection. Takes ``sock`` over.

    ``send`` and ``flush`` may be called from any thread and inside the garbage collector; the rest belongs to the
    thread of the loop. The descriptor's number stays taken until ``close`` or until the last reference is gone, so a
    late ``send`` can never reach a stranger's file. Make one under ``forks.fork_lock``, with its socket.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = _QuietSocket(sock.family, sock.type, sock.proto, fileno=sock.fileno())
        sock.detach()
        self._sock.setblocking(False)
        pid, uid, gid = struct.unpack("iII", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        #: Who is at the other end.
        self.peer = Credentials(pid, uid, gid)
        #: Packets that wait for room, oldest first. Appended to by anybody, taken from by whoever has ``_flushing``.
        self.outbox: deque[tuple[bytes, OwnedFd | None]] = deque()
        self._flushing = threading.Lock()  # only ever tried, never waited for
        self._swallowed: deque[bytes] = deque(maxlen=_SWALLOWED)  #: sent after the end
        forks.register(self)

    def fileno(self) -> int:
        """The number to watch; -1 after ``close`` and in a forked child."""
        return self._sock.fileno()

    @property
    def pending(self) -> int:
        """How many packets wait for room."""
        return len(self.outbox)

    def undelivered(self) -> list[bytes]:
        """The packets that have certainly not arrived: those that wait, and the last that came after the end."""
        return [*self._swallowed, *(data for data, _ in list(self.outbox))]

    def send(self, data: bytes, fd: OwnedFd | None = None) -> bool:
        """Send one packet, after those that wait; if there is no room, keep it (and a duplicate of ``fd``).

        ``data`` is not empty and at most MAX_PACKET_BYTES long. Packets of one thread arrive in order. A connection
        that has ended swallows packets (``receive`` reports the end), and so does one in a forked child.

        Returns:
            True if nothing waits now, False if something does: then call ``flush`` a little later.

        Raises:
            FdError: ``fd`` must wait and cannot be duplicated. The packet is not sent.
            OSError: the packet is too large for the socket (EMSGSIZE).
        """
        outbox = self.outbox
        if not outbox and self._transmit(data, fd):
            return True
        outbox.append((data, None if fd is None else fd.dup()))
        return self.flush()

    def flush(self) -> bool:
        """Send what waits, in order, as far as there is room. True if nothing waits any more."""
        outbox = self.outbox
        while outbox:
            if not self._flushing.acquire(blocking=False):
                return False  # whoever holds it looks again after letting go
            try:
                while outbox:
                    data, fd = outbox[0]  # stays first until it is sent, so that nothing overtakes it
                    if not self._transmit(data, fd):
                        return False
                    outbox.popleft()
                    if fd is not None:
                        fd.close()
            finally:
                self._flushing.release()
        return True

    def _transmit(self, data: bytes, fd: OwnedFd | None) -> bool:
        try:
            if fd is None:
                self._sock.send(data, _SEND_FLAGS)
            else:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd.fileno()))
                self._sock.sendmsg((data,), (rights,), _SEND_FLAGS)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            if error.errno not in _ENDED:
                raise
            self._swallowed.append(data)
        return True

    def receive(self) -> Packet | None:
        """The next packet, or None if there is none yet.

        Raises:
            EOFError: the connection has ended, and everything sent before has been received.
            DecodeError: the packet was larger than MAX_PACKET_BYTES.
            FdError: descriptors were sent and this process could not take them all.
        """
        while True:
            try:
                data, control, flags, _ = self._sock.recvmsg(MAX_PACKET_BYTES, _CONTROL_BYTES, _CLOEXEC)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # The peer ended without reading all of ours. The kernel says so once, before it hands out what the
                # peer had sent, and its last words count: they may be a Release.
                continue
            except OSError as error:
                raise EOFError from error
            fds = _take_fds(control) if control else ()
            if flags & _CUT:
                for fd in fds:
                    fd.close()
                if flags & _DATA_CUT:
                    raise DecodeError("door", f"a packet is larger than the {MAX_PACKET_BYTES} bytes allowed")
                raise FdError("descriptors were sent and did not all arrive", _LIMIT_REMEDY)
            if not data and not fds:
                raise EOFError
            return Packet(data, fds)

    def shutdown(self) -> None:
        """End the connection for both sides and keep the number. May be called again."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor and forget what waits. May be called again.

        Only for a connection that no finalizer refers to; otherwise ``shutdown``, and let go of it.
        """
        with forks.fork_lock:
            self._sock.close()
            forks.unregister(self)
        self._forget_outbox()

    def after_fork_in_child(self) -> None:
        """Close the child's copy. From here on ``send`` does nothing in the child."""
        _abandon_socket(self._sock)
        self._flushing = threading.Lock()  # a thread that is not here may hold the old one
        self._forget_outbox()

    def _forget_outbox(self) -> None:
        outbox = self.outbox
        while outbox:
            with suppress(IndexError):
                _, fd = outbox.popleft()
                if fd is not None:
                    fd.close()


class DoorPoll(forks.ForkAware, Generic[T]):
    """Tells which of many connections have a packet, or have ended. A loop watches ``fileno()`` instead of each.

    Raises:
        FdError: the process has no descriptor left.
    """

    def __init__(self) -> None:
        self._owners: dict[int, T] = {}
        with forks.fork_lock:
            try:
                self._poll = select.epoll()
            except OSError as error:
                raise FdError("no descriptor is left to watch doors with", _LIMIT_REMEDY) from error
            forks.register(self)

    def fileno(self) -> int:
        """The number to watch: ready when one of the connections is."""
        return self._poll.fileno()

    def add(self, door: DoorConnection, owner: T) -> None:
        """Watch a connection; ``ready`` gives its ``owner``.

        Raises:
            FdError: it cannot be watched; most likely the system watches too many for this user.
        """
        try:
            self._poll.register(door.fileno(), select.EPOLLIN)
        except OSError as error:
            raise FdError(f"a door cannot be watched: {error.strerror}", "raise fs.epoll.max_user_watches") from error
        self._owners[door.fileno()] = owner

    def discard(self, door: DoorConnection) -> None:
        """Watch a connection no more, before it is closed. It need not have been watched."""
        if self._owners.pop(door.fileno(), None) is not None:
            self._poll.unregister(door.fileno())

    def ready(self, most: int) -> list[T]:
        """The owners of at most ``most`` connections that have a packet or have ended; the others come next time."""
        return [self._owners[number] for number, _ in self._poll.poll(0, most)]

    def close(self) -> None:
        """Watch nothing any more. May be called again."""
        with forks.fork_lock:
            self._poll.close()
            forks.unregister(self)

    def after_fork_in_child(self) -> None:
        """Close the child's copy. Nothing is taken out of it: what is in there is the parent's."""
        self._poll.close()


class _QuietSocket(socket.socket):
    """Closed by its death without a ResourceWarning: the garbage collector may come to it before its connection."""

    def __del__(self) -> None:
        self.close()


def _take_fds(control: list[tuple[int, int, bytes]]) -> tuple[OwnedFd, ...]:
    """Own every descriptor in the control messages, whatever else is there."""
    return tuple(
        OwnedFd(number)
        for level, kind, payload in control
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
        for number in array("i", payload[: len(payload) // 4 * 4])
    )


def _abandon_socket(sock: socket.socket) -> None:
    """Close a forked child's copy of a socket, without a word to the other end."""
    number = sock.detach()
    if number >= 0:
        os.close(number)


def _open_socket() -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise FdError("no descriptor is left for a socket", _LIMIT_REMEDY) from error


def door_connect(path: str) -> DoorConnection:
    """Connect to the door at ``path``, without waiting.

    Raises:
        BlockingIOError: too many others are connecting at the moment; try again.
        FileNotFoundError, ConnectionRefusedError: no publisher is there.
        OSError: the path cannot be reached for another reason.
        FdError: the process has no descriptor left.
    """
    with forks.fork_lock:
        sock = _open_socket()
        try:
            sock.connect(path)
        except BaseException:
            sock.close()
            raise
        return DoorConnection(sock)


class DoorListener(forks.ForkAware):
    """The publisher's end: a bound, listening socket. ``path`` must be free; see ``Endpoint.claim``.

    Raises:
        EndpointError: the path cannot be bound.
        FdError: the process has no descriptor left.
    """

    def __init__(self, path: str) -> None:
        with forks.fork_lock:
            self._sock = _open_socket()
            #: Given up for a moment at the limit on descriptors, so that a caller can be turned away.
            self._reserve: OwnedFd | None = None
            try:
                os.fchmod(self._sock.fileno(), 0o600)  # what the file at the path gets, less the umask
                with suppress(OSError):
                    # Connections inherit it. Descriptors are only ever sent to subscribers, and to close one that a
                    # peer has sent may block: a TCP socket that lingers.
                    self._sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
                self._sock.bind(path)
                self._sock.listen(_BACKLOG)
                self._reserve = _open_reserve()
            except OSError as error:
                self._sock.close()
                raise EndpointError(path, f"cannot be bound: {error.strerror or error}") from error
            forks.register(self)

    def fileno(self) -> int:
        """The number to watch; -1 after ``close`` and in a forked child."""
        return self._sock.fileno()

    def accept(self) -> DoorConnection | None:
        """The next connection, or None if nobody waits.

        Raises:
            FdError: the process or the system has no descriptor left. Whoever connected was turned away, so the
                listener does not stay ready over it.
        """
        with forks.fork_lock:
            if self._reserve is None:
                self._reserve = _open_reserve()
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return None
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                if not self._turn_one_away():
                    return None
                raise FdError("a subscriber was turned away: no descriptor is left", _LIMIT_REMEDY) from error
            return DoorConnection(sock)

    def _turn_one_away(self) -> bool:
        """Close the next connection. False if nobody waits: at the limit, the kernel complains before it looks."""
        if self._reserve is not None:
            self._reserve.close()
        try:
            self._sock.accept()[0].close()
        except BlockingIOError:
            return False
        except OSError:
            pass  # not even now: another thread was faster
        finally:
            self._reserve = _open_reserve()
        return True

    def close(self) -> None:
        """Stop listening. The path stays; see ``Claim.release``. May be called again."""
        with forks.fork_lock:
            self._sock.close()
            if self._reserve is not None:
                self._reserve.close()
            forks.unregister(self)

    def after_fork_in_child(self) -> None:
        """Close the child's copy, which would keep callers of a dead publisher waiting."""
        _abandon_socket(self._sock)
        if self._reserve is not None:
            self._reserve.close()


def _open_reserve() -> OwnedFd | None:
    try:
        return OwnedFd(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return None  # tried again at the next accept
