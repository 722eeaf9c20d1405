"""The bus: messages over ZeroMQ, from one ROUTER (publisher) to many DEALERs (subscribers), over ipc.

Nothing here blocks, and each object belongs to one thread. **The duty of whoever watches ``fileno()``**: it is ZeroMQ's
signal, which tells that the state has *changed*, not that there is input. After any call, a send included, there may be
input without a new signal. So receive until None when it becomes readable, and after anything else ask ``has_input()``.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any, NoReturn

import zmq

from busync import forks
from busync.errors import BusyncError, ClosedError, EndpointError, FdError, ForkedError
from busync.fds import fd_budget

_MAX_JOIN_BYTES = 256  #: upstream carries nothing but Join
_SPARE_FDS = 16  #: more than a context, a socket and its monitor need
_BACKLOG = 1024
_SEND_QUEUE = 4096  #: messages for one subscriber that does not read
_FRAMES_PER_CALL = 256  #: the most that one receive() of the publisher looks at: a peer may send without end
_MAX_SOCKETS = 65_535  #: of one process; far above what its descriptors allow
_NOW = int(zmq.NOBLOCK)
_NOW_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _POLLIN, _MORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE)
#: Whatever ends the connection of a DEALER, which never connects again.
_LOSSES = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_Socket = zmq.Socket[bytes]


class Sent(Enum):
    """What became of a message."""

    SENT = auto()
    GONE = auto()  #: nobody with this token is connected
    FULL = auto()  #: this subscriber has not read its last 4096 messages


class _Shared(forks.ForkAware):
    """The ZeroMQ context of this process: made for the first socket, ended after the last, forgotten by children."""

    def __init__(self) -> None:
        self._context: zmq.Context[_Socket] | None = None
        self._sockets = 0
        forks.register(self)

    def open(self, kind: int) -> _Socket:
        if fd_budget() < _SPARE_FDS:  # libzmq aborts the process when it runs out of them
            raise _no_descriptor()
        with forks.fork_lock:
            if self._context is None:
                self._context = zmq.Context()
                self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
            self._sockets += 1
            try:
                sock = self._context.socket(kind)
            except BaseException:
                self._drop()
                raise
            sock.setsockopt(zmq.LINGER, 0)
            return sock

    def close(self, sock: _Socket) -> None:
        with forks.fork_lock:
            sock.close(0)
            self._drop()

    def _drop(self) -> None:
        self._sockets -= 1
        if self._sockets == 0 and self._context is not None:
            self._context.term()
            self._context = None

    def after_fork_in_child(self) -> None:
        """Its threads are not here: to close or collect anything of it would warn, hang or abort."""
        forks.immortal(self._context)
        self._context = None
        self._sockets = 0


_shared = _Shared()


def _no_descriptor() -> FdError:
    return FdError("no descriptor is left for the bus", "raise the limit on open files (ulimit -n)")


def _translate(path: str, error: zmq.ZMQError) -> BusyncError:
    """The one place where errors of ZeroMQ become ours."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return _no_descriptor()
    return EndpointError(path, f"the bus failed: {zmq.strerror(error.errno or 0)}")


def _listen(path: str) -> socket.socket:
    """A listening socket at ``path``, for its owner alone from the first moment.

    ZeroMQ's own would take the path from whoever has it, and remove it at its end, though somebody else may have it.

    Raises:
        EndpointError: the path cannot be bound.
        FdError: the process has no descriptor left.
    """
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise _no_descriptor() from error
    try:
        os.fchmod(listener.fileno(), 0o600)  # what the file at the path gets, less the umask
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise EndpointError(path, f"the bus cannot be bound: {error.strerror or error}") from error
    return listener


def _refuse(make: Callable[[str], ClosedError], *_: object) -> NoReturn:
    raise make("bus")


class _Bus(forks.ForkAware):
    """What both ends share: one socket, its signal, its end."""

    def __init__(self, kind: int, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        try:
            self._sock = _shared.open(kind)
        except zmq.ZMQError as error:
            raise _translate(path, error) from error
        # Bound once. Sending goes past pyzmq's layer in Python, which would cost a third of it. When the socket is
        # closed or the process forked, other functions take their place, so that no call has to check.
        self._send: Callable[[bytes, int], object] = super(zmq.Socket, self._sock).send
        self._recv: Callable[[int], bytes] = self._sock.recv
        self._get: Callable[[int], Any] = self._sock.getsockopt
        forks.register(self)

    def fileno(self) -> int:
        """ZeroMQ's signal. Mind the duty in the module's docstring."""
        return int(self._get(zmq.FD))

    def has_input(self) -> bool:
        """Whether ``receive`` has something to return."""
        return bool(self._get(_EVENTS) & _POLLIN)

    def close(self) -> None:
        """Close the socket, dropping what is not yet sent. May be called again; does nothing in a forked child."""
        if self._sock.closed or os.getpid() != self._pid:
            return
        forks.unregister(self)
        self._disarm(ClosedError)
        _shared.close(self._sock)

    def after_fork_in_child(self) -> None:
        """Never touch the socket in the child, not even to collect it."""
        forks.immortal(self._sock)
        self._disarm(ForkedError)

    def _disarm(self, make: Callable[[str], ClosedError]) -> None:
        self._send = self._recv = self._get = partial(_refuse, make)


class RouterBus(_Bus):
    """The publisher's end, bound to ``path``, which must be free; see ``Endpoint.claim``.

    Raises:
        EndpointError: the path cannot be bound.
        FdError: the process has no descriptor left.
    """

    def __init__(self, path: str) -> None:
        super().__init__(zmq.ROUTER, path)
        #: Messages from peers that were not one token and one frame, and were dropped.
        self.malformed = 0
        self._parts: list[bytes] = []  #: of the message that is being received
        try:
            self._sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._sock.setsockopt(zmq.MAXMSGSIZE, _MAX_JOIN_BYTES)
            self._sock.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
            listener = _listen(path)
            self._sock.setsockopt(zmq.USE_FD, listener.fileno())
            self._sock.bind(f"ipc://{path}")
            listener.detach()  # it is ZeroMQ's now
        except zmq.ZMQError as error:
            self.close()
            raise _translate(path, error) from error
        except BaseException:
            self.close()
            raise

    def send(self, token: bytes, data: bytes) -> Sent:
        """Send one message to the subscriber that connected with ``token``.

        Raises:
            EndpointError: ZeroMQ failed in an unknown way.
            ClosedError: the bus is closed, or belongs to the parent of this process.
        """
        try:
            self._send(token, _NOW_MORE)
            self._send(data, _NOW)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Sent.GONE
            raise _translate(self._path, error) from error
        return Sent.SENT

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next message and the token that its sender connected with, or None if there is none (in reach).

        Raises:
            EndpointError: ZeroMQ failed in an unknown way.
            ClosedError: the bus is closed, or belongs to the parent of this process.
        """
        try:
            for _ in range(_FRAMES_PER_CALL):
                if not self._get(_EVENTS) & _POLLIN:
                    break
                self._parts.append(self._recv(_NOW))
                if self._get(_MORE):
                    del self._parts[3:]
                    continue
                parts, self._parts = self._parts, []
                if len(parts) == 2:
                    return parts[0], parts[1]
                self.malformed += 1
        except zmq.ZMQError as error:
            raise _translate(self._path, error) from error
        return None


class DealerBus(_Bus):
    """A subscriber's end, connected to ``path`` as ``token``. Once lost, it stays lost.

    A message larger than ``max_message_bytes`` ends the connection.

    Raises:
        EndpointError: ZeroMQ failed in an unknown way. (A missing publisher shows as ``lost()``.)
        FdError: the process has no descriptor left.
    """

    def __init__(self, path: str, token: bytes, max_message_bytes: int) -> None:
        self._monitor: _Socket | None = None
        self._lost = False
        super().__init__(zmq.DEALER, path)
        try:
            self._sock.setsockopt(zmq.ROUTING_ID, token)
            self._sock.setsockopt(zmq.RECONNECT_IVL, -1)
            self._sock.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
            self._monitor = self._sock.get_monitor_socket(_LOSSES)
            self._monitor_get: Callable[[int], Any] = self._monitor.getsockopt
            self._monitor_recv = self._monitor.recv_multipart
            self._sock.connect(f"ipc://{path}")
        except zmq.ZMQError as error:
            self.close()
            raise _translate(path, error) from error

    def monitor_fileno(self) -> int:
        """The signal of the connection's end: call ``lost`` when it becomes readable, and once before."""
        return int(self._monitor_get(zmq.FD))

    def send(self, data: bytes) -> bool:
        """Send one message; False if the queue is full.

        Raises:
            EndpointError: ZeroMQ failed in an unknown way.
            ClosedError: the bus is closed, or belongs to the parent of this process.
        """
        try:
            self._send(data, _NOW)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise _translate(self._path, error) from error
        return True

    def receive(self) -> bytes | None:
        """The next message, or None if there is none.

        Raises:
            EndpointError: ZeroMQ failed in an unknown way.
            ClosedError: the bus is closed, or belongs to the parent of this process.
        """
        try:
            return self._recv(_NOW) if self._get(_EVENTS) & _POLLIN else None
        except zmq.ZMQError as error:
            raise _translate(self._path, error) from error

    def lost(self) -> bool:
        """Whether the connection has ended, or was never made."""
        while self._monitor_get(_EVENTS) & _POLLIN:
            self._monitor_recv(_NOW)
            self._lost = True
        return self._lost

    def close(self) -> None:
        """Close both sockets. May be called again; does nothing in a forked child."""
        if self._monitor is not None and not self._sock.closed and os.getpid() == self._pid:
            self._sock.disable_monitor()
            self._monitor.close(0)  # left open, it would make the end of the context wait for ever
        super().close()

    def after_fork_in_child(self) -> None:
        """Never touch the sockets in the child, not even to collect them."""
        forks.immortal(self._monitor)
        super().after_fork_in_child()

    def _disarm(self, make: Callable[[str], ClosedError]) -> None:
        super()._disarm(make)
        self._monitor_get = partial(_refuse, make)
