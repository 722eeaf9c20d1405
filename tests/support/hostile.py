"""Peers that speak the protocol by hand, so that they can speak it wrongly."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, cast

import zmq

from busync.fds import SEALS
from busync.transport.endpoint import Endpoint
from busync.wire import (
    WIRE_VERSION,
    BusDown,
    DoorDown,
    Hello,
    Join,
    Joined,
    Message,
    Segment,
    Want,
    Welcome,
    decode_bus_down,
    decode_door_down,
    decode_door_up,
    encode,
)

PATIENCE = 5.0  #: seconds that a peer waits for what must come
_PACKET = 64 * 1024


class RawSubscriber:
    """One connection to a publisher, and whatever a test wants to say on it. Blocking; for one thread."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = Endpoint.resolve(endpoint)
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.door.settimeout(PATIENCE)
        self.door.connect(self.endpoint.door_path)
        self.fds: list[int] = []
        self.welcome: Welcome
        self.number = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._bus: zmq.Socket[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.end_door()
        self.end_bus()
        while self.fds:
            os.close(self.fds.pop())

    def end_door(self) -> None:
        self.door.close()

    def end_bus(self) -> None:
        if self._bus is not None and self._context is not None:
            self._bus.close(0)
            self._context.term()
            self._bus = self._context = None

    # Door

    def say(self, what: Message | bytes, fds: list[int] | None = None) -> None:
        """Send one packet, with descriptors if need be."""
        data = encode(what) if isinstance(what, Message) else what
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.door.sendmsg([data], rights)

    def hear(self) -> DoorDown:
        """The next packet; its descriptors are kept in ``fds``."""
        data, fds, _, _ = socket.recv_fds(self.door, _PACKET, 4)
        self.fds += fds
        if not data:
            raise EOFError
        return decode_door_down(data)

    def hello(self, topic: str = "default", name: str = "hostile") -> Welcome:
        self.say(Hello(wire=WIRE_VERSION, topic=topic, name=name))
        welcome = self.hear()
        assert isinstance(welcome, Welcome), f"no Welcome but {welcome}"
        self.welcome = welcome
        return welcome

    def want(self, have: int = 0) -> int:
        """Ask; the number of the Want."""
        self.number += 1
        self.say(Want(number=self.number, have=have))
        return self.number

    def was_ended(self) -> bool:
        """Whether the publisher ends the connection, whatever it says before."""
        stop_at = time.monotonic() + PATIENCE
        try:
            while time.monotonic() < stop_at:
                self.hear()
        except (EOFError, ConnectionError):
            return True
        except TimeoutError:
            return False
        return False

    # Bus

    def connect_bus(self, token: bytes) -> None:
        self._context = zmq.Context()
        self._bus = self._context.socket(zmq.DEALER)
        self._bus.setsockopt(zmq.ROUTING_ID, token)
        self._bus.setsockopt(zmq.LINGER, 0)
        self._bus.setsockopt(zmq.SNDTIMEO, int(PATIENCE * 1000))
        self._bus.connect(f"ipc://{self.endpoint.bus_path}")

    def say_bus(self, *frames: bytes) -> None:
        assert self._bus is not None, "there is no bus"
        self._bus.send_multipart(list(frames))

    def hear_bus(self, timeout: float = PATIENCE) -> BusDown | None:
        """The next message, or None."""
        assert self._bus is not None, "there is no bus"
        return decode_bus_down(self._bus.recv()) if self._bus.poll(int(timeout * 1000)) else None

    def join(self, topic: str = "default", name: str = "hostile") -> Self:
        """Hello, Join, and what comes back: an honest session so far."""
        self.connect_bus(self.hello(topic, name).token)
        self.say_bus(encode(Join()))
        assert isinstance(self.hear_bus(), Joined)
        return self


class RawSession:
    """A subscriber's connection to a RawPublisher."""

    def __init__(self, publisher: RawPublisher, door: socket.socket) -> None:
        self.publisher = publisher
        self.door = door
        self.token = b""

    def say(self, what: Message | bytes, fds: list[int] | None = None) -> None:
        data = encode(what) if isinstance(what, Message) else what
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.door.sendmsg([data], rights)

    def say_bus(self, what: Message | bytes) -> None:
        self.publisher.bus.send_multipart([self.token, encode(what) if isinstance(what, Message) else what])

    def hear(self) -> Any:
        """The next packet.

        Raises:
            OSError: the session is over, or the publisher ends.
        """
        self.publisher.wait_for(self.door)
        data = self.door.recv(_PACKET)
        if not data:
            raise ConnectionResetError
        return decode_door_up(data)

    def hear_want(self) -> Want:
        while not isinstance(message := self.hear(), Want):
            pass
        return message

    def welcome(self, **changes: Any) -> None:
        """Everything up to an attached session. ``changes`` are fields of Welcome, or the board's ``fd``."""
        assert isinstance(self.hear(), Hello)
        self.token = os.urandom(15).join([b"\1", b""])
        fd = changes.pop("fd", self.publisher.board)
        fields = {"wire": WIRE_VERSION, "incarnation": self.publisher.incarnation, "slot": 1, "max_held": 2}
        self.say(Welcome(**{"token": self.token, **fields, **changes}), [fd] if fd is not None else None)
        self.publisher.wait_for(cast(socket.socket, self.publisher.bus))
        assert self.publisher.bus.recv_multipart()[0] == self.token
        self.say_bus(Joined(incarnation=self.publisher.incarnation))

    def segment(self, number: int, nbytes: int, fd: int | None = None, incarnation: int | None = None) -> None:
        """Push a segment: a good one unless ``fd`` is given."""
        made = sealed_file(nbytes) if fd is None else fd
        self.say(Segment(incarnation=incarnation or self.publisher.incarnation, segment=number, nbytes=nbytes), [made])
        if fd is None:
            os.close(made)


class RawPublisher:
    """Serves an endpoint on a thread: ``script`` is run with each session in turn, until it is over."""

    def __init__(self, endpoint: str, script: Callable[[RawSession], None]) -> None:
        self.incarnation = 77
        self.sessions = 0
        self.errors: list[BaseException] = []
        self.bus: zmq.Socket[bytes]
        self._script = script
        self._over = False
        self._claim = Endpoint.resolve(endpoint).claim()
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(self._claim.endpoint.door_path)
        self._door.listen(16)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.bus = self._context.socket(zmq.ROUTER)
        self.bus.bind(f"ipc://{self._claim.endpoint.bus_path}")
        self.board = sealed_file(4096, self._write_board)
        self._thread = threading.Thread(target=self._run, name="raw-publisher")

    def _write_board(self, page: mmap.mmap) -> None:
        slots = memoryview(page).cast("Q")
        slots[0], slots[1] = self.incarnation, 1_000_000
        slots.release()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        self._thread.join()
        self._door.close()
        self.bus.close(0)
        self._context.term()
        os.close(self.board)
        self._claim.release()
        if error is None and self.errors:
            raise self.errors[0]

    def wait_for(self, sock: socket.socket) -> None:
        """Wait for input.

        Raises:
            ConnectionResetError: the test is over.
        """
        poller = zmq.Poller()
        poller.register(sock, zmq.POLLIN)
        while not poller.poll(20):
            if self._over:
                raise ConnectionResetError

    def _run(self) -> None:
        with suppress(ConnectionResetError):
            while True:
                self.wait_for(self._door)
                door, _ = self._door.accept()
                self.sessions += 1
                with door:
                    try:
                        self._script(RawSession(self, door))
                        select.select([door], [], [], 0)
                        while True:
                            RawSession(self, door).hear()
                    except OSError:
                        continue
                    except BaseException as error:
                        self.errors.append(error)


def sealed_file(
    nbytes: int, fill: Callable[[mmap.mmap], None] | None = None, seals: int = SEALS, size: int | None = None
) -> int:
    """A descriptor of a sealed file in memory."""
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes if size is None else size)
    if fill is not None:
        with mmap.mmap(fd, nbytes) as page:
            fill(page)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
