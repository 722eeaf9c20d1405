"""The table of answers: what is waited for, for how long, and what is said when it does not come."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

import busync
from tests.support import patterns
from tests.support.roles import soon

pytestmark = pytest.mark.asyncio

STATE = patterns.state(1, 1, patterns.SMALL)
MAPPED = {"weight": torch.ones(20_000)}  #: above what readers copy, so that its tensors keep a lease


async def _adopt(sub: busync.Subscriber) -> busync.Snapshot:
    snapshot = await sub.next(timeout=5)
    await snapshot.ack()
    return snapshot


# publish(wait=...)


async def test_none_returns_at_once() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a"):
        report = await pub.publish(STATE)
        assert report == busync.PublishReport(version=1, pending=("a",), waited=report.waited)


async def test_all_with_nobody_attached_returns_at_once() -> None:
    async with busync.Publisher("p") as pub:
        begun = time.monotonic()
        report = await pub.publish(STATE, wait="all")
        assert time.monotonic() - begun < 5
        assert (report.version, report.acked, report.pending) == (1, (), ())


async def test_all_waits_for_everybody_attached() -> None:
    async with (
        busync.Publisher("p") as pub,
        busync.Subscriber("p", name="a") as a,
        busync.Subscriber("p", name="b") as b,
    ):
        publish = asyncio.create_task(pub.publish(STATE, wait="all", timeout=10))
        await _adopt(a)
        await asyncio.sleep(0.05)
        assert not publish.done()
        async with busync.Subscriber("p", name="late"):  # was not there
            await _adopt(b)
            report = await publish
        assert sorted(report.acked) == ["a", "b"]
        assert report.pending == report.gone == ()
        assert report.failed == {}


async def test_acks_are_cumulative() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        publishes = [asyncio.create_task(pub.publish(STATE, wait="all", timeout=10)) for _ in range(3)]
        await soon(lambda: sub.version == 3)
        assert (await _adopt(sub)).version == 3
        reports = await asyncio.gather(*publishes)
        assert sorted(str(r.version) for r in reports) == ["1", "2", "3"]
        assert all(r.acked == ("a",) for r in reports)


async def test_asking_for_the_next_acknowledges() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        publish = asyncio.create_task(pub.publish(STATE, wait="all", timeout=10))
        snapshot = await sub.next(timeout=5)
        await asyncio.sleep(0.05)
        assert not publish.done()
        with pytest.raises(busync.WaitTimeout):
            await sub.next(timeout=0.0)
        assert (await publish).acked == ("a",)
        del snapshot


async def test_a_number_counts_later_joiners() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as a:
        publish = asyncio.create_task(pub.publish(STATE, wait=2, timeout=10))
        await _adopt(a)
        await asyncio.sleep(0.05)
        assert not publish.done()
        async with busync.Subscriber("p", name="late") as late:
            await _adopt(late)
            assert (await publish).acked == ("a", "late")
        assert (await pub.publish(STATE, wait=0)).acked == ()


async def test_the_report_comes_also_when_the_time_is_over() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as a, busync.Subscriber("p", name="b"):
        publish = asyncio.create_task(pub.publish(STATE, wait="all", timeout=0.3))
        await _adopt(a)
        begun = time.monotonic()
        report = await publish
        assert time.monotonic() - begun < 5
        assert (report.version, report.acked, report.pending) == (1, ("a",), ("b",))


async def test_gone() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as a:
        async with busync.Subscriber("p", name="b") as b:
            publish = asyncio.create_task(pub.publish(STATE, wait="all", timeout=10))
            await b.next(timeout=5)
        await _adopt(a)
        report = await publish
        assert (report.acked, report.gone) == (("a",), ("b",))


async def test_failed_by_an_exception_in_the_block() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        publish = asyncio.create_task(pub.publish(STATE, wait="all", timeout=10))
        with pytest.raises(ZeroDivisionError):
            async with await sub.next(timeout=5):
                1 / 0  # noqa: B018
        report = await publish
        assert (report.acked, report.failed) == ((), {"a": "ZeroDivisionError: division by zero"})
        assert "division" in pub.status()["subscribers"][0]["reason"]


async def test_failed_by_a_module_that_does_not_fit() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        publish = asyncio.create_task(pub.publish(STATE, wait="all", timeout=10))
        snapshot = await sub.next(timeout=5)
        before = patterns.Module().state_dict()
        with pytest.raises(busync.MismatchError) as caught:
            await snapshot.load_into(patterns.Module())
        assert caught.value.version == 1
        assert len(caught.value.problems) > 1
        assert all(bool((t == 0).all()) for t in before.values())
        assert list((await publish).failed) == ["a"]


async def test_what_failed_is_not_acknowledged_by_asking_for_the_next() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        publish = asyncio.create_task(pub.publish(STATE, wait=1, timeout=0.5))
        with pytest.raises(busync.MismatchError):
            await (await sub.next(timeout=5)).load_into(patterns.Module())
        with pytest.raises(busync.WaitTimeout):
            await sub.next(timeout=0.01)
        assert (await publish).acked == ()
        assert pub.status()["subscribers"][0]["version"] is None
        await pub.publish(STATE)
        await _adopt(sub)
        await soon(lambda: pub.status()["subscribers"][0]["version"] == 2)


async def test_odd_arguments() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        for wait in ("some", -1, 1.5, True, None):
            with pytest.raises(busync.OptionError):
                await pub.publish(STATE, wait=wait)  # type: ignore[arg-type]
        for timeout in (-1.0, float("nan"), float("inf"), "1"):
            with pytest.raises(busync.OptionError):
                await pub.publish(STATE, timeout=timeout)  # type: ignore[arg-type]
            with pytest.raises(busync.OptionError):
                await sub.next(timeout=timeout)  # type: ignore[arg-type]
        for version in (0, -1, 1.0, True, "1"):
            with pytest.raises(busync.OptionError):
                await sub.wait_version(version)  # type: ignore[arg-type]
            with pytest.raises(busync.OptionError):
                await pub.wait(version)  # type: ignore[arg-type]
        with pytest.raises(busync.OptionError):
            await pub.wait(1)  # not published yet
        assert sub.version == 0


# pub.wait


async def test_wait_for_acks_later() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        await pub.publish(STATE)
        with pytest.raises(busync.WaitTimeout) as caught:
            await pub.wait(1, timeout=0.05)
        assert caught.value.missing == ("a",)
        assert isinstance(caught.value, TimeoutError)
        await _adopt(sub)
        await pub.wait(1, "acked", timeout=5)


async def test_wait_for_releases() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub, busync.Subscriber("p"):
        await pub.publish(MAPPED)
        snapshot = await _adopt(sub)
        weight = snapshot.tensors["weight"]
        del snapshot
        with pytest.raises(busync.WaitTimeout) as caught:
            await pub.wait(1, "released", timeout=0.05)
        assert caught.value.missing == ("a",)
        waiting = asyncio.create_task(pub.wait(1, "released", timeout=5))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        del weight
        await waiting


async def test_wait_names_who_failed() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        await pub.publish(STATE)
        waiting = asyncio.create_task(pub.wait(1, timeout=5))
        with pytest.raises(busync.MismatchError):
            await (await sub.next(timeout=5)).load_into(patterns.Module())
        with pytest.raises(busync.WaitTimeout, match="a "):
            await waiting


# Subscribers


async def test_next_gives_the_newest_and_never_the_same_twice() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        for version in range(1, 6):
            await pub.publish(patterns.state(1, version))
        assert (sub.version, sub.adopted, sub.lag) == (5, 0, 5)
        snapshot = await sub.next(timeout=5)
        assert snapshot.version == 5
        assert (sub.version, sub.adopted, sub.lag) == (5, 5, 0)
        with pytest.raises(busync.WaitTimeout, match="newer than 5"):
            await sub.next(timeout=0.05)
        await soon(lambda: pub.status()["subscribers"][0]["version"] == 5)


async def test_iterating() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(STATE, label="1")
        seen = []
        async for snapshot in sub:
            seen.append(snapshot.version)
            if len(seen) == 4:
                break
            del snapshot
            await pub.publish(STATE)
        assert seen == [1, 2, 3, 4]


async def test_wait_version() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(STATE)
        with pytest.raises(busync.WaitTimeout, match="version 3"):
            await sub.wait_version(3, timeout=0.05)
        waiting = asyncio.create_task(sub.wait_version(3, timeout=10))
        for _ in range(2):
            await asyncio.sleep(0.02)
            assert not waiting.done()
            await pub.publish(STATE)
        assert (await waiting).version == 3
        assert (await sub.wait_version(2, timeout=0.5)).version == 3
        assert (await sub.wait_version(3, timeout=0.5)).version == 3
        await pub.publish(STATE)
        assert (await sub.wait_version(2, timeout=0.5)).version == 4


async def test_latest_shares_the_lease_of_the_version_held() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        with pytest.raises(busync.WaitTimeout):
            await sub.latest(timeout=0.05)
        await pub.publish(patterns.state(1, 1))
        snapshots = [await sub.latest(timeout=5) for _ in range(10)]
        for snapshot in snapshots:
            patterns.check(snapshot.tensors, 1, 1)
        assert pub.status()["subscribers"][0]["leases"] == [1]
        weight = snapshots[3].tensors["conv"]
        del snapshots, snapshot
        assert pub.status()["subscribers"][0]["leases"] == [1]
        await pub.publish(patterns.state(1, 2))
        assert (await sub.latest(timeout=5)).version == 2
        del weight
        await soon(lambda: pub.status()["subscribers"][0]["leases"] == [])
        assert (await sub.latest(timeout=5)).version == 2  # also when it was let go of


async def test_poll() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        assert sub.poll() is None
        for version in range(1, 6):
            await pub.publish(patterns.state(1, version))
            snapshot = None
            for _ in range(200):  # a granted version has 2 ms to arrive, which a busy machine may not give it
                snapshot = sub.poll()
                if snapshot is not None:
                    break
            assert snapshot is not None
            assert snapshot.version == version
            patterns.check(snapshot.tensors, 1, version)
            assert sub.poll() is None
        await soon(lambda: pub.status()["subscribers"][0]["leases"] == [5])


async def test_poll_hands_out_what_was_asked_for_ahead_when_the_newest_does_not_arrive() -> None:
    """A publisher that never answers in time must not keep an actor that polls on its first version for ever."""
    async with busync.Publisher("p") as pub, busync.Subscriber("p", prefetch=True) as sub:
        await pub.publish(STATE)
        await (await sub.next(timeout=5)).ack()
        await pub.publish(STATE)
        for version in (2, 3, 4):
            await soon(lambda: sub._prefetched is not None)
            await pub.publish(STATE)  # overtakes the one that has arrived
            snapshot = sub.poll(timeout=0.0)
            assert snapshot is not None
            assert snapshot.version == version
            del snapshot
        newest = sub.poll(timeout=5)
        assert newest is not None
        assert newest.version == 5
        assert sub.poll(timeout=5) is None  # at once: there is nothing newer
        with pytest.raises(busync.OptionError):
            sub.poll(timeout=-1)


async def test_poll_with_every_lease_in_use_hands_out_what_was_asked_for_ahead() -> None:
    async with busync.Publisher("p", max_held=2) as pub, busync.Subscriber("p", prefetch=True) as sub:
        await pub.publish(MAPPED)
        kept = (await sub.next(timeout=5)).tensors
        await pub.publish(MAPPED)
        await soon(lambda: sub._prefetched is not None)
        await pub.publish(MAPPED)
        snapshot = sub.poll()
        assert snapshot is not None
        assert snapshot.version == 2
        assert len(kept) == len(snapshot.tensors)
        with pytest.raises(busync.PinnedError):
            sub.poll()


async def test_topics_are_independent() -> None:
    async with (
        busync.Publisher("p", max_segments=2) as pub,
        busync.Subscriber("p", topic="actor") as actor,
        busync.Subscriber("p", topic="critic") as critic,
    ):
        for version in range(1, 4):
            assert (await pub.publish(patterns.state(1, version), topic="actor")).version == version
            assert critic.version == 0
        assert (await pub.publish(patterns.state(2, 1), topic="critic", wait="none")).version == 1
        one, two = await actor.next(timeout=5), await critic.next(timeout=5)
        patterns.check(one.tensors, 1, 3)
        patterns.check(two.tensors, 2, 1)
        assert (one.topic, two.topic) == ("actor", "critic")
        topics = pub.status()["topics"]
        assert {name: topic["version"] for name, topic in topics.items()} == {"actor": 3, "critic": 1}
        report = await pub.publish(STATE, wait="all", timeout=5)  # nobody reads "default"
        assert (report.version, report.pending) == (1, ())


async def test_prefetch() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", prefetch=True) as sub:
        for version in range(1, 6):
            await pub.publish(patterns.state(1, version))
            await soon(lambda version=version: pub.status()["subscribers"][0]["leases"] == [version])  # type: ignore[misc]
            await asyncio.sleep(0.01)
            snapshot = await sub.next(timeout=0.0)  # it is here already
            patterns.check(snapshot.tensors, 1, version)
            del snapshot
        await pub.publish(patterns.state(1, 6))
        await pub.publish(patterns.state(1, 7))
        assert (await sub.next(timeout=5)).version == 7  # not the one that was fetched and overtaken


async def test_wait_version_and_prefetch() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", prefetch=True) as sub:
        await pub.publish(STATE)
        await soon(lambda: pub.status()["subscribers"][0]["leases"] == [1])
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(sub.wait_version(2, timeout=5))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await pub.publish(STATE)
        assert (await waiting).version == 2
        del waiting


async def test_pinned_names_versions_and_tensors() -> None:
    async with busync.Publisher("p", max_held=2) as pub, busync.Subscriber("p") as sub:
        await pub.publish(patterns.state(1, 1))
        weight = (await sub.next(timeout=5)).tensors["body.weight"]
        await pub.publish(patterns.state(1, 2))
        second = await sub.next(timeout=5)
        await pub.publish(patterns.state(1, 3))
        for ask in (sub.next, sub.latest):
            with pytest.raises(busync.PinnedError) as caught:
                await ask(timeout=5)
            assert caught.value.max_held == 2
            assert sorted(caught.value.holders) == ["version 1: 'body.weight'", "version 2: its snapshot"]
        with pytest.raises(busync.PinnedError):
            sub.poll()
        second.release()
        assert (await sub.next(timeout=5)).version == 3
        assert float(weight[0, 0]) == float(patterns.state(1, 1)["body.weight"][0, 0])


async def test_garbage_is_collected_before_pinned_is_raised() -> None:
    async with busync.Publisher("p", max_held=2) as pub, busync.Subscriber("p") as sub:
        for version in range(1, 8):
            await pub.publish(patterns.state(1, version))
            snapshot = await sub.next(timeout=5)
            knot: list[object] = [dict(snapshot.tensors)]
            knot.append(knot)
            del snapshot, knot


async def test_skip_when_full() -> None:
    async with busync.Publisher("p", max_segments=2, when_full="skip") as pub, busync.Subscriber("p") as sub:
        await pub.publish(STATE)
        held = await sub.next(timeout=5)
        assert (await pub.publish(STATE)).version == 2
        assert (await pub.publish(STATE)).version is None
        held.release()
        await soon(lambda: pub.status()["subscribers"][0]["leases"] == [])
        assert (await pub.publish(STATE)).version == 3


async def test_a_publish_waits_for_a_segment_and_then_abandons() -> None:
    async with busync.Publisher("p", max_segments=2, lease_timeout=0.3) as pub, busync.Subscriber("p", name="a") as sub:
        await pub.publish(patterns.state(1, 1))
        held = (await sub.next(timeout=5)).tensors
        await pub.publish(patterns.state(1, 2))
        report = await pub.publish(patterns.state(1, 3))
        assert report.version == 3
        assert 0.25 < report.waited < 2
        assert pub.status()["subscribers"][0]["state"] == "overdue"
        for version in range(4, 10):
            assert (await pub.publish(patterns.state(1, version))).waited < 0.2
            patterns.check(held, 1, 1)
        assert (await sub.next(timeout=5)).version == 9


async def test_two_calls_at_once_get_the_same_version() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        asks = [asyncio.create_task(ask) for ask in (sub.next(5), sub.latest(5), sub.wait_version(1, 5), sub.next(5))]
        await asyncio.sleep(0.05)
        await pub.publish(patterns.state(1, 1))
        for snapshot in await asyncio.gather(*asks):
            patterns.check(snapshot.tensors, 1, 1)
        assert pub.status()["subscribers"][0]["leases"] == [1]
