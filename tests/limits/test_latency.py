"""How soon: newcomers while the learner is blocked, and a large publish next to a plain copy."""

from __future__ import annotations

import os
import time
from statistics import median

import pytest

from tests.limits.conftest import Figures
from tests.limits.kit import MB
from tests.limits.roles import LAST, Learner, Reader, Round, Span
from tests.support.processes import Cast

BLOCKED = 5.0 if os.environ.get("BUSYNC_LONG") else 1.5  #: seconds; BUSYNC_LONG=1 asks for the full length
ATTEMPTS = 3  #: at a figure that other load on the machine can spoil


@pytest.mark.parametrize("how", ["sleep", "matmul"])
def test_newcomers_while_the_learner_is_blocked(cast: Cast, figures: Figures, how: str) -> None:
    """New subscribers are admitted and adopt the current version while the learner's own loop stands still."""
    nbytes = 10 * MB
    learner = cast.begin(Learner, "blocked")
    newcomers = [cast.begin(Reader, "blocked", "new", nbytes, 0, False) for _ in range(4)]
    for actor in (learner, *newcomers):
        actor.finish()
    learner.call("make_model", nbytes)
    learner.call("publish")
    worst = float("inf")
    for _ in range(ATTEMPTS):
        if how == "matmul":
            learner.call("prepare_matmul", BLOCKED)
        learner.start("block", how, BLOCKED)
        time.sleep(0.1)  # until it is
        spans: list[Span] = [newcomer.call("come_anew") for newcomer in newcomers]
        blocked: Span = learner.finish(10 * BLOCKED)
        if all(span.within(blocked) for span in spans):
            worst = min(worst, max(span.length for span in spans))
        if worst < 0.2:
            break
    figures(f"slowest of 4 new subscribers, learner blocked for {blocked.length:.1f} s", worst, "s")
    assert worst < 0.2


def test_publish_to_all_acked_next_to_a_copy(cast: Cast, figures: Figures) -> None:
    """100 MB to 4 in-place subscribers within 2 x of one warm copy of the bytes; medians of alternating rounds."""
    nbytes, subscribers, rounds = 100 * MB, 4, 25
    learner = cast.begin(Learner, "race")
    readers = [cast.begin(Reader, "race", f"reader-{i}", nbytes) for i in range(subscribers)]
    for actor in (learner, *readers):
        actor.finish()
    learner.call("make_model", nbytes)
    for reader in readers:
        reader.start("adopt_all", look=False)
    learner.call("race", 5)  # segments and caches become warm
    best = (float("inf"), 0.0, 0.0)
    for _ in range(ATTEMPTS):
        result: list[Round] = learner.call("race", rounds)
        assert [r.acked for r in result] == [subscribers] * rounds
        publish, copy = median(r.publish for r in result), median(r.copy for r in result)
        best = min(best, (publish / copy, publish, copy))
        if best[0] < 2:
            break
    learner.call("publish", label=LAST)
    for reader in readers:
        reader.finish()
    figures("publish to all-acked", best[1] * 1000, "ms")
    figures("one warm copy", best[2] * 1000, "ms")
    figures("publish to all-acked / copy", best[0], "")
    assert best[0] < 2
