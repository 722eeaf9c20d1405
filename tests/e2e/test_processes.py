"""A publisher and subscribers in processes of their own, every element checked."""

from __future__ import annotations

import pytest

from tests.support.processes import Cast
from tests.support.roles import FLAVOURS, wait_until

pytestmark = pytest.mark.devices


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_versions_in_place_and_loaded(cast: Cast, flavour: str, device: str) -> None:
    learner = cast.publisher("policy")
    actor = cast.subscriber("policy", flavour, name="actor")
    assert learner.call("subscribers") == ["actor"]
    seed = learner.call("incarnation") % 1_000_000
    for version in range(1, 13):
        actor.start("next")
        learner.call("publish")
        assert actor.finish()[:2] == (version, str(seed))
        assert actor.call("keep" if version % 2 else "load") > 60_000
        if version % 3 == 0:
            actor.call("scribble" if version % 2 and device == "cpu" else "check")  # edits on a GPU are seen by all
        actor.call("drop", newest=version % 3 == 0)
    assert actor.call("state") == {"version": 12, "adopted": 12, "lag": 0}


def test_asked_for_before_and_after_the_publish(cast: Cast) -> None:
    learner = cast.publisher("policy")
    early = cast.subscriber("policy", "uvloop", name="early")
    early.start("next")
    learner.call("publish")
    late = cast.subscriber("policy", "blocking", name="late")
    assert early.finish()[0] == late.call("next")[0] == 1
    learner.start("publish", wait="all")
    for actor in (early, late):
        assert actor.call("next")[0] == 2
        actor.call("ack")
    assert sorted(learner.finish()["acked"]) == ["early", "late"]


def test_nothing_grows_over_many_versions(cast: Cast) -> None:
    learner = cast.publisher("policy", max_segments=2)  # with more, a late release makes the pool grow at any time
    actor = cast.subscriber("policy", "asyncio", name="actor")
    figures = []
    for version in range(1, 41):
        actor.start("next")
        learner.call("publish")
        actor.finish()
        actor.call("keep")
        actor.call("drop")
        if version in (10, 40):
            figures.append([process.call(what) for process in (actor, learner) for what in ("fds", "mappings", "gpu")])
    assert figures[0] == figures[1]
    assert learner.call("status")["topics"]["default"]["segments"] == 2


def test_a_reader_that_goes_and_comes_back(cast: Cast) -> None:
    learner = cast.publisher("policy")
    for turn in range(3):
        actor = cast.subscriber("policy", "blocking", name=f"actor-{turn}")
        learner.call("publish")
        actor.call("next")
        actor.call("keep")
        actor.stop()
        wait_until(lambda: learner.call("subscribers") == [])
