"""The small worlds explored to their end, what guards are for, and whether the explorer itself can be believed.

``make explore`` runs the large worlds; see docs/RELIABILITY.md.
"""

from __future__ import annotations

import dataclasses
from math import inf

import pytest

from busync.ids import Incarnation
from busync.options import PublisherOptions
from busync.protocol.guards import GUARDS
from busync.protocol.ledger import Entry, Lease, Ledger
from busync.protocol.publisher import PublisherProtocol
from busync.protocol.subscriber import SubscriberProtocol
from busync.protocol.topics import Reservation, Session, Topic
from busync.wire import Want
from tests.explore.__main__ import main
from tests.explore.bounds import GUARD_WORLDS, NOT_REACHED, SMALL, Bound, world
from tests.explore.names import mask_of, ranks, rename_segments
from tests.explore.reader import ReaderProcess
from tests.explore.search import explore, tables, without
from tests.explore.space import Space
from tests.explore.steps import PublisherProcess, swapped

#: A little of everything.
MIXED = world("mixed", publishes=2, max_segments=2, faults=1, cancels=1, withdrawals=1, digests=True)
MIXED_OTHER = dataclasses.replace(MIXED, faults=6, other=True)
#: Fields of the cores that make no difference to what they do next, or say the same as others that a state keeps.
#: Memory on GPUs has no part in these worlds: who may read it is decided for a segment, wherever that lies.
LEFT_OUT = {
    PublisherProtocol: {"options", "counters", "_effects", "_ids", "_waits", "_leases", "_greeting"},
    SubscriberProtocol: {
        "topic", "name", "digests", "_effects", "max_held", "_part", "_groups", "_tensors", "_names", "_ends",
        "devices",
    },
    Session: {"pid", "uid", "token", "name", "skipped", "failed", "reason", "ended"},
    Topic: {"name", "slot", "content", "sessions", "digested"},
    Entry: {"nbytes", "label", "layout", "devices"},
    Reservation: {"id", "nbytes", "state", "asked_at", "blocked_by", "devices"},
    Ledger: {"max_segments", "dropped", "abandoned", "_next_segment", "devices", "worn"},
    Lease: set(),
    Want: {"digest", "ack", "released"},
}  # fmt: skip
KEPT = {
    PublisherProtocol: {
        "incarnation", "topics", "sessions", "_reservations", "_segments", "_digesting", "_layouts",
    },
    SubscriberProtocol: {
        "incarnation", "adopted", "_number", "greeted", "attached", "leases", "segments", "_want", "_announce",
        "_manifest", "_granted", "_acked", "spare",
    },
    Session: {
        "id", "topic", "attached", "want", "last_number", "pushed", "layout", "arrival", "leases", "granted",
        "acked",
    },
    Topic: {"ledger", "version", "queue", "digest_readers"},
    Entry: {
        "segment", "state", "fresh", "version", "leases", "tainted", "pins", "referenced", "timed_out", "digest",
    },
    Reservation: {"topic", "deadline_at", "entry"},
    Ledger: {"entries", "free"},
    Lease: {"id", "session", "entry", "number"},
    Want: {"number", "have"},
}  # fmt: skip


@pytest.mark.parametrize("bound", SMALL, ids=lambda bound: bound.name)
def test_small_worlds_have_no_fault(bound: Bound) -> None:
    result = explore(bound)
    assert result.complete, "\n".join(result.story)
    assert result.states > 500


@pytest.mark.parametrize("guard", GUARD_WORLDS)
def test_without_a_guard_a_shortest_fault_is_found(guard: str) -> None:
    with without(guard):
        result = explore(GUARD_WORLDS[guard])
        reduced = explore(dataclasses.replace(GUARD_WORLDS[guard], reduced=True))
    assert result.story[-1].startswith("FAULT")
    assert reduced.fault, "what is left out would have shown it"


def test_every_guard_is_either_reached_or_said_not_to_be() -> None:
    assert {*GUARD_WORLDS, *NOT_REACHED} == set(GUARDS)
    assert not set(GUARD_WORLDS) & set(NOT_REACHED)


def test_the_program_tells_the_story(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--without", "unleased"]) == 0
    said = capsys.readouterr().out
    assert "FAULT: segment 1 was written while reader A reads version 1 there" in said
    assert "reader A gets Announce(number=1, lease=1, version=1, segment=1)" in said


def test_nothing_is_left_out_of_a_state_unknowingly() -> None:
    publisher = PublisherProtocol(PublisherOptions(), Incarnation(1))
    for core in (publisher, SubscriberProtocol("topic", "name"), publisher.topic("topic").ledger):
        assert set(vars(core)) == KEPT[type(core)] | LEFT_OUT[type(core)], "decide for each new field"
    for record in (Session, Topic, Entry, Reservation, Lease):
        assert {f.name for f in dataclasses.fields(record)} == KEPT[record] | LEFT_OUT[record]
    assert set(Want.__struct_fields__) == KEPT[Want] | LEFT_OUT[Want]


@pytest.mark.parametrize("bound", [MIXED, MIXED_OTHER], ids=["two readers", "any other reader"])
def test_thawing_and_freezing_change_nothing(bound: Bound) -> None:
    space = explored(bound, 3000)
    for state in space.publishers:
        assert PublisherProcess(bound, space.packets, state).step().state == state
    for side in space.sides.table:
        process = ReaderProcess(bound, space.packets, side.reader)
        process.pump()
        assert process.freeze() == side.reader


def test_a_digest_is_computed_once_whoever_has_gone_meanwhile() -> None:
    space = explored(Bound(name="digests", publishes=1, digests=True, lost_sessions=1))
    pins = {e.pins for state in space.publishers for topic in state.topics if topic for e in topic.entries}
    assert pins == {0, 1}


def test_exchanging_the_readers_twice_changes_nothing() -> None:
    two = dataclasses.replace(MIXED, topics=2)
    for state in explored(two, 1000).publishers:
        assert swapped(swapped(state, two), two) == state


@pytest.mark.parametrize(
    "limits", [{"publishes": 2}, {"publishes": 1, "forks": 1, "repeats": 1, "swaps": 1}], ids=["calm", "faults"]
)
def test_what_is_left_out_makes_no_difference_to_the_ledger(limits: dict[str, int]) -> None:
    whole = explored(Bound(name="whole", reduced=False, **limits))  # type: ignore[arg-type]
    less = explored(Bound(name="less", **limits))  # type: ignore[arg-type]
    assert len(less.sides.table) < len(whole.sides.table)
    assert ledgers(less) == ledgers(whole)


def ledgers(space: Space) -> set[object]:
    """All that a ledger can look like: segments counted from 1, sessions without their names."""
    looks: set[object] = set()
    for state in space.publishers:
        segments = {segment for segment, _ in state.pool}
        segments.update(e.segment for topic in state.topics if topic for e in topic.entries)
        renamed = rename_segments(state, ranks(mask_of(segments)), 0)
        leases = tuple(sorted(tuple(sorted(place for _, place in s.leases)) for s in renamed.sessions if s.leases))
        looks.add((renamed.topics, renamed.pool, renamed.jobs, leases))
    return looks


def test_a_grant_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    granting = PublisherProtocol._try_grant

    def forgetful(core: PublisherProtocol, session: Session) -> None:
        if not session.pushed:  # only the first version is ever granted
            granting(core, session)

    monkeypatch.setattr(PublisherProtocol, "_try_grant", forgetful)
    assert "in vain" in explore(Bound(name="forgetful")).fault


def test_a_lease_that_is_not_broken_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "break_lease", Ledger.end_lease)
    fault = explore(Bound(name="careless", max_segments=2, reader_crashes=1)).fault
    assert fault == "segment 1 was written while something that has no lease reads version 1 there"


def explored(bound: Bound, states: float = inf) -> Space:
    """A space with all tables that that many states need, or all of them."""
    space = tables(bound)[0]
    seen, level = {space.start()}, [space.start()]
    while level and len(seen) < states:
        found = {successor.state for state in level for successor in space.successors(state)} - seen
        seen |= found
        level = sorted(found)
    return space
