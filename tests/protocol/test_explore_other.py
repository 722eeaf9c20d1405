"""Worlds with any other reader: no run of the worlds with two readers is lost, and a fault that is there is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from busync.protocol.ledger import Ledger
from busync.protocol.publisher import PublisherProtocol
from busync.protocol.topics import Session
from tests.explore import views as views_module
from tests.explore.bounds import GUARD_WORLDS, Bound, with_other, world
from tests.explore.compare import views
from tests.explore.other import Act, acts
from tests.explore.publisher import PublisherState
from tests.explore.search import explore, without
from tests.explore.views import OtherSpace

CALM: dict[str, Any] = {"publishes": 2, "max_segments": 2}
ANY_FAULT: dict[str, Any] = dataclasses.asdict(world("", publishes=1, faults=1))


@pytest.mark.parametrize(
    ("limits", "more"),
    [
        (CALM, {}),
        (CALM | {"reduced": False}, {"reduced": True}),
        ({"publishes": 3, "max_segments": 2}, {}),
        (CALM | {"topics": 2}, {}),
        ({"publishes": 1, "acks": True}, {}),
        (CALM | {"copies": True}, {}),
        ({"publishes": 1, "withdrawals": 1, "cancels": 1, "digests": True}, {}),
        (ANY_FAULT, {}),
    ],
    ids=[
        "calm",
        "nothing left out",
        "waits",
        "topics",
        "acks",
        "copies",
        "withdrawals, cancels, digests",
        "any one fault",
    ],
)
def test_no_view_of_two_readers_is_lost(limits: dict[str, Any], more: dict[str, Any]) -> None:
    assert missing(limits, more) == 0


# To let go of a version is the same as never to have had it; to fork the same as to be lost and to come again.
@pytest.mark.parametrize(("left_out", "forks"), [({"other_leases"}, 0), ({"other_is_lost", "other_forks"}, 1)])
def test_a_view_that_is_lost_is_noticed(monkeypatch: pytest.MonkeyPatch, left_out: set[str], forks: int) -> None:
    def fewer(state: PublisherState, *, digests: bool) -> Iterator[Act]:
        return (act for act in acts(state, digests=digests) if act.method not in left_out)

    limits = {"publishes": 1, "forks": forks}
    assert missing(limits, {}) == 0
    monkeypatch.setattr(views_module, "acts", fewer)
    assert missing(limits, {}) > 0


def test_forgetting_what_a_process_has_left_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtherSpace, "_absorb", lambda space, publisher: space._restarted)
    assert missing(ANY_FAULT, {}) > 0


@pytest.mark.parametrize("guard", GUARD_WORLDS)
def test_without_a_guard_there_is_a_fault(guard: str) -> None:
    with without(guard):
        assert explore(dataclasses.replace(GUARD_WORLDS[guard], reduced=True, other=True)).fault


def test_a_grant_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    granting = PublisherProtocol._try_grant

    def forgetful(core: PublisherProtocol, session: Session) -> None:
        if not session.pushed:  # only the first version is ever granted
            granting(core, session)

    monkeypatch.setattr(PublisherProtocol, "_try_grant", forgetful)
    assert "in vain" in explore(Bound(name="forgetful", other=True)).fault


def test_a_lease_that_is_not_broken_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "break_lease", Ledger.end_lease)
    careless = Bound(name="careless", max_segments=2, reader_crashes=1, other=True)
    assert "has left mapped, what it has no lease on" in explore(careless).fault


def test_a_fork_that_is_not_heard_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "taint", lambda ledger, lease: None)
    deaf = Bound(name="deaf", max_segments=2, forks=1, other=True)
    assert "has left mapped, what it has no lease on" in explore(deaf).fault


def missing(limits: dict[str, Any], more: dict[str, Any]) -> int:
    """How many views of two readers a world with any other reader lacks, where more may go wrong there."""
    two = Bound(**(limits | {"name": "two"}))
    return views(two).missing_in(views(dataclasses.replace(with_other(two), **more)))
