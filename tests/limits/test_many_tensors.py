"""Versions of very many tensors."""

from __future__ import annotations

from tests.limits.conftest import Figures
from tests.limits.kit import open_files
from tests.limits.roles import Learner, Publishing, Reader, Unpacking
from tests.support.processes import Cast

HELD = 0.1  #: seconds for which nothing may hold a loop
AIM = 0.02
ATTEMPTS = 3  #: at a figure that other load on the machine can spoil


def test_70000_tensors(cast: Cast, figures: Figures) -> None:
    """They arrive right, in one mapping, and neither publish() nor next() holds a loop for long.

    The tensors in place are 70,000 new objects, so making them sets off full garbage collections, which hold every
    thread; how long is recorded, and is nothing that busync could change.
    """
    count = 70_000
    runs = []
    for attempt in range(ATTEMPTS):
        runs.append(_publish_many(cast, f"many-{attempt}", count))
        published, unpacked = runs[-1]
        if max(published.caller, published.publisher, unpacked.waiting) < AIM:
            break
    caller, publisher = min(p.caller for p, _ in runs), min(p.publisher for p, _ in runs)
    waiting = min(u.waiting for _, u in runs)
    figures("publish", min(p.duration for p, _ in runs), "s")
    figures("the caller's loop was held at most", caller * 1000, "ms")
    figures("the publisher's loop", publisher * 1000, "ms")
    figures("the subscriber's loop, until the version was there", waiting * 1000, "ms")
    figures("the subscriber's loop, while a thread made the tensors", min(u.building for _, u in runs) * 1000, "ms")
    figures("mapped regions more", max(u.regions for _, u in runs), "")
    assert {(u.tensors, u.wrong) for _, u in runs} == {(count, 0)}
    assert max(u.regions for _, u in runs) < 50
    assert max(caller, publisher, waiting) < HELD


def _publish_many(cast: Cast, endpoint: str, count: int) -> tuple[Publishing, Unpacking]:
    """Once, in processes of their own: a session gets a manifest only once."""
    learner = cast.begin(Learner, endpoint)
    learner.finish()
    reader = cast.begin(Reader, endpoint)
    reader.finish()
    for actor in (learner, reader):
        actor.call("thaw")
    reader.start("take_many")
    published: Publishing = learner.call("publish_many", count)
    return published, reader.finish()


def test_2000_tensors_with_256_open_files(cast: Cast, figures: Figures) -> None:
    """20 versions to 3 subscribers. The publisher starts with the same soft limit, and raises it as far as it may."""
    count, versions, limit = 2000, 20, 256
    learner = cast.begin(Learner, "files", {}, limit)
    readers = [cast.begin(Reader, "files", f"reader-{i}", 0, limit) for i in range(3)]
    for actor in (learner, *readers):
        actor.finish()
    learner.call("make_tensors", count)
    files: dict[int, list[int]] = {}
    for version in range(1, versions + 1):
        for reader in readers:
            reader.start("take_few")
        report = learner.call("publish", wait="all")
        assert len(report.acked) == 3, report
        said = [reader.finish() for reader in readers]
        assert [number for number, _ in said] == [version] * 3
        files[version] = [open_now for _, open_now in said]
    peak, publisher = max(max(row) for row in files.values()), open_files(learner.pid)
    figures("open files of a subscriber, peak", peak, f"with a soft limit of {limit}")
    figures("open files of the publisher", publisher, "")
    assert peak < 64
    assert files[5] == files[20], "open files are not flat"
    assert publisher < 64
