"""The ledger: every row of its table is taken, and nothing else changes a state."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from busync.ids import LeaseId, SegmentId, SessionId, Version
from busync.protocol.guards import GUARDS
from busync.protocol.ledger import TABLE, Entry, Event, Ledger, Row, State

NEUTRAL = {"tainted"}


def new_ledger(max_segments: int = 4) -> Ledger:
    numbers = count(1)
    return Ledger(max_segments, lambda: SegmentId(next(numbers)))


def taken(ledger: Ledger, state: State = State.WRITING, nbytes: int = 64) -> Entry:
    entry = ledger.take(nbytes, state)
    assert entry is not None
    return entry


def state_of(entry: Entry) -> State:
    return entry.state


def published(ledger: Ledger, version: int, nbytes: int = 64) -> Entry:
    entry = taken(ledger, nbytes=nbytes)
    assert ledger.commit(entry, Version(version), b"layout", "")
    return entry


def referenced_loan(ledger: Ledger) -> Entry:
    entry = taken(ledger, State.LOANED)
    entry.referenced = True
    return entry


def retired(ledger: Ledger, *, tainted: bool = False) -> Entry:
    """Retired and leased; then the lease ends without any step."""
    entry = published(ledger, 1)
    ledger.grant(entry, LeaseId(1), SessionId(1), 1)
    published(ledger, 2)
    entry.leases.clear()
    entry.tainted = tainted
    return entry


#: How to bring an entry to where each row starts.
STARTS: tuple[Callable[[Ledger], Entry], ...] = (
    lambda ledger: taken(ledger, State.LOANED),
    lambda ledger: taken(ledger, State.LOANED),
    referenced_loan,
    taken,
    taken,
    lambda ledger: published(ledger, 1),
    retired,
    lambda ledger: retired(ledger, tainted=True),
    retired,
)


@pytest.mark.parametrize(("row", "start"), list(zip(TABLE, STARTS, strict=True)))
def test_every_row_is_taken(row: Row, start: Callable[[Ledger], Entry]) -> None:
    ledger = new_ledger()
    entry = start(ledger)
    assert entry.state is row.state
    assert ledger.step(entry, row.event)
    assert entry.state is row.to


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_what_is_not_in_the_table_changes_nothing(state: State, event: Event) -> None:
    if any(row.state is state and row.event is event for row in TABLE):
        return
    ledger = new_ledger()
    entry = taken(ledger)
    entry.state = state
    assert not ledger.step(entry, event)
    assert entry.state is state
    assert ledger.entries == [entry]
    assert not ledger.free
    assert not ledger.dropped


def test_a_guard_that_fails_stops_a_transition() -> None:
    ledger = new_ledger()
    entry = retired(ledger)
    entry.pins = 1
    assert not ledger.step(entry, Event.SETTLE)
    assert state_of(entry) is State.RETIRED


def test_every_name_in_the_table_is_a_guard() -> None:
    assert {name for row in TABLE for name in row.guards} <= set(GUARDS) | NEUTRAL


def test_a_referenced_loan_is_not_published_and_leaves_no_trace() -> None:
    ledger = new_ledger()
    loan = referenced_loan(ledger)
    assert not ledger.commit(loan, Version(1), b"other", "label")
    assert ledger.find(Version(1)) is None
    assert ledger.layouts() == set()
    assert published(ledger, 1) is ledger.find(Version(1)), "the version belongs to whoever published it"


def test_a_released_version_gives_its_segment_back() -> None:
    ledger = new_ledger()
    entry = published(ledger, 1)
    lease = ledger.grant(entry, LeaseId(1), SessionId(1), 1)
    published(ledger, 2)
    assert state_of(entry) is State.RETIRED
    ledger.end_lease(lease)
    assert state_of(entry) is State.RECLAIMED
    again = taken(ledger)
    assert (again.segment, again.fresh) == (entry.segment, False)


def test_a_broken_lease_takes_the_segment_out_of_the_pool() -> None:
    ledger = new_ledger()
    entry = published(ledger, 1)
    broken = ledger.grant(entry, LeaseId(1), SessionId(1), 1)
    kept = ledger.grant(entry, LeaseId(2), SessionId(2), 1)
    ledger.break_lease(broken)
    assert state_of(entry) is State.PUBLISHED, "the newest version is still granted"
    published(ledger, 2)
    assert state_of(entry) is State.ABANDONED
    assert ledger.dropped == [entry.segment]
    assert entry in ledger.entries, "charged to the session that still holds it"
    ledger.end_lease(kept)
    assert entry not in ledger.entries
    assert entry.segment not in ledger.live_segments()


def test_a_fork_taints_but_still_counts() -> None:
    ledger = new_ledger()
    entry = published(ledger, 1)
    lease = ledger.grant(entry, LeaseId(1), SessionId(1), 1)
    ledger.taint(lease)
    published(ledger, 2)
    assert state_of(entry) is State.ABANDONED
    assert entry.leases == {1: lease}
    ledger.end_lease(lease)
    assert entry not in ledger.entries


def test_a_cancelled_fresh_segment_does_not_come_back() -> None:
    ledger = new_ledger()
    entry = taken(ledger)
    assert entry.fresh
    ledger.step(entry, Event.DISCARD)
    assert state_of(entry) is State.RECLAIMED
    assert (ledger.free, ledger.dropped) == ({}, [entry.segment]), "it may never have been made"


def test_a_cancelled_warm_segment_comes_back() -> None:
    ledger = new_ledger()
    first = published(ledger, 1)
    published(ledger, 2)
    entry = taken(ledger)
    assert (entry.segment, entry.fresh) == (first.segment, False)
    ledger.step(entry, Event.DISCARD)
    assert ledger.free == {first.segment: 64}


def test_a_pin_keeps_a_retired_segment() -> None:
    ledger = new_ledger()
    entry = published(ledger, 1)
    ledger.pin(entry)
    published(ledger, 2)
    assert state_of(entry) is State.RETIRED
    ledger.unpin(entry)
    assert state_of(entry) is State.RECLAIMED


def test_sizes_that_fit_are_reused_and_others_make_room_when_the_pool_is_full() -> None:
    ledger = new_ledger(2)
    published(ledger, 1, 64)
    published(ledger, 2, 64)
    assert ledger.free == {1: 64}
    assert taken(ledger, nbytes=32).segment == 1, "half of it may be wasted"
    ledger = new_ledger(2)
    published(ledger, 1, 64)
    published(ledger, 2, 64)
    entry = taken(ledger, nbytes=31)
    assert (entry.segment, entry.fresh) == (3, True), "more than half may not"
    assert ledger.dropped == [1]
    assert ledger.take(64, State.WRITING) is None


def test_a_version_without_bytes_needs_no_segment() -> None:
    ledger = new_ledger(2)
    entries = [published(ledger, i, 0) for i in range(1, 9)]
    assert {e.segment for e in entries} == {0}
    assert ledger.pooled == 0


def test_the_oldest_retired_version_is_abandoned_first_even_if_its_loan_is_younger() -> None:
    ledger = new_ledger(4)
    loan = taken(ledger, State.LOANED)
    oldest = published(ledger, 1)
    ledger.grant(oldest, LeaseId(1), SessionId(1), 1)
    ledger.commit(loan, Version(2), b"layout", "")
    ledger.grant(loan, LeaseId(2), SessionId(2), 1)
    published(ledger, 3)
    assert ledger.relieve(timed_out=True)
    assert (oldest.state, loan.state) == (State.ABANDONED, State.RETIRED)
    assert ledger.overdue() == {1}


def test_overdue_holders_are_not_waited_for_again_but_others_are() -> None:
    ledger = new_ledger(8)
    first = published(ledger, 1)
    ledger.grant(first, LeaseId(1), SessionId(1), 1)
    second = published(ledger, 2)
    ledger.grant(second, LeaseId(2), SessionId(1), 2)
    ledger.grant(second, LeaseId(3), SessionId(2), 1)
    published(ledger, 3)
    assert not ledger.relieve(timed_out=False)
    assert ledger.relieve(timed_out=True)
    assert first.state is State.ABANDONED
    assert not ledger.relieve(timed_out=False), "session 2 also holds the second, and was never waited for"
    ledger.end_lease(second.leases[LeaseId(3)])
    assert ledger.relieve(timed_out=False)
    assert second.state is State.ABANDONED
    assert not ledger.relieve(timed_out=True), "nothing retired is left"


def test_waiting_helps_only_while_something_is_retired_or_written() -> None:
    ledger = new_ledger(2)
    taken(ledger, State.LOANED)
    writing = taken(ledger)
    assert ledger.may_wait()
    assert not ledger.relieve_possible()
    ledger.commit(writing, Version(1), b"", "")
    assert not ledger.may_wait()
