"""Cancelling any await leaks and loses nothing."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

import busync
from tests.support import patterns
from tests.support.leaks import resources
from tests.support.roles import soon

pytestmark = [pytest.mark.asyncio, pytest.mark.devices]


async def test_next_cancelled_at_random_moments() -> None:
    rng = random.Random(20)
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        version = 0
        figures = []
        for round_ in range(200):
            if round_ in (50, 199):
                figures.append(resources().fds.total())
            task = asyncio.create_task(sub.next())
            if round_ % 3 == 0:
                version += 1
                await pub.publish(patterns.state(1, version, patterns.SMALL))
            await asyncio.sleep(rng.uniform(0, 0.005))
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            del task
        assert sub.version == version
        await soon(lambda: pub.status()["subscribers"][0]["leases"] == [], what="the end of every lease")
        assert figures[0] == figures[1]
        version += 1
        await pub.publish(patterns.state(1, version, patterns.SMALL))
        snapshot = await sub.next(timeout=5)
        patterns.check(snapshot.tensors, 1, version, patterns.SMALL)


async def test_a_version_that_a_cancelled_call_was_given_is_not_lost() -> None:
    rng = random.Random(21)
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        for version in range(1, 101):
            task = asyncio.create_task(sub.next())
            await asyncio.sleep(0)
            await pub.publish(patterns.state(1, version, patterns.SMALL))
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            task.cancel()
            try:
                snapshot = await task
            except asyncio.CancelledError:
                snapshot = await sub.next(timeout=2)
            assert snapshot.version == version
            del task, snapshot


@pytest.mark.parametrize("timeout", [0.0, 0.0005])
async def test_a_timeout_loses_nothing(timeout: float) -> None:
    """Nor does a caller that has no time at all, and asks again and again."""
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        for version in range(1, 31):
            publish = asyncio.create_task(pub.publish(patterns.state(1, version, patterns.SMALL)))
            seen = 0
            while seen != version:
                with suppress(busync.WaitTimeout):
                    seen = (await sub.next(timeout=timeout)).version
            await publish


async def test_publish_cancelled_at_random_moments() -> None:
    rng = random.Random(22)
    async with busync.Publisher("p", max_segments=3) as pub, busync.Subscriber("p") as sub:
        done = 0
        for _ in range(150):
            source = patterns.state(9, done + 1)
            task = asyncio.create_task(pub.publish(source, label=str(done + 1)))
            if rng.random() < 0.9:
                await asyncio.sleep(rng.uniform(0, 0.004))
            else:
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            for tensor in source.values():
                patterns.fill(tensor, -3)  # nobody reads it any more
            if sub.version != done:
                done += 1
                assert sub.version == done, "a version was skipped"
                snapshot = await sub.next(timeout=5)
                assert (snapshot.version, snapshot.label) == (done, str(done))
                patterns.check(snapshot.tensors, 9, done)
                del snapshot
        assert done > 0
        status = pub.status()["topics"]["default"]
        assert [v["state"] for v in status["versions"]] == ["PUBLISHED"]
        assert status["segments"] <= 3
        assert (await pub.publish(patterns.state(9, done + 1))).version == done + 1


async def test_publish_cancelled_while_it_waits_for_a_segment() -> None:
    async with busync.Publisher("p", max_segments=2, lease_timeout=30) as pub, busync.Subscriber("p") as sub:
        await pub.publish(patterns.state(1, 1))
        held = await sub.next(timeout=5)
        await pub.publish(patterns.state(1, 2))
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await pub.publish(patterns.state(1, 3))
        held.release()
        await soon(lambda: pub.status()["subscribers"][0]["leases"] == [])
        assert (await pub.publish(patterns.state(1, 3))).version == 3


async def test_publish_cancelled_while_it_waits_for_acks_is_published() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        publish = asyncio.create_task(pub.publish(patterns.state(1, 1), wait="all"))
        await soon(lambda: sub.version == 1)
        publish.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publish
        assert (await sub.next(timeout=5)).version == 1


async def test_a_loan_cancelled_at_random_moments() -> None:
    rng = random.Random(23)
    async with busync.Publisher("p", max_segments=2) as pub:
        for _ in range(60):

            async def lend() -> None:
                async with pub.loan(like=patterns.Module()) as loan:
                    patterns.fill(loan.tensors["conv"], 1)
                    await asyncio.sleep(rng.uniform(0, 0.002))

            task = asyncio.create_task(lend())
            await asyncio.sleep(rng.uniform(0, 0.004))
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await soon(lambda: pub.status()["topics"]["default"]["versions"] == [], what="every loan came back")
        assert (await pub.publish(patterns.state(1, 1))).version == 1


async def test_a_load_cancelled_is_complete() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        for version in range(1, 21):
            await pub.publish(patterns.state(1, version))
            snapshot = await sub.next(timeout=5)
            module = patterns.Module()
            task = asyncio.create_task(snapshot.load_into(module))
            await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            patterns.check(module.state_dict(), 1, version)
            del snapshot, task


async def test_opening_and_closing_cancelled_at_random_moments() -> None:
    rng = random.Random(24)
    for _ in range(25):

        async def use() -> None:
            async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
                await pub.publish(patterns.state(1, 1, patterns.SMALL))
                await sub.next(timeout=5)

        task = asyncio.create_task(use())
        await asyncio.sleep(rng.uniform(0, 0.03))
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.done()
        del task
    async with busync.Publisher("p"):  # the endpoint is free
        pass


async def test_cancelling_is_not_swallowed() -> None:
    for delay in (0, 0.001, 0.003, 0.01):
        publisher = busync.Publisher("p")
        task = asyncio.create_task(publisher.__aenter__())
        await asyncio.sleep(delay)
        if task.done():
            await publisher.close()
            continue
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with busync.Publisher("p"):
        for _ in range(3):
            subscriber = busync.Subscriber("p")
            await subscriber.__aenter__()
            task2 = asyncio.create_task(subscriber.close())
            await asyncio.sleep(0)
            finished = task2.done()
            task2.cancel()
            await asyncio.wait([task2])
            assert finished or task2.cancelled()
            await subscriber.close()
