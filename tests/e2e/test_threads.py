"""One publisher, many threads and loops."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import busync
from busync import blocking
from tests.support import patterns

pytestmark = pytest.mark.devices

SMALL = patterns.SMALL


@pytest.mark.asyncio
async def test_concurrent_publishes_give_distinct_versions() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        reports = await asyncio.gather(*(pub.publish(patterns.state(i, 1)) for i in range(5)))
        assert sorted(r.version or 0 for r in reports) == [1, 2, 3, 4, 5]
        winner = next(i for i, report in enumerate(reports) if report.version == 5)
        snapshot = await sub.next(timeout=5)
        assert snapshot.version == 5
        patterns.check(snapshot.tensors, winner, 1)


@pytest.mark.asyncio
async def test_from_other_loops_and_threads() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:

        async def publish(seed: int) -> int:
            report = await pub.publish(patterns.state(seed, 1, SMALL), label=str(seed))
            pub.status()
            return report.version or 0

        def run(seed: int) -> list[int]:
            async def several() -> list[int]:
                return [await publish(seed) for _ in range(10)]

            return asyncio.run(several())

        with ThreadPoolExecutor(4) as pool:
            loop = asyncio.get_running_loop()
            results = await asyncio.gather(*(loop.run_in_executor(pool, run, seed) for seed in range(4)))
        assert sorted(v for versions in results for v in versions) == list(range(1, 41))
        assert all(versions == sorted(versions) for versions in results)
        snapshot = await sub.next(timeout=5)
        assert snapshot.version == 40
        patterns.check(snapshot.tensors, int(snapshot.label), 1, SMALL)


def test_plain_threads_publish_while_readers_come_and_go() -> None:
    stop = threading.Event()
    errors: list[BaseException] = []
    versions: list[int] = []

    with blocking.Publisher("p", max_segments=3) as pub:

        def learn(seed: int) -> None:
            try:
                while not stop.is_set():
                    report = pub.publish(patterns.state(seed, 7, SMALL), label=str(seed))
                    versions.append(report.version or 0)
            except BaseException as error:
                errors.append(error)

        def act() -> None:
            try:
                while not stop.is_set():
                    with blocking.Subscriber("p") as sub:
                        last = 0
                        for _ in range(10):
                            try:
                                snapshot = sub.next(timeout=0.5)
                            except busync.WaitTimeout:
                                assert stop.is_set()
                                return
                            assert snapshot.version > last
                            last = snapshot.version
                            patterns.check(snapshot.tensors, int(snapshot.label), 7, SMALL)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=learn, args=(seed,)) for seed in (1, 2)]
        threads += [threading.Thread(target=act) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        stop.set()
        for thread in threads:
            thread.join(15)
        assert not any(thread.is_alive() for thread in threads)
        if errors:
            raise errors[0]
        assert sorted(versions) == list(range(1, len(versions) + 1))


def test_closing_while_threads_publish() -> None:
    """Every call ends, with a report or ClosedError, whenever the close comes."""
    for round_ in range(30):
        pub = blocking.Publisher("p").__enter__()
        ended: list[str] = []

        def learn(pub: blocking.Publisher = pub, ended: list[str] = ended) -> None:
            try:
                while True:
                    pub.publish(patterns.state(1, 1, SMALL))
                    pub.status()
            except busync.ClosedError:
                ended.append("closed")

        threads = [threading.Thread(target=learn, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.0007 * round_)
        pub.close()
        for thread in threads:
            thread.join(10)
        assert ended == ["closed"] * 3, f"round {round_}: a call never ended"


@pytest.mark.asyncio
async def test_a_subscriber_stays_on_its_loop() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(patterns.state(1, 1, SMALL))

        def elsewhere() -> None:
            with pytest.raises(busync.UsageError, match="another event loop"):
                asyncio.run(sub.next(timeout=1))

        await asyncio.to_thread(elsewhere)
        assert (await sub.next(timeout=5)).version == 1
