"""The publisher's thread: effects in their order."""

from __future__ import annotations

import time

import pytest

from busync import blocking
from busync.handles import content_digest
from busync.ids import Version
from busync.protocol import effects as fx
from tests.support import patterns


def test_a_digest_is_computed_though_its_segment_is_dropped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publish may abandon the version before the digest's task begins; the bytes are still there."""
    state, digests = patterns.state(1, 1), []
    with blocking.Publisher("p") as pub:
        pub.publish(state)
        server = pub._server
        assert server is not None
        monkeypatch.setattr(server.core, "digest_done", lambda *done: digests.append(done[2]))

        async def race() -> None:
            entry = server.core.topics["default"].ledger.newest()
            assert entry is not None
            server._carry_out_one(fx.ComputeDigest("default", Version(1), entry.segment, entry.layout))
            server._carry_out_one(fx.DropSegment(entry.segment))
            server._carry_out_one(fx.DropLayout(entry.layout))

        server.call(race()).block()
        stop_at = time.monotonic() + 5
        while not digests and time.monotonic() < stop_at:
            time.sleep(0.002)
    assert digests == [content_digest(state)]
