"""The ledger: every row of its table is taken, and nothing else changes a state."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from busync.ids import LeaseId, SegmentId, SessionId, Version
from busync.protocol.guards import GUARDS
from busync.protocol.ledger import TABLE, Entry, Event, Ledger, Row, State
from tests.support.mutants import Mutant

NEUTRAL = {"tainted"}
LEDGER = "busync/protocol/ledger.py"


def _mutant(old: str, new: str, why: str) -> Mutant:
    return Mutant(LEDGER, old, new, why)


_COMMIT_LOAN = 'State.LOANED, Event.COMMIT, ("unreferenced",)'
_DISCARD_LOAN = 'State.LOANED, Event.DISCARD, ("unreferenced",), State.RECLAIMED'
_DISCARD_WRITING = 'State.WRITING, Event.DISCARD, ("unreferenced",), State.RECLAIMED'
MUTANTS = {
    "test_every_row_is_taken": (
        _mutant(_DISCARD_LOAN, "State.LOANED, Event.DISCARD, (), State.RECLAIMED", "loans come back while referenced"),
        _mutant('IDLE = ("unleased", "untainted", ', 'IDLE = ("unleased", ', "a tainted segment is written again"),
        _mutant("Row(State.PUBLISHED, Event.SUPERSEDE", "Row(State.RETIRED, Event.SUPERSEDE", "versions stay"),
    ),
    "test_what_is_not_in_the_table_changes_nothing": (
        _mutant(" and row.event is event", "", "any event takes the first row of its state"),
        _mutant("row.state is state and ", "", "an event takes an entry out of any state"),
    ),
    "test_a_guard_that_fails_stops_a_transition": (
        _mutant('"untainted", "unpinned", ', '"untainted", ', "what the publisher itself reads is written again"),
        _mutant('"unpinned", "unreferenced")', '"unpinned")', "what a loan's tensor shows is written again"),
        _mutant("if not _guard(name, entry):", "if False:", "guards are not asked"),
    ),
    "test_a_copy_that_still_runs_keeps_its_segment": _mutant(
        _DISCARD_WRITING, "State.WRITING, Event.DISCARD, (), State.RECLAIMED", "a segment comes back while a copy runs"
    ),
    "test_a_loan_that_comes_back_while_referenced_is_never_written_again": (
        _mutant(
            "State.LOANED, Event.DISCARD, (), State.ABANDONED",
            "State.LOANED, Event.DISCARD, (), State.RECLAIMED",
            "a loan that a tensor still refers to is written again",
        ),
        _mutant(
            "                self._drop(entry.segment)\n                self.abandoned += 1",
            "                self.abandoned += 1",
            "an abandoned segment stays in the pool",
        ),
    ),
    "test_every_name_in_the_table_is_a_guard": _mutant(
        'Event.SETTLE, ("tainted",)', 'Event.SETTLE, ("leftover",)', "a row asks for what is no guard"
    ),
    "test_a_referenced_loan_is_not_published_and_leaves_no_trace": (
        _mutant(_COMMIT_LOAN, "State.LOANED, Event.COMMIT, ()", "a loan is published that its caller can still write"),
        _mutant(
            "        if not self.step(entry, Event.COMMIT):\n            return False\n"
            "        entry.version, entry.layout, entry.label = version, layout, label\n",
            "        entry.version, entry.layout, entry.label = version, layout, label\n"
            "        if not self.step(entry, Event.COMMIT):\n            return False\n",
            "a refused loan burns the version",
        ),
    ),
    "test_a_released_version_gives_its_segment_back": (
        _mutant('IDLE = ("unleased", ', "IDLE = (", "a segment is written while a reader has a lease on it"),
        _mutant(
            'Event.SETTLE, ("tainted",), State.ABANDONED',
            "Event.SETTLE, (), State.ABANDONED",
            "every retired version is abandoned at once",
        ),
        _mutant("(), State.RETIRED, ", "(), State.ABANDONED, ", "what was superseded never comes back"),
        _mutant("Event.SETTLE, IDLE, State.RECLAIMED", "Event.SETTLE, IDLE, State.ABANDONED", "no segment comes back"),
        _mutant("            self.step(before, Event.SUPERSEDE)\n", "", "two versions are the newest"),
    ),
    "test_a_broken_lease_takes_the_segment_out_of_the_pool": (
        _mutant(
            "        lease.entry.tainted = True\n        self.end_lease(lease)",
            "        self.end_lease(lease)",
            "a dead reader's word is taken for given",
        ),
        _mutant('("tainted",), State.ABANDONED', '("tainted",), State.RECLAIMED', "a tainted segment is written again"),
        _mutant(
            "            if not entry.leases:\n                self.entries.remove(entry)\n\n    def commit",
            "            self.entries.remove(entry)\n\n    def commit",
            "a held version is charged to nobody",
        ),
    ),
    "test_a_fork_taints_but_still_counts": _mutant(
        "        lease.entry.tainted = True\n        self.step(lease.entry, Event.SETTLE)",
        "        self.step(lease.entry, Event.SETTLE)",
        "what a forked child maps is written again",
    ),
    "test_a_cancelled_fresh_segment_does_not_come_back": _mutant(
        "(entry.version or not entry.fresh)", "True", "a segment that was never made comes into the pool"
    ),
    "test_a_cancelled_warm_segment_comes_back": (
        _mutant("(entry.version or not entry.fresh)", "entry.version", "a cancelled publish costs a segment"),
        _mutant(
            "State.WRITING, Event.COMMIT, (), State.PUBLISHED",
            "State.WRITING, Event.COMMIT, (), State.RETIRED",
            "what was published is never the newest",
        ),
    ),
    "test_a_pin_keeps_a_retired_segment": (
        _mutant("entry.pins += 1", "entry.pins += 0", "a digest is computed of memory that is being written"),
        _mutant(
            "        entry.pins -= 1\n        self.step(entry, Event.SETTLE)",
            "        entry.pins -= 1",
            "the end of a pin frees nothing",
        ),
    ),
    "test_sizes_that_fit_are_reused_and_others_make_room_when_the_pool_is_full": (
        _mutant("nbytes <= size <= 2 * nbytes", "nbytes <= size", "a large segment is spent on a small version"),
        _mutant("nbytes <= size <= 2 * nbytes", "size <= 2 * nbytes", "a version is put where it does not fit"),
        _mutant("            self._drop(unfit)\n", "", "a segment that made room is never freed"),
        _mutant("if self.pooled >= self.max_segments:", "if False:", "the pool has no bound"),
    ),
    "test_a_version_without_bytes_needs_no_segment": _mutant(
        "        if nbytes == 0 and not devices:\n",
        "        if nbytes < 0:\n",
        "a version without bytes takes a segment",
    ),
    "test_memory_on_other_devices_does_not_fit": (
        _mutant(" and _fits(devices, self.devices.get(segment, ()))", "", "a version is put on the wrong device"),
        _mutant("nbytes <= sizes.get(device, 0) <= 2", "sizes.get(device, 0) <= 2", "it is put where it does not fit"),
        _mutant("    if len(devices) != len(found):\n        return False\n", "", "memory of a device lies idle"),
        _mutant("        self.devices.pop(segment, None)\n", "", "the books keep what was dropped"),
    ),
    "test_a_worn_segment_is_replaced_once_nobody_reads_it": _mutant(
        " and entry.segment not in self.worn:", ":", "exports of a segment pile up for ever"
    ),
    "test_the_oldest_retired_version_is_abandoned_first_even_if_its_loan_is_younger": (
        _mutant(
            "Event.TIME_OUT, (), State.ABANDONED",
            "Event.TIME_OUT, (), State.RECLAIMED",
            "what a slow reader reads is written again",
        ),
        _mutant("in sorted(retired, key=lambda e: e.version):", "in retired:", "a younger version is given up first"),
        _mutant("entry.timed_out = True", "entry.timed_out = False", "nobody is overdue"),
    ),
    "test_overdue_holders_are_not_waited_for_again_but_others_are": (
        _mutant("holders and holders <= overdue and", "holders and", "a reader's time is up before it began"),
        _mutant("holders and holders <= overdue and", "False and", "a stuck reader is waited for at every publish"),
    ),
    "test_waiting_helps_only_while_something_is_retired_or_written": (
        _mutant("e.state in (State.RETIRED, State.WRITING)", "e.state in POOLED", "a publish waits for its own loans"),
        _mutant(
            "return any(e.segment and e.state is State.RETIRED for",
            "return any(e.segment for",
            "a timer runs for what no time can bring",
        ),
    ),
}


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
    entry.pins, entry.referenced = 0, True
    assert not ledger.step(entry, Event.SETTLE)
    assert state_of(entry) is State.RETIRED


def test_a_copy_that_still_runs_keeps_its_segment() -> None:
    ledger = new_ledger()
    entry = taken(ledger)
    entry.referenced = True
    assert not ledger.step(entry, Event.DISCARD)
    assert state_of(entry) is State.WRITING


def test_a_loan_that_comes_back_while_referenced_is_never_written_again() -> None:
    ledger = new_ledger()
    published(ledger, 1)
    published(ledger, 2)
    loan = taken(ledger, State.LOANED)
    assert not loan.fresh
    loan.referenced = True
    assert ledger.step(loan, Event.DISCARD)
    assert ledger.dropped == [loan.segment]
    assert loan not in ledger.entries
    assert loan.segment not in ledger.live_segments()
    assert ledger.abandoned == 1


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
    assert taken(ledger, nbytes=65).segment == 3, "it does not fit"
    ledger = new_ledger(2)
    published(ledger, 1, 64)
    published(ledger, 2, 64)
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


def on_devices(ledger: Ledger, nbytes: int, *devices: tuple[str, int]) -> Entry:
    entry = ledger.take(nbytes, State.WRITING, devices)
    assert entry is not None
    ledger.validate()
    return entry


def test_memory_on_other_devices_does_not_fit() -> None:
    ledger = new_ledger(max_segments=1)

    def again(nbytes: int, *devices: tuple[str, int]) -> int:
        """The segment that takes a version's place after it."""
        entry = on_devices(ledger, nbytes, *devices)
        assert not entry.fresh or entry.devices == devices
        assert ledger.commit(entry, Version(entry.segment), b"", "")
        ledger.step(entry, Event.SUPERSEDE)
        ledger.step(entry, Event.SETTLE)
        ledger.validate()
        return entry.segment

    assert [again(64, ("a", 10)), again(64, ("a", 10)), again(33, ("a", 6))] == [1, 1, 1]
    assert again(64, ("a", 4)) == 2, "more than twice as large"
    assert again(64, ("a", 5)) == 3, "too small"
    assert again(64, ("b", 5)) == 4, "on another device"
    assert again(64) == 5, "on no device"
    assert again(64, ("a", 5), ("b", 5)) == 6
    assert again(64, ("b", 5), ("a", 5)) == 6, "the order does not matter"
    assert again(64, ("b", 5)) == 7, "not on both"
    assert again(0, ("b", 5)) == 8, "nothing on the host"
    assert again(0, ("b", 5)) == 8
    assert ledger.dropped == [1, 2, 3, 4, 5, 6, 7]
    assert ledger.devices == {8: (("b", 5),)}


def test_a_worn_segment_is_replaced_once_nobody_reads_it() -> None:
    ledger = new_ledger()
    first = on_devices(ledger, 0, ("a", 10))
    assert ledger.commit(first, Version(1), b"", "")
    lease = ledger.grant(first, LeaseId(1), SessionId(1), 1)
    ledger.worn.add(first.segment)
    second = on_devices(ledger, 0, ("a", 10))
    assert ledger.commit(second, Version(2), b"", "")
    assert (ledger.dropped, first.state) == ([], State.RETIRED)
    ledger.end_lease(lease)
    ledger.validate()
    assert ledger.dropped == [1]
    assert on_devices(ledger, 0, ("a", 10)).segment == 3


def test_memory_that_cannot_be_had_leaves_no_trace() -> None:
    ledger = new_ledger()
    ledger.forget(on_devices(ledger, 0, ("a", 10)))
    assert (ledger.devices, ledger.pooled) == ({}, 0)


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
