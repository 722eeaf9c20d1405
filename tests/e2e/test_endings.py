"""No publisher, a lost one, a new one; refusals; closing; what may not be done twice."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import signal
import time
from unittest import mock

import pytest
import torch

import busync
from busync import wire
from tests.support import patterns
from tests.support.processes import Cast
from tests.support.roles import soon, wait_until

aio = pytest.mark.asyncio
devices = pytest.mark.devices


def _state() -> dict[str, torch.Tensor]:
    return patterns.state(1, 1, patterns.SMALL)


@aio
async def test_no_publisher() -> None:
    begun = time.monotonic()
    with pytest.raises(busync.PublisherLost, match=r"none within 0\.2 s") as caught:
        async with busync.Subscriber("nobody", connect_timeout=0.2):
            pass
    assert 0.15 < time.monotonic() - begun < 3
    assert "start one" in str(caught.value)


@aio
@devices
async def test_the_publisher_may_come_later() -> None:
    async def attach() -> busync.Snapshot:
        async with busync.Subscriber("p", connect_timeout=10) as sub:
            return await sub.next(timeout=5)

    waiting = asyncio.create_task(attach())
    await asyncio.sleep(0.1)
    async with busync.Publisher("p") as pub:
        await pub.publish(_state())
        assert (await waiting).version == 1
        del waiting


@aio
async def test_in_use() -> None:
    async with busync.Publisher("p"):
        with pytest.raises(busync.EndpointInUse) as caught:
            async with busync.Publisher("p"):
                pass
        assert caught.value.pid == os.getpid()
    async with busync.Publisher("p"):  # and free again
        pass


@aio
@devices
async def test_opened_twice_and_used_too_early_or_too_late() -> None:
    pub, sub = busync.Publisher("p"), busync.Subscriber("p")
    for ask in (lambda: pub.publish(_state()), lambda: pub.wait(1)):
        with pytest.raises(busync.ClosedError):
            await ask()
    with pytest.raises(busync.UsageError, match="not open"):
        await sub.next(timeout=1)
    with pytest.raises(busync.UsageError, match="not open"):
        sub.poll()
    assert not sub.connected
    async with pub, sub:
        for thing in (pub, sub):
            with pytest.raises(busync.UsageError, match="open already"):
                await thing.__aenter__()
        assert sub.connected
    for thing in (pub, sub):
        await thing.close()
        with pytest.raises(busync.ClosedError):
            await thing.__aenter__()
    with pytest.raises(busync.ClosedError):
        pub.status()
    with pytest.raises(busync.ClosedError):
        await pub.publish(_state())
    for ask in (sub.next, sub.latest, lambda timeout: sub.wait_version(1, timeout)):
        with pytest.raises(busync.ClosedError):
            await ask(timeout=1)
    with pytest.raises(busync.ClosedError):
        sub.poll()
    assert not sub.connected
    assert sub.version == 0


@aio
@devices
async def test_pickling_and_copying_are_refused() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(_state())
        snapshot = await sub.next(timeout=5)
        for thing in (pub, sub, snapshot):
            for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(busync.UsageError):
                    attempt(thing)


@aio
async def test_closing_while_calls_wait() -> None:
    async with busync.Publisher("p") as pub:
        sub = busync.Subscriber("p")
        await sub.__aenter__()
        waiting = [asyncio.create_task(ask) for ask in (sub.next(), sub.latest(), sub.wait_version(3))]
        await asyncio.sleep(0.05)
        await sub.close()
        for task in waiting:
            with pytest.raises(busync.ClosedError):
                await task
        await soon(lambda: pub.status()["subscribers"] == [])


@aio
@devices
async def test_closing_the_publisher_while_calls_wait(device: str) -> None:
    pub = busync.Publisher("p", max_segments=2)
    await pub.__aenter__()
    async with busync.Subscriber("p") as sub:
        publish = asyncio.create_task(pub.publish(_state(), wait="all"))
        held = await sub.next(timeout=5)
        if device == "cuda":
            held.tensors  # noqa: B018  # later there would be none
        waits = [publish, asyncio.create_task(pub.wait(1, "released"))]
        await pub.publish(_state())
        waits.append(asyncio.create_task(pub.publish(_state())))  # finds no segment
        await asyncio.sleep(0.05)
        await pub.close()
        for task in waits:
            with pytest.raises(busync.ClosedError):
                await task
        patterns.check(held.tensors, 1, 1, patterns.SMALL)


@aio
@devices
async def test_a_load_runs_while_the_subscriber_closes() -> None:
    async with busync.Publisher("p") as pub:
        sub = busync.Subscriber("p")
        await sub.__aenter__()
        await pub.publish(patterns.state(1, 1))
        module = patterns.Module()
        load = asyncio.create_task((await sub.next(timeout=5)).load_into(module))
        await asyncio.sleep(0)
        await sub.close()
        await load
        patterns.check(module.state_dict(), 1, 1)


@aio
@devices
async def test_a_publisher_goes_and_another_comes(device: str) -> None:
    async with busync.Publisher("p") as pub:
        sub = busync.Subscriber("p", name="a")
        await sub.__aenter__()
        for version in range(1, 4):
            await pub.publish(patterns.state(1, version))
        old = await sub.next(timeout=5)
        assert old.version == 3
        if device == "cuda":
            old.tensors  # noqa: B018  # later there would be none
        first = pub.incarnation
    await soon(lambda: not sub.connected)
    patterns.check(old.tensors, 1, 3)
    waiting = asyncio.create_task(sub.next(timeout=20))
    async with busync.Publisher("p") as pub:
        await pub.publish(patterns.state(2, 1))
        new = await waiting
        assert new.version == 1
        assert new.incarnation == pub.incarnation != first == old.incarnation
        patterns.check(new.tensors, 2, 1)
        patterns.check(old.tensors, 1, 3)
        await old.ack()  # to nobody
        del old
        assert (await sub.latest(timeout=5)).version == 1
        assert sub.connected
        del waiting
    await sub.close()


@aio
@pytest.mark.parametrize("side", ["publisher", "subscriber"])
async def test_another_wire_version_is_refused(side: str) -> None:
    where = "busync.protocol.publisher" if side == "publisher" else "busync.protocol.subscriber"
    async with busync.Publisher("p") as pub:
        with mock.patch(f"{where}.WIRE_VERSION", wire.WIRE_VERSION + 1):
            with pytest.raises(busync.RefusedError, match="wire version") as caught:
                async with busync.Subscriber("p", connect_timeout=5):
                    pass
            assert caught.value.code == "wire-version"
        await soon(lambda: pub.status()["subscribers"] == [])
        async with busync.Subscriber("p"):
            pass


@aio
async def test_another_user_is_refused() -> None:
    async with busync.Publisher("p") as pub:
        with mock.patch("busync.server.os.geteuid", return_value=12345):
            with pytest.raises(busync.RefusedError, match="allow_uids") as caught:
                async with busync.Subscriber("p", connect_timeout=5):
                    pass
            assert caught.value.code == "uid"
        await soon(lambda: pub.status()["subscribers"] == [])


@aio
async def test_a_refusal_after_a_restart_reaches_calls_that_wait() -> None:
    async with busync.Publisher("p"):
        sub = busync.Subscriber("p")
        await sub.__aenter__()
    waiting = asyncio.create_task(sub.next())
    await soon(lambda: not sub.connected)
    with mock.patch("busync.protocol.publisher.WIRE_VERSION", wire.WIRE_VERSION + 1):
        async with busync.Publisher("p"):
            with pytest.raises(busync.RefusedError):
                await waiting
            with pytest.raises(busync.RefusedError):
                await sub.next(timeout=1)
    await sub.close()


@pytest.mark.parametrize("flavour", ["asyncio", "uvloop", "blocking"])
def test_a_killed_publisher_is_replaced(cast: Cast, flavour: str) -> None:
    learner = cast.publisher("policy")
    actor = cast.subscriber("policy", flavour, name="actor")
    for _ in range(5):
        learner.call("publish")
    assert actor.call("next")[0] == 5
    actor.call("keep")
    learner.kill()
    wait_until(lambda: not actor.call("connected"), what="the loss was noticed")
    learner = cast.publisher("policy")
    learner.call("publish")
    version, _, incarnation = actor.call("next")
    assert (version, incarnation) == (1, learner.call("incarnation"))
    actor.call("keep")
    assert actor.call("check") == 2


def test_a_killed_publisher_is_noticed_without_a_call(cast: Cast) -> None:
    learner = cast.publisher("policy")
    actor = cast.subscriber("policy", "asyncio")
    learner.call("publish")
    actor.call("next")
    actor.call("keep")
    actor.start("next", timeout=20)
    os.kill(learner.pid, signal.SIGKILL)
    learner.kill()
    other = cast.publisher("policy")
    other.call("publish")
    assert actor.finish()[0] == 1
    assert actor.call("check") == 1


@devices
def test_a_stopped_reader_holds_nobody_up(cast: Cast) -> None:
    learner = cast.publisher("policy", max_segments=2, lease_timeout=0.3)
    stuck, well = cast.subscriber("policy", name="stuck"), cast.subscriber("policy", "uvloop", name="well")
    learner.call("publish")
    for actor in (stuck, well):
        actor.call("next")
        actor.call("keep")
    os.kill(stuck.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        for version in range(2, 8):
            well.start("next")
            learner.call("publish")
            assert well.finish()[0] == version
            well.call("keep")
            well.call("drop")
        assert time.monotonic() - begun < 5
    finally:
        os.kill(stuck.pid, signal.SIGCONT)
    assert stuck.call("check") == 1
    assert stuck.call("next")[0] == 7
