"""Memory and descriptors: bounded by the pool, whatever readers do."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.limits.conftest import Figures
from tests.limits.kit import MB, Peak, mappings, open_files, private_bytes, segment_bytes
from tests.limits.roles import LAST, Learner, Reader
from tests.support.processes import Actor, Cast
from tests.support.roles import wait_until

MAX_SEGMENTS, MAX_HELD = 4, 2


@pytest.mark.timeout(180)  # it takes 15 s, and a busy machine is no reason to fail
def test_stream_of_versions_in_place(cast: Cast, figures: Figures) -> None:
    """100 versions of 100 MB to 4 subscribers that use them in place."""
    versions, nbytes = 100, 100 * MB
    learner = cast.begin(Learner, "stream", {"max_segments": MAX_SEGMENTS})
    readers = [cast.begin(Reader, "stream", f"reader-{i}", nbytes) for i in range(4)]
    for actor in (learner, *readers):
        actor.finish()
    learner.call("make_model", nbytes)
    pids = [reader.pid for reader in readers]
    private = [[private_bytes(pid) for pid in pids]]
    files: list[list[int]] = []
    stated = 0
    for reader in readers:
        reader.start("adopt_all")
    with Peak(lambda: segment_bytes([learner.pid, *pids])) as peak:
        for version in range(1, versions + 1):
            report = learner.call("publish", wait="all", label=LAST if version == versions else "")
            assert len(report.acked) == 4, report
            private.append([private_bytes(pid) for pid in pids])
            files.append([open_files(pid) for pid in (learner.pid, *pids)])
            stated = max(stated, learner.call("status")["topics"]["default"]["bytes"])
    assert [reader.finish() for reader in readers] == [list(range(1, versions + 1))] * 4
    segment = learner.call("status")["topics"]["default"]["versions"][-1]["bytes"]
    grown = max(now - before for sample in private[1:] for now, before in zip(sample, private[0], strict=True))
    figures("shared memory, peak", peak.value / segment, "segments of 100 MB")
    figures("private memory of a subscriber grew by at most", grown / MB, "MB")
    figures("open files of the publisher, versions 10 to 100", max(row[0] for row in files[10:]), "at most")
    figures("open files of a subscriber, versions 10 to 100", max(max(row[1:]) for row in files[10:]), "at most")
    assert segment <= 1.01 * nbytes
    assert peak.value <= MAX_SEGMENTS * segment
    assert stated <= MAX_SEGMENTS * segment
    assert grown < 2 * MB
    for counts in zip(*files[10:], strict=True):
        assert max(counts) - min(counts) <= MAX_SEGMENTS, f"open files are not flat: {counts}"
        assert max(counts[-10:]) <= max(counts[:10]), f"open files grow: {counts}"


def test_four_readers_sit_on_four_versions(cast: Cast, figures: Figures) -> None:
    """Slow readers in place on different versions fill the pool; nobody hangs, and memory stays bounded."""
    nbytes, lease_timeout, steps = 8 * MB, 0.3, 3
    options = {"max_segments": MAX_SEGMENTS, "max_held": MAX_HELD, "lease_timeout": lease_timeout}
    learner = cast.begin(Learner, "sit", options)
    readers = [cast.begin(Reader, "sit", f"reader-{i}", nbytes) for i in range(4)]
    for actor in (learner, *readers):
        actor.finish()
    learner.call("make_model", nbytes)
    with Peak(lambda: segment_bytes([learner.pid, *(reader.pid for reader in readers)])) as peak:
        for version, reader in enumerate(readers, 1):
            learner.call("publish")
            assert reader.call("adopt") == version
        for reader in readers:
            reader.start("sit", 1.0, steps)
        longest, abandoned = _publish_for(learner, steps * 1.0 + 0.5)
        adopted = [reader.finish() for reader in readers]
    segment = learner.call("status")["topics"]["default"]["versions"][-1]["bytes"]
    bound = MAX_SEGMENTS + 4 * MAX_HELD
    figures("slowest publish", longest, f"s with a lease_timeout of {lease_timeout} s")
    figures("shared memory, peak", peak.value / segment, f"segments, of at most {bound}")
    figures("versions abandoned to their holders at a time, at most", abandoned, "")
    for first, versions in enumerate(adopted, 1):
        assert [first, *versions] == sorted({first, *versions}), f"a reader went back: {versions}"
        assert len(versions) == steps
    assert abandoned > 0, "the pool was never full, so this test has shown nothing"
    assert longest < lease_timeout + 1.5
    assert peak.value <= bound * segment


def _publish_for(learner: Actor, seconds: float) -> tuple[float, int]:
    """Publish on and check the books. The slowest publish, and how many versions were abandoned at a time."""
    longest, most = 0.0, 0
    stop_at = time.monotonic() + seconds
    while time.monotonic() < stop_at:
        began = time.monotonic()
        learner.call("publish")
        longest = max(longest, time.monotonic() - began)
        status = learner.call("status")
        abandoned = _abandoned(status)
        most = max(most, len(abandoned))
        overdue = sum(subscriber["state"] == "overdue" for subscriber in status["subscribers"])
        assert status["topics"]["default"]["segments"] <= MAX_SEGMENTS, status
        assert len(abandoned) <= overdue * MAX_HELD, status
        assert all(version["holders"] for version in abandoned), status
        time.sleep(0.02)
    return longest, most


def _abandoned(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [version for version in status["topics"]["default"]["versions"] if version["state"] == "ABANDONED"]


def test_readers_killed_in_place_cost_a_healthy_one_nothing(cast: Cast, figures: Figures) -> None:
    """Twelve, one after the other, each by SIGKILL while it holds the newest version in place."""
    nbytes, deaths = 8 * MB, 12
    learner = cast.begin(Learner, "deaths", {"max_segments": MAX_SEGMENTS})
    healthy = cast.begin(Reader, "deaths", "healthy", nbytes)
    learner.finish()
    healthy.finish()
    learner.call("make_model", nbytes)
    counts: list[list[int]] = []
    for death in range(deaths):
        victim = cast.begin(Reader, "deaths", f"victim-{death}", nbytes)
        victim.finish()
        version = learner.call("publish").version
        assert [victim.call("adopt"), healthy.call("adopt")] == [version] * 2
        victim.kill()
        # Until then the publisher has a segment more in use, and the healthy reader may have its descriptor.
        wait_until(lambda: len(learner.call("status")["subscribers"]) == 1)
        learner.call("publish")
        assert healthy.call("adopt") == version + 1
        pids = (healthy.pid, learner.pid)
        counts.append([*(mappings(pid, "busync") for pid in pids), *(open_files(pid) for pid in pids)])
    shared = segment_bytes([learner.pid, healthy.pid])
    names = ("mappings of the healthy reader", "mappings of the publisher", "files of the healthy", "of the publisher")
    for name, row in zip(names, zip(*counts, strict=True), strict=True):
        figures(f"{name} after 12 deaths", row[-1], f"(after 3: {row[2]})")
        assert max(row) <= min(row) + MAX_SEGMENTS, f"{name} are not flat: {row}"
        assert min(row[-3:]) <= max(row[:3]), f"{name} grow: {row}"
    assert shared <= MAX_SEGMENTS * 1.01 * nbytes
