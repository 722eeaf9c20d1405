from __future__ import annotations

import atexit
import gc
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from busync.errors import ClosedError, EndpointError, FdError, ForkedError
from busync.fds import open_fds
from busync.ids import new_token
from busync.transport import bus
from busync.transport.bus import DealerBus, RouterBus, Sent
from tests.forking import check_in_child
from tests.test_fds import no_descriptor_left
from tests.transport.test_endpoint import place

__all__ = ["place"]

T = TypeVar("T")
TOKEN = b"t" * 16
MAX = 100_000


@pytest.fixture
def path(place: Path) -> str:
    return str(place / "bus")


@pytest.fixture
def router(path: str) -> Iterator[RouterBus]:
    made = RouterBus(path)
    yield made
    made.close()
    assert bus._shared._context is None


@pytest.fixture
def dealer(path: str, router: RouterBus) -> Iterator[DealerBus]:
    made = DealerBus(path, TOKEN, MAX)
    assert made.send(b"join")
    assert wait_for(router.receive) == (TOKEN, b"join")
    yield made
    made.close()


def wait_for(get: Callable[[], T | None], timeout: float = 5) -> T:
    """Poll until there is something."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if found := get():
            return found
        time.sleep(0.0005)
    raise AssertionError("nothing came")


def test_both_ways(router: RouterBus, dealer: DealerBus) -> None:
    assert not router.has_input()
    assert router.receive() is None
    assert dealer.receive() is None
    assert router.send(TOKEN, b"announce") is Sent.SENT
    assert router.send(TOKEN, b"") is Sent.SENT
    assert wait_for(dealer.receive) == b"announce"
    wait_for(dealer.has_input)
    assert dealer.receive() == b""
    assert not dealer.has_input()
    assert not dealer.lost()


def test_order_and_large_messages(router: RouterBus, dealer: DealerBus) -> None:
    sent = [b"%d " % number + bytes(number * 37 % MAX // 2) for number in range(1000)]
    for data in sent:
        assert router.send(TOKEN, data) is Sent.SENT
    assert [wait_for(dealer.receive) for _ in sent] == sent


def test_nobody_of_that_name(router: RouterBus, dealer: DealerBus) -> None:
    assert router.send(b"x" * 16, b"data") is Sent.GONE
    assert router.send(TOKEN, b"still works") is Sent.SENT
    assert wait_for(dealer.receive) == b"still works"
    dealer.close()
    wait_for(lambda: router.send(TOKEN, b"data") is Sent.GONE)


def test_a_reader_that_does_not_read(router: RouterBus, dealer: DealerBus) -> None:
    outcomes: list[Sent] = []
    while not outcomes or outcomes[-1] is Sent.SENT:
        outcomes.append(router.send(TOKEN, bytes(4000)))
        assert len(outcomes) < 20_000
    assert outcomes[-1] is Sent.FULL
    assert len(outcomes) > 4096
    received = 0
    while received < len(outcomes) - 1:  # nothing that was SENT is lost
        wait_for(lambda: dealer.receive() is not None)
        received += 1
    assert router.send(TOKEN, b"room again") is Sent.SENT


def test_the_signal_and_the_duty(router: RouterBus, dealer: DealerBus) -> None:
    while dealer.receive() is not None:
        pass
    assert not select.select([dealer.fileno()], [], [], 0)[0]
    router.send(TOKEN, b"1")
    assert select.select([dealer.fileno()], [], [], 5)[0]
    assert wait_for(dealer.receive) == b"1"
    assert dealer.receive() is None
    router.send(TOKEN, b"2")
    assert select.select([dealer.fileno()], [], [], 5)[0]
    dealer.send(b"x")  # may consume the signal
    assert dealer.has_input()
    assert dealer.receive() == b"2"


def test_malformed_messages_are_dropped_and_counted(router: RouterBus, dealer: DealerBus) -> None:
    raw: zmq.Socket[bytes] = dealer._sock
    raw.send_multipart([b"one", b"too many"])
    raw.send_multipart([b"x"] * 1000)
    dealer.send(b"fine")
    assert wait_for(router.receive) == (TOKEN, b"fine")
    assert router.malformed == 2


def test_a_peer_that_sends_too_much_is_cut_off(router: RouterBus, dealer: DealerBus) -> None:
    dealer.send(bytes(257))
    wait_for(dealer.lost)
    wait_for(lambda: router.send(TOKEN, b"x") is Sent.GONE)
    assert router.receive() is None


def test_a_publisher_that_sends_too_much_is_left(router: RouterBus, dealer: DealerBus) -> None:
    router.send(TOKEN, bytes(MAX))
    assert len(wait_for(dealer.receive)) == MAX
    router.send(TOKEN, bytes(MAX + 1))
    wait_for(dealer.lost)
    assert dealer.receive() is None


def test_a_token_is_taken_once(router: RouterBus, dealer: DealerBus, path: str) -> None:
    thief = DealerBus(path, TOKEN, MAX)
    thief.send(b"join")
    honest = DealerBus(path, new_token(), MAX)
    honest.send(b"join")
    token, _ = wait_for(router.receive)
    assert token != TOKEN
    router.send(TOKEN, b"secret")
    assert wait_for(dealer.receive) == b"secret"
    assert thief.receive() is None
    thief.close()
    honest.close()


def test_lost_when_the_publisher_goes(path: str) -> None:
    router = RouterBus(path)
    dealer = DealerBus(path, TOKEN, MAX)
    dealer.send(b"join")
    wait_for(router.receive)
    assert not dealer.lost()
    router.close()
    assert select.select([dealer.monitor_fileno()], [], [], 5)[0]
    wait_for(dealer.lost)
    assert dealer.lost()
    os.unlink(path)
    again = RouterBus(path)
    time.sleep(0.05)
    assert again.receive() is None  # it does not come back by itself
    dealer.close()
    again.close()


def test_a_path_is_never_taken_from_somebody_else(path: str) -> None:
    before = os.umask(0)
    try:
        router = RouterBus(path)
    finally:
        os.umask(before)
    assert os.lstat(path).st_mode & 0o777 == 0o600
    with pytest.raises(EndpointError, match="in use"):
        RouterBus(path)
    dealer = DealerBus(path, TOKEN, MAX)
    dealer.send(b"join")
    wait_for(router.receive)
    os.unlink(path)
    other = RouterBus(path)
    router.close()
    assert os.path.exists(path)  # it is the other's
    dealer.close()
    other.close()


def test_what_was_sent_before_the_end_may_still_be_read(path: str) -> None:
    router = RouterBus(path)
    dealer = DealerBus(path, TOKEN, MAX)
    dealer.send(b"join")
    wait_for(router.receive)
    router.send(TOKEN, b"read in time")
    assert wait_for(dealer.receive) == b"read in time"
    router.close()
    wait_for(dealer.lost)
    assert dealer.receive() is None
    dealer.close()


def test_lost_when_nobody_is_there(path: str) -> None:
    dealer = DealerBus(path, TOKEN, MAX)
    wait_for(dealer.lost)
    dealer.close()


def test_lost_when_it_is_no_bus(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        dealer = DealerBus(path, TOKEN, MAX)
        other, _ = listener.accept()
        other.send(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))
        wait_for(dealer.lost)
        other.close()
        dealer.close()


def test_errors_of_zeromq_become_ours(place: Path) -> None:
    with pytest.raises(EndpointError, match="the bus cannot be bound: No such file"):
        RouterBus(str(place / "missing" / "bus"))
    with pytest.raises(EndpointError, match="the bus cannot be bound: AF_UNIX path too long"):
        RouterBus(str(place / ("x" * 200)))
    with pytest.raises(EndpointError, match="the bus failed"):
        DealerBus(str(place / ("x" * 200)), TOKEN, MAX)
    with pytest.raises(EndpointError, match="the bus failed: Invalid argument"):
        DealerBus(str(place / "bus"), b"t" * 300, MAX)
    assert bus._shared._context is None


def test_no_descriptor_left(path: str) -> None:
    with no_descriptor_left():  # libzmq would abort the process
        with pytest.raises(FdError, match="ulimit"):
            RouterBus(path)
        with pytest.raises(FdError, match="ulimit"):
            DealerBus(path, TOKEN, MAX)
    assert bus._shared._context is None


def test_running_out_of_descriptors_in_the_middle(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    router = RouterBus(path)
    monkeypatch.setattr(bus, "_SPARE_FDS", 0)
    with no_descriptor_left(), pytest.raises(FdError, match="ulimit"):
        DealerBus(path, TOKEN, MAX)
    router.close()
    assert bus._shared._context is None


def test_enough_spare_descriptors_are_asked_for(path: str) -> None:
    before = open_fds()
    dealer = DealerBus(path, TOKEN, MAX)
    assert open_fds() - before < bus._SPARE_FDS
    dealer.close()


def test_the_context_lives_from_the_first_socket_to_the_last(path: str) -> None:
    fds, threads = open_fds(), len(os.listdir("/proc/self/task"))
    router = RouterBus(path)
    shared = bus._shared._context
    dealers = [DealerBus(path, new_token(), MAX) for _ in range(5)]
    assert bus._shared._context is shared
    router.close()
    router.close()
    for dealer in dealers:
        assert bus._shared._context is shared
        dealer.close()
        dealer.close()
    assert bus._shared._context is None
    assert open_fds() == fds
    wait_for(lambda: len(os.listdir("/proc/self/task")) <= threads)


def test_close_is_quick_with_unsent_messages(router: RouterBus, dealer: DealerBus) -> None:
    for _ in range(4000):
        router.send(TOKEN, bytes(1000))
    start = time.monotonic()
    router.close()
    dealer.close()
    assert time.monotonic() - start < 2


def test_use_after_close(router: RouterBus, dealer: DealerBus) -> None:
    for closed in (router, dealer):
        closed.close()
        for use in (closed.receive, closed.has_input, closed.fileno):
            with pytest.raises(ClosedError, match="bus is closed"):
                use()
    with pytest.raises(ClosedError):
        router.send(TOKEN, b"x")
    for late in (lambda: dealer.send(b"x"), dealer.lost, dealer.monitor_fileno):
        with pytest.raises(ClosedError):
            late()


def test_contexts_are_made_and_ended_by_many_threads(place: Path) -> None:
    failures: list[BaseException] = []

    def work(who: int) -> None:
        try:
            for _ in range(20):
                DealerBus(str(place / str(who)), TOKEN, MAX).close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert bus._shared._context is None


def test_children_leave_the_parents_bus_alone(router: RouterBus, dealer: DealerBus, path: str) -> None:
    def check() -> None:
        for use in (router.receive, dealer.receive, router.has_input, dealer.lost, dealer.monitor_fileno):
            with pytest.raises(ForkedError, match="bus belongs to the parent"):
                use()
        with pytest.raises(ForkedError):
            router.send(TOKEN, b"from the child")
        with pytest.raises(ForkedError):
            dealer.send(b"from the child")
        router.close()
        dealer.close()
        gc.collect()
        own_router = RouterBus(path + "2")
        own = DealerBus(path + "2", TOKEN, MAX)
        own.send(b"join")
        assert wait_for(own_router.receive) == (TOKEN, b"join")
        own.close()
        own_router.close()
        os.unlink(path + "2")
        assert bus._shared._context is None

    for number in range(5):
        check_in_child(check)
        gc.collect()
        assert router.send(TOKEN, b"%d" % number) is Sent.SENT
        assert wait_for(dealer.receive) == b"%d" % number
    assert os.path.exists(path)
    assert not dealer.lost()


def test_a_child_never_collects_what_is_not_its_own(path: str) -> None:
    ends: list[RouterBus | DealerBus] = [RouterBus(path), DealerBus(path, TOKEN, MAX)]
    gc.collect()

    def check() -> None:
        complaints: list[object] = []
        sys.unraisablehook = complaints.append
        ends.clear()
        gc.collect()
        assert not complaints

    check_in_child(check)
    for end in ends:
        end.close()


def test_a_child_that_ends_the_ordinary_way(router: RouterBus, dealer: DealerBus) -> None:
    pid = os.fork()
    if pid == 0:
        atexit._run_exitfuncs()
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    router.send(TOKEN, b"fine")
    assert wait_for(dealer.receive) == b"fine"
