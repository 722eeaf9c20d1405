"""SIGKILL at random moments, on both sides, while every adopted element is checked."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest

from tests.support.processes import Actor, Cast
from tests.support.roles import FLAVOURS, wait_until

SECONDS = float(os.environ.get("BUSYNC_TEST_KILL_SECONDS", "4"))


@pytest.mark.timeout(60 + 3 * SECONDS)
def test_readers_are_killed(cast: Cast) -> None:
    """Nobody else notices: not the learner, not a healthy reader, not the memory."""
    rng = random.Random(31)
    learner = cast.publisher("policy", max_segments=4, lease_timeout=0.5)
    healthy = cast.subscriber("policy", "uvloop", name="healthy")
    learner.call("publish_forever", 0.001)
    healthy.start("run_for", SECONDS, 1)
    stop_at, kills = time.monotonic() + SECONDS, 0
    while time.monotonic() < stop_at:
        victims = [cast.begin("SubscriberRole", rng.choice(FLAVOURS), "policy", {"name": "victim"}) for _ in range(2)]
        for victim in victims:
            if rng.random() < 0.8:
                victim.finish()
                victim.start("run_for", 60.0, rng.randrange(1 << 30))
        time.sleep(rng.uniform(0, 0.15))
        for victim in victims:
            victim.kill()
            kills += 1
    counts = healthy.finish(SECONDS + 20)
    assert counts["versions"] > 20
    assert counts["incarnations"] == 1
    assert kills > 5
    learner.call("rest")
    wait_until(lambda: learner.call("subscribers") == ["healthy"])
    healthy.call("drop", newest=True)
    learner.call("publish")
    healthy.call("next")
    assert healthy.call("mappings") <= 2 + 2 * 4  # the board, one in place, and per segment two that are kept
    status = learner.call("status")["topics"]["default"]
    assert status["segments"] <= 4
    assert learner.call("mappings") <= 5  # the board and the pool


@pytest.mark.timeout(60 + 3 * SECONDS)
def test_publishers_are_killed(cast: Cast) -> None:
    """Readers keep what they hold, right to the last element, and adopt what the next publisher has."""
    rng = random.Random(32)
    readers = [cast.begin("SubscriberRole", flavour, "policy", {"connect_timeout": 30.0}) for flavour in FLAVOURS]
    learner = cast.publisher("policy")
    for reader in readers:
        reader.finish()
    for number, reader in enumerate(readers):
        reader.start("run_for", SECONDS, number)
    stop_at, kills = time.monotonic() + SECONDS, 0
    while time.monotonic() < stop_at:
        learner.call("publish_forever", rng.choice([0.0, 0.002, 0.02]))
        time.sleep(rng.uniform(0.1, 0.5))
        learner.kill()
        kills += 1
        learner = cast.publisher("policy")
    for reader in readers:
        counts = reader.finish(SECONDS + 20)
        assert counts["versions"] > 3, counts
        assert counts["incarnations"] > 1, counts
    assert kills > 3
    learner.call("publish")
    for reader in readers:
        assert reader.call("next")[2] == learner.call("incarnation")


def test_killed_in_the_middle_of_a_step(cast: Cast) -> None:
    """A reader that is killed while it attaches, waits or loads leaves a publisher that serves the next."""
    rng = random.Random(33)
    learner = cast.publisher("policy", max_segments=3, lease_timeout=0.5)
    learner.call("publish")
    for _ in range(12):
        victim: Actor = cast.begin("SubscriberRole", "asyncio", "policy", {})
        time.sleep(rng.uniform(0.0, 0.05))
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
        victim.kill()
        learner.call("publish")
    reader = cast.subscriber("policy", name="last")
    assert reader.call("next")[0] == 13
    assert reader.call("keep") > 60_000
    wait_until(lambda: learner.call("subscribers") == ["last"])
