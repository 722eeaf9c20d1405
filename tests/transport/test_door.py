from __future__ import annotations

import errno
import gc
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from busync import forks, wire
from busync.errors import DecodeError, EndpointError, FdError
from busync.fds import OwnedFd, open_fds
from busync.transport import door
from busync.transport.door import DoorConnection, DoorListener, DoorPoll, Packet, door_connect
from tests.forking import check_in_child
from tests.test_fds import is_open, no_descriptor_left
from tests.transport.test_endpoint import place

__all__ = ["place"]


@pytest.fixture
def pair() -> Iterator[tuple[DoorConnection, DoorConnection]]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left, right = map(DoorConnection, ends)
    yield left, right
    left.close()
    right.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, DoorConnection]]:
    """A peer that does as it likes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = DoorConnection(ours)
    yield theirs, connection
    connection.close()
    theirs.close()


def take(connection: DoorConnection, timeout: float = 5) -> Packet:
    """Wait for a packet."""
    while (packet := connection.receive()) is None:
        assert select.select([connection], [], [], timeout)[0], "no packet came"
    return packet


def ended(connection: DoorConnection) -> bool:
    select.select([connection], [], [], 5)
    try:
        connection.receive()
    except EOFError:
        return True
    return False


def note(text: str) -> OwnedFd:
    fd = OwnedFd(os.memfd_create("note", os.MFD_CLOEXEC))
    os.write(fd.fileno(), text.encode())
    return fd


def read_note(fd: OwnedFd) -> str:
    with fd:
        return os.pread(fd.fileno(), 100, 0).decode()


def close(*ends: DoorConnection | DoorListener) -> None:
    for end in ends:
        end.close()


def fill(connection: DoorConnection, size: int = 1000) -> int:
    """Send numbered packets until one has to wait; returns how many were sent, with that one."""
    for number in range(100_000):
        if not connection.send(b"%d" % number + b" " * size):
            return number + 1
    raise AssertionError("it never fills")


# connecting


def test_connect_accept_and_talk(place: Path) -> None:
    listener = DoorListener(str(place / "door"))
    assert listener.accept() is None
    client = door_connect(str(place / "door"))
    server = listener.accept()
    assert server is not None
    assert listener.accept() is None
    me = (os.getpid(), os.geteuid(), os.getegid())
    assert server.peer == me
    assert client.peer == me
    assert server.receive() is None
    assert client.send(b"hello")
    assert take(server) == (b"hello", ())
    assert server.send(b"welcome", note("board"))
    data, (fd,) = take(client)
    assert data == b"welcome"
    assert not os.get_inheritable(fd.fileno())
    assert read_note(fd) == "board"
    ends: tuple[DoorConnection | DoorListener, ...] = (client, server, listener)
    assert not any(os.get_inheritable(end.fileno()) for end in ends)
    close(*ends, *ends)
    assert [end.fileno() for end in ends] == [-1, -1, -1]
    assert (place / "door").is_socket()


def test_the_kernel_names_the_peer(place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs to change its user")
    place.chmod(0o777)
    listener = DoorListener(str(place / "door"))
    os.chmod(place / "door", 0o666)

    def check() -> None:
        os.setgid(23456)
        os.setuid(12345)
        client = door_connect(str(place / "door"))
        assert client.peer.uid == 0
        client.send(str(os.getpid()).encode())

    check_in_child(check)
    server = listener.accept()
    assert server is not None
    assert server.peer == (int(take(server).data), 12345, 23456)
    server.close()
    listener.close()


def test_nobody_listens(place: Path) -> None:
    with pytest.raises(FileNotFoundError):
        door_connect(str(place / "door"))
    DoorListener(str(place / "door")).close()
    fds = open_fds()
    with pytest.raises(ConnectionRefusedError):
        door_connect(str(place / "door"))
    assert open_fds() == fds


def test_a_full_backlog_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_BACKLOG", 1)
    listener = DoorListener(str(place / "door"))
    clients = [door_connect(str(place / "door")) for _ in range(2)]
    with pytest.raises(BlockingIOError):
        door_connect(str(place / "door"))
    server = listener.accept()
    assert server is not None
    clients.append(door_connect(str(place / "door")))
    close(server, listener, *clients)


def test_a_path_that_cannot_be_bound(place: Path) -> None:
    fds = open_fds()
    (place / "door").write_text("")
    with pytest.raises(EndpointError, match="cannot be bound: Address already in use"):
        DoorListener(str(place / "door"))
    with pytest.raises(EndpointError, match="too long"):
        DoorListener(str(place / ("x" * 200)))
    assert open_fds() == fds


def test_no_descriptor_left_for_a_socket(place: Path) -> None:
    with no_descriptor_left():
        with pytest.raises(FdError, match="ulimit"):
            DoorListener(str(place / "door"))
        with pytest.raises(FdError, match="ulimit"):
            door_connect(str(place / "door"))


def test_accept_at_the_limit_turns_away_and_does_not_spin(place: Path) -> None:
    listener = DoorListener(str(place / "door"))
    clients = [door_connect(str(place / "door")) for _ in range(3)]
    with no_descriptor_left():
        for _ in clients:
            with pytest.raises(FdError, match="turned away"):
                listener.accept()
        assert listener.accept() is None  # the kernel says EMFILE even then
        assert not select.select([listener], [], [], 0)[0]
    assert all(ended(client) for client in clients)
    clients.append(door_connect(str(place / "door")))
    server = listener.accept()
    assert server is not None
    close(server, listener, *clients)


def test_accept_at_the_limit_without_a_reserve(place: Path) -> None:
    listener = DoorListener(str(place / "door"))
    client = door_connect(str(place / "door"))
    assert listener._reserve is not None
    with no_descriptor_left():
        listener._reserve.close()
        listener._reserve = None
        stolen = os.open(os.devnull, os.O_RDONLY)
        with pytest.raises(FdError, match="turned away"):
            listener.accept()
        os.close(stolen)
    server = listener.accept()  # this one still waits
    assert server is not None
    close(server, listener, client)


# sending and receiving


def test_limits_agree() -> None:
    assert door.MAX_PACKET_BYTES == wire.MAX_PACKET_BYTES


def test_the_largest_packet(pair: tuple[DoorConnection, DoorConnection]) -> None:
    left, right = pair
    data = os.urandom(door.MAX_PACKET_BYTES)
    assert left.send(data, note("x"))
    packet = take(right)
    assert packet.data == data
    packet.fds[0].close()


def test_a_full_socket_queues_in_order(pair: tuple[DoorConnection, DoorConnection]) -> None:
    left, right = pair
    count = fill(left)
    assert left.pending == 1
    assert not left.send(b"%d" % count)  # behind the one that waits, even if it would fit
    assert left.pending == 2
    for number in range(count + 1):
        assert int(take(right).data) == number
        left.flush()
    assert left.flush()
    assert left.pending == 0
    assert right.receive() is None


def test_a_send_drains_what_waits(pair: tuple[DoorConnection, DoorConnection]) -> None:
    left, right = pair
    count = fill(left)
    for number in range(count - 1):
        assert int(take(right).data) == number
    assert left.send(b"last")
    assert left.pending == 0
    assert int(take(right).data) == count - 1
    assert take(right).data == b"last"


def test_of_many_doors_those_are_told_that_have_something(place: Path) -> None:
    fds = open_fds()
    listener = DoorListener(str(place / "door"))
    clients = [door_connect(str(place / "door")) for _ in range(4)]
    servers = [server for _ in clients if (server := listener.accept()) is not None]
    poll: DoorPoll[int] = DoorPoll()
    for number, server in enumerate(servers):
        poll.add(server, number)
    assert poll.ready(9) == []
    clients[1].send(b"one")
    clients[2].send(b"two")
    clients[2].send(b"more")
    assert select.select([poll.fileno()], [], [], 5)[0] == [poll.fileno()]
    assert sorted(poll.ready(9)) == [1, 2]
    assert len(poll.ready(1)) == 1  # the rest comes next time
    assert take(servers[1]).data == b"one"
    assert take(servers[2]).data == b"two"
    assert poll.ready(9) == [2]  # it has more
    servers[3].send(b"never read, so the connection is reset")
    clients[3].close()
    for _ in range(3):  # and not only once
        assert sorted(poll.ready(9)) == [2, 3]
    for server in (servers[3], servers[3], servers[2]):
        poll.discard(server)
        server.close()
    assert poll.ready(9) == []
    poll.close()
    poll.close()
    close(*clients, *servers, listener)
    assert open_fds() == fds


def test_a_child_does_not_keep_what_tells_of_doors(pair: tuple[DoorConnection, DoorConnection]) -> None:
    poll: DoorPoll[str] = DoorPoll()
    poll.add(pair[0], "left")
    number = poll.fileno()

    def check() -> None:
        assert not is_open(number)

    check_in_child(check)
    pair[1].send(b"still told of")
    assert poll.ready(9) == ["left"]
    poll.close()


def test_without_a_descriptor_nothing_tells_of_doors() -> None:
    with no_descriptor_left(), pytest.raises(FdError, match="to watch doors"):
        DoorPoll[int]()


def test_a_queued_descriptor_is_a_duplicate(pair: tuple[DoorConnection, DoorConnection]) -> None:
    left, right = pair
    count = fill(left)
    fds = open_fds()
    with note("kept") as fd:
        assert not left.send(b"fd", fd)
    assert open_fds() == fds + 1
    for _ in range(count):
        take(right)
        left.flush()
    data, (received,) = take(right)
    assert (data, read_note(received)) == (b"fd", "kept")
    assert open_fds() == fds


def test_a_descriptor_that_cannot_be_queued(pair: tuple[DoorConnection, DoorConnection]) -> None:
    left, _ = pair
    fill(left)
    with note("lost") as fd, no_descriptor_left(), pytest.raises(FdError, match="duplicated"):
        left.send(b"fd", fd)
    assert left.pending == 1


def test_too_many_descriptors_in_flight_are_retried(
    pair: tuple[DoorConnection, DoorConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = pair
    real = left._sock

    class Crowded:
        def sendmsg(self, *_: object) -> int:
            raise OSError(errno.ETOOMANYREFS, "too many references")

    monkeypatch.setattr(left, "_sock", Crowded())
    with note("late") as fd:
        assert not left.send(b"fd", fd)
    assert not left.flush()
    monkeypatch.setattr(left, "_sock", real)
    assert left.flush()
    assert read_note(take(right).fds[0]) == "late"


def test_many_packets_keep_their_descriptors(pair: tuple[DoorConnection, DoorConnection]) -> None:
    left, right = pair
    dice = random.Random(5)
    expected: list[tuple[int, bool]] = []
    total, received, fds = 5000, 0, open_fds()
    while received < total:
        for _ in range(dice.randrange(1, 200)):
            if len(expected) == total:
                break
            number, with_fd = len(expected), dice.random() < 0.7
            padding = b" " * dice.randrange(3000)
            if with_fd:
                with note(str(number)) as fd:
                    left.send(b"%d" % number + padding, fd)
            else:
                left.send(b"%d" % number + padding)
            expected.append((number, with_fd))
        for _ in range(dice.randrange(1, 200)):
            left.flush()
            packet = right.receive()
            if packet is None:
                break
            number, with_fd = expected[received]
            assert int(packet.data) == number
            assert [read_note(fd) for fd in packet.fds] == ([str(number)] if with_fd else [])
            received += 1
    assert open_fds() == fds


def test_sends_of_many_threads(pair: tuple[DoorConnection, DoorConnection]) -> None:
    left, right = pair
    threads, each = 6, 2000

    def work(who: int) -> None:
        for number in range(each):
            left.send(b"%d %d" % (who, number))
            if number % 7 == 0:
                left.flush()

    running = [threading.Thread(target=work, args=(who,)) for who in range(threads)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in running:
            thread.start()
        next_of = [0] * threads
        for _ in range(threads * each):
            while (packet := right.receive()) is None:
                left.flush()
            who, number = map(int, packet.data.split())
            assert number == next_of[who]
            next_of[who] += 1
    finally:
        sys.setswitchinterval(switch)
        for thread in running:
            thread.join()
    assert left.pending == 0


def test_a_finalizer_that_sends_in_the_middle_of_a_flush(
    pair: tuple[DoorConnection, DoorConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = pair
    count = fill(left)
    left.send(b"waits")
    transmit = left._transmit
    interruptions = iter(range(3))

    def interrupted(data: bytes, fd: OwnedFd | None) -> bool:
        for number in interruptions:  # as the garbage collector might do anywhere
            left.send(b"finalizer %d" % number)
            break
        return transmit(data, fd)

    monkeypatch.setattr(left, "_transmit", interrupted)
    texts = []
    for _ in range(count + 4):
        texts.append(take(right).data.strip())
        left.flush()
    assert texts[-4:] == [b"waits", b"finalizer 0", b"finalizer 1", b"finalizer 2"]
    assert left.pending == 0


def test_a_packet_that_comes_while_a_flush_ends(pair: tuple[DoorConnection, DoorConnection]) -> None:
    left, right = pair
    lock = left._flushing

    class Interrupted:
        """Another thread queues a packet and cannot flush it, since this one has not let go yet."""

        def __init__(self) -> None:
            self.acquire = lock.acquire

        def release(self) -> None:
            if late:
                left.outbox.append(late.pop())
            lock.release()

    late: list[tuple[bytes, OwnedFd | None]] = [(b"late", None)]
    fill(left)
    while right.receive() is not None:
        pass
    left._flushing = Interrupted()  # type: ignore[assignment]
    assert left.flush()
    assert left.pending == 0
    take(right)
    assert take(right).data == b"late"


def test_a_flush_elsewhere_is_not_waited_for(pair: tuple[DoorConnection, DoorConnection]) -> None:
    left, right = pair
    fill(left)
    take(right)
    with left._flushing:
        assert not left.flush()
        assert left.pending == 1
    assert left.flush()


def test_a_packet_that_is_too_large(raw: tuple[socket.socket, DoorConnection]) -> None:
    theirs, ours = raw
    fds = open_fds()
    with note("x") as fd:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd.fileno()]))
        theirs.sendmsg([bytes(door.MAX_PACKET_BYTES + 1)], [rights])
    with pytest.raises(DecodeError, match=r"door.*larger than the 32768") as caught:
        take(ours)
    assert open_fds() == fds  # though the traceback keeps what the frames referred to
    del caught


def test_a_packet_that_no_socket_takes(pair: tuple[DoorConnection, DoorConnection]) -> None:
    with pytest.raises(OSError, match="too long"):
        pair[0].send(bytes(10_000_000))
    assert pair[0].pending == 0


def test_more_descriptors_than_there_is_room_for(raw: tuple[socket.socket, DoorConnection]) -> None:
    theirs, ours = raw
    fds = open_fds()
    with note("x") as fd:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd.fileno()] * 200))
        theirs.sendmsg([b"flood"], [rights])
    with pytest.raises(FdError, match="did not all arrive"):
        take(ours)
    assert open_fds() == fds


def test_descriptors_that_nobody_asked_for_are_owned(raw: tuple[socket.socket, DoorConnection]) -> None:
    theirs, ours = raw
    fds = open_fds()
    with note("x") as fd:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd.fileno()] * 2))
        theirs.sendmsg([b"two"], [rights])
        theirs.sendmsg([b""], [rights])
    assert len(take(ours).fds) == 2
    assert len(take(ours).fds) == 2
    assert open_fds() == fds


def test_no_descriptor_left_for_what_arrives(pair: tuple[DoorConnection, DoorConnection]) -> None:
    left, right = pair
    with note("x") as fd:
        left.send(b"segment", fd)
    left.send(b"next")
    with no_descriptor_left(), pytest.raises(FdError, match="ulimit"):
        right.receive()
    assert take(right).data == b"next"


def test_other_control_messages_come_along(raw: tuple[socket.socket, DoorConnection]) -> None:
    theirs, ours = raw
    ours._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    with note("x") as fd:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd.fileno()]))
        me = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, struct.pack("iII", os.getpid(), os.geteuid(), os.getegid()))
        theirs.sendmsg([b"both"], [rights, me])
        theirs.sendmsg([b"one"])
    data, (received,) = take(ours)
    assert (data, read_note(received)) == (b"both", "x")
    assert take(ours) == (b"one", ())


# the end


def test_the_end_comes_after_the_last_words(pair: tuple[DoorConnection, DoorConnection]) -> None:
    left, right = pair
    left.send(b"release", note("x"))
    left.send(b"bye")
    left.close()
    assert read_note(take(right).fds[0]) == "x"
    assert take(right).data == b"bye"
    for _ in range(2):
        with pytest.raises(EOFError):
            right.receive()


def test_last_words_of_a_peer_that_did_not_listen(pair: tuple[DoorConnection, DoorConnection]) -> None:
    left, right = pair
    right.send(b"never read")
    left.send(b"release 1")
    left.send(b"release 2")
    left.close()  # with input unread: the kernel first says ECONNRESET to the other side
    assert take(right).data == b"release 1"
    assert take(right).data == b"release 2"
    with pytest.raises(EOFError):
        right.receive()


def test_a_killed_process_is_noticed_after_its_last_words(place: Path) -> None:
    listener = DoorListener(str(place / "door"))
    pid = os.fork()
    if pid == 0:
        client = door_connect(str(place / "door"))
        client.send(b"release")
        select.select([client], [], [], 5)
        os.kill(os.getpid(), signal.SIGKILL)
    server = None
    while server is None:
        select.select([listener], [], [], 5)
        server = listener.accept()
    server.send(b"never read")
    os.waitpid(pid, 0)
    assert take(server).data == b"release"
    assert ended(server)
    server.close()
    listener.close()


@pytest.mark.parametrize("end", ["close", "shutdown"])
def test_sends_to_the_dead_are_swallowed(pair: tuple[DoorConnection, DoorConnection], end: str) -> None:
    left, right = pair
    right.send(b"never read")
    fill(left)
    getattr(right, end)()
    fds = open_fds()
    with note("x") as fd:
        assert left.send(b"x", fd)
    assert left.send(b"x")
    assert left.pending == 0
    assert open_fds() == fds


def test_shutdown_keeps_the_number(pair: tuple[DoorConnection, DoorConnection]) -> None:
    left, right = pair
    number = left.fileno()
    left.shutdown()
    left.shutdown()
    assert left.fileno() == number
    assert left.send(b"late release")
    assert ended(left)
    assert ended(right)
    other = os.open(os.devnull, os.O_RDONLY)
    assert other != number
    os.close(other)


def test_the_number_is_closed_with_the_last_reference() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = DoorConnection(ours)
    del ours
    number = connection.fileno()
    finalizer_has_it = connection
    connection.shutdown()
    fill_fds = open_fds()
    del connection
    assert is_open(number)
    del finalizer_has_it
    gc.collect()  # an unclosed socket would warn, and warnings are errors
    assert open_fds() == fill_fds - 1
    theirs.close()


def test_one_that_the_garbage_collector_finds_is_closed_in_silence() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    knot: list[object] = [DoorConnection(ours)]
    knot.append(knot)
    fds = open_fds()
    del ours, knot
    gc.collect()
    assert open_fds() == fds - 1
    theirs.close()


def test_close_forgets_what_waits() -> None:
    fds = open_fds()
    left, right = map(DoorConnection, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    fill(left)
    with note("x") as fd:
        left.send(b"x", fd)
    left.close()
    left.shutdown()
    assert left.pending == 0
    assert left.send(b"x")
    with pytest.raises(EOFError):
        left.receive()
    right.close()
    assert open_fds() == fds


def test_an_empty_packet_is_the_end(raw: tuple[socket.socket, DoorConnection]) -> None:
    theirs, ours = raw
    theirs.send(b"")
    assert ended(ours)


# forks


def test_a_child_is_mute(place: Path) -> None:
    listener = DoorListener(str(place / "door"))
    server = door_connect(str(place / "door"))
    client = listener.accept()  # the end that may send descriptors
    assert client is not None
    numbers = [listener.fileno(), client.fileno(), server.fileno()]
    fill(client)
    with note("queued") as fd:
        client.send(b"queued", fd)

    def check() -> None:
        assert not any(map(is_open, numbers))
        assert client.pending == 0
        again = os.open(os.devnull, os.O_RDONLY)
        assert again in numbers  # a stranger's file now
        assert client.send(b"from the child")
        assert client.flush()
        for end in (client, server):
            end.shutdown()
            end.after_fork_in_child()
            end.close()
        listener.close()
        assert is_open(again)
        with pytest.raises(EOFError):
            client.receive()

    check_in_child(check)
    server.send(b"the parent goes on")
    assert take(client).data == b"the parent goes on"
    numbers_seen = [take(server).data]
    while client.pending:
        client.flush()
        numbers_seen.append(take(server).data)
    while (packet := server.receive()) is not None:
        numbers_seen.append(packet.data)
    assert b"from the child" not in numbers_seen
    assert numbers_seen[-1] == b"queued"
    close(client, server, listener)


def test_nobody_can_make_a_publisher_close_what_it_sent(place: Path) -> None:
    """To close the last descriptor of a TCP socket that lingers blocks, and a receiver closes what it does not want."""
    listener = DoorListener(str(place / "door"))
    client = door_connect(str(place / "door"))
    server = listener.accept()
    assert server is not None
    try:
        server._sock.getsockopt(socket.SOL_SOCKET, door._SO_PASSRIGHTS)
    except OSError:
        close(client, server, listener)
        pytest.skip("Linux before 6.16")
    with note("x") as fd:
        with pytest.raises(PermissionError):
            client.send(b"there", fd)
        server.send(b"here", fd)
    packet = take(client)
    assert read_note(packet.fds[0]) == "x"
    packet.fds[0].close()
    close(client, server, listener)


ORPHANING = """
import os, sys, time
from busync.transport.door import DoorListener
listener = DoorListener(sys.argv[1])
print("ready", flush=True)
while (server := listener.accept()) is None:
    pass
if os.fork() == 0:
    print(os.getpid(), flush=True)
    os.close(1)
time.sleep(20)
os._exit(0)
"""


def test_a_surviving_child_does_not_keep_a_door_open(place: Path) -> None:
    path = str(place / "door")
    with subprocess.Popen([sys.executable, "-c", ORPHANING, path], stdout=subprocess.PIPE) as publisher:
        assert publisher.stdout is not None
        publisher.stdout.readline()
        client = door_connect(path)
        orphan = int(publisher.stdout.readline())
        publisher.kill()
    try:
        assert ended(client)
        with pytest.raises(ConnectionRefusedError):
            door_connect(path)
        os.kill(orphan, 0)
    finally:
        os.kill(orphan, signal.SIGKILL)
    client.close()


def test_a_fork_never_sees_a_connection_half_made(place: Path) -> None:
    listener = DoorListener(str(place / "door"))
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            client = door_connect(str(place / "door"))
            server = listener.accept()
            client.close()
            if server is not None:
                server.close()

    thread = threading.Thread(target=churn)
    thread.start()

    def check() -> None:
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(int(fd))]
        assert not [link for link in links if link.startswith("socket:")]

    try:
        for _ in range(30):
            check_in_child(check)
            time.sleep(0.001)
    finally:
        done.set()
        thread.join()
        listener.close()


def test_closed_connections_are_forgotten_by_the_fork_hooks(pair: tuple[DoorConnection, DoorConnection]) -> None:
    assert pair[0] in forks._registered
    pair[0].close()
    assert pair[0] not in forks._registered
