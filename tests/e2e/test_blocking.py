"""busync.blocking, both sides."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures.thread import _WorkItem
from typing import Any
from unittest import mock

import pytest

import busync
from busync import blocking
from tests.support import patterns
from tests.support.roles import wait_until

pytestmark = pytest.mark.devices


def test_everything_once() -> None:
    model = patterns.Module()
    with blocking.Publisher("p") as pub, blocking.Subscriber("p", name="a") as sub:
        assert pub.publish(patterns.state(1, 1), label="x", values={"step": 1}).pending == ("a",)
        snapshot = sub.next(timeout=5)
        assert (snapshot.version, snapshot.label, snapshot.topic) == (1, "x", "default")
        assert snapshot.values == {"step": 1}
        patterns.check(snapshot.tensors, 1, 1)
        snapshot.ack()
        pub.wait(1, timeout=5)
        assert sub.latest(timeout=5).version == 1
        assert sub.poll() is None
        with pytest.raises(busync.WaitTimeout):
            sub.wait_version(2, timeout=0.05)
        del snapshot
        with pub.loan(like=model) as loan:
            for name, tensor in patterns.state(1, 2).items():
                loan.tensors[name].copy_(tensor)
            del tensor
            assert loan.publish(values={"step": 2}).version == 2
        with sub.wait_version(2, timeout=5) as snapshot:
            snapshot.load_into(model)
            assert snapshot.values == {"step": 2}
        patterns.check(model.state_dict(), 1, 2)
        assert (sub.version, sub.adopted, sub.lag, sub.connected) == (2, 2, 0, True)
        pub.publish(patterns.state(1, 3))
        for snapshot in sub:
            assert snapshot.version == 3
            break
        snapshot.release()
        pub.wait(3, "released", timeout=5)
    with pytest.raises(busync.ClosedError):
        sub.next()
    with pytest.raises(busync.ClosedError):
        pub.publish(patterns.state(1, 1))
    assert not sub.connected


def test_an_exception_in_the_block_is_reported() -> None:
    with blocking.Publisher("p") as pub, blocking.Subscriber("p", name="a") as sub:
        pub.publish(patterns.state(1, 1))
        with pytest.raises(ZeroDivisionError), sub.next(timeout=5):
            1 / 0  # noqa: B018
        wait_until(lambda: "division" in pub.status()["subscribers"][0]["reason"])


def test_an_error_of_the_callers_own_passes_through() -> None:
    def names(name: str) -> str:
        raise RuntimeError("mine")

    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        pub.publish(patterns.state(1, 1))
        with pytest.raises(RuntimeError, match="mine"):
            sub.next(timeout=5).load_into(patterns.Module(), map=names)
        assert sub.latest(timeout=5).version == 1


def test_not_inside_a_running_loop() -> None:
    async def inside() -> None:
        with pytest.raises(busync.UsageError, match="loop"), blocking.Subscriber("p"):
            pass

    with blocking.Publisher("p"):
        asyncio.run(inside())


def test_no_publisher() -> None:
    with pytest.raises(busync.PublisherLost), blocking.Subscriber("p", connect_timeout=0.1):
        pass


def test_closing_twice_and_from_a_thread_that_publishes() -> None:
    pub = blocking.Publisher("p").__enter__()
    thread = threading.Thread(target=pub.close)
    thread.start()
    pub.close()
    thread.join()
    pub.close()


def test_a_load_that_has_returned_holds_nothing() -> None:
    """The thread that ran it may lag behind: what it still refers to may not pin a version."""
    original: Any = _WorkItem.run

    def lagging(item: Any) -> None:
        original(item)
        time.sleep(0.05)

    with blocking.Publisher("p", max_held=2) as pub, blocking.Subscriber("p") as sub:
        pub.publish(patterns.state(1, 1))
        held = sub.next(timeout=5).tensors
        with mock.patch.object(_WorkItem, "run", lagging):
            for version in range(2, 6):
                pub.publish(patterns.state(1, version))
                sub.next(timeout=5).load_into(patterns.Module())
        patterns.check(held, 1, 1)
