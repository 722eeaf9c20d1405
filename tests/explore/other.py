"""Any other reader: the most general honest reader, as the publisher's core and reader A can tell.

What the publisher's core decides about one session depends on the others through their leases alone: whether a version
has one, and whether one has ended without its reader's word. So all other sessions, however many there are, and
whatever is lost, repeated or late on their way, are one lease for each version that somebody else holds, in a real
session of the real core. Such a lease is

* granted while its version is the newest (``lease``): whoever wants it and gets it later might have wanted it later;
* ended by its reader's word, a Release or a Withdraw (``release``);
* ended without it, as its reader or its session is gone (``lose``);
* worth nothing any more, although it is still there, as its reader has forked (``abandon``).

Each may come at any moment and any number of times, so what goes wrong with others needs no budget. What others hear
makes no difference, and neither does a session without a lease, nor a second lease on the same version: two sessions
that hold it are one here that ends with the later of them, and that a fork has made worthless if one was lost before.

What goes by session are ``max_held``, of which another session has enough again, and who is overdue; see
``Bound.other``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from busync.protocol.ledger import State
from busync.protocol.publisher import PublisherProtocol
from busync.protocol.topics import Session
from busync.wire import WIRE_VERSION, Abandon, Hello, Release, Want
from tests.explore.publisher import FIRST_OTHER, NEW, NOW, PublisherState, TopicState, topic_name


class Act(NamedTuple):
    """What somebody else may do."""

    text: str
    method: str  #: of ``PublisherProcess``
    argument: int
    left: tuple[tuple[int, int], ...] = ()  #: segment and version that may stay mapped without anybody's word


def acts(state: PublisherState, *, digests: bool) -> Iterator[Act]:
    """Everything that somebody else may do next."""
    for i, topic in enumerate(state.topics):
        newest = newest_place(topic) if topic else None
        if topic is None or newest is None:
            continue
        if all((o.topic, o.entry.place) != (i, newest) for o in state.others):
            yield Act(f"another reader gets version {topic.version}", "other_leases", i)
        asked = any((d.topic, d.version) == (i, topic.version) for d in state.digests)
        if digests and not asked and not topic.entries[newest].digested:
            yield Act(f"another reader asks for the digest of version {topic.version}", "other_asks", i)
    for i, other in enumerate(state.others):
        where = other.entry
        left = ((where.segment, where.version),)
        yield Act(f"another reader lets go of version {where.version}", "other_releases", i)
        yield Act(f"another reader is lost with version {where.version}", "other_is_lost", i, left)
        yield Act(f"another reader forks with version {where.version}", "other_forks", i, left)


def newest_place(topic: TopicState) -> int | None:
    """Where the newest version is in the books."""
    return next((i for i, e in enumerate(topic.entries) if e.state is State.PUBLISHED), None)


# In the core


def lease(core: PublisherProtocol, topic: int, *, digest: bool = False) -> None:
    """Somebody connects, is attached, wants the newest version and gets it."""
    core._ids = count(NEW)
    session = core.connected(1, 1, b"t" * 16, NOW)
    core.receive(session, Hello(wire=WIRE_VERSION, topic=topic_name(topic), name="other"), NOW)
    core.joined(session, NOW)
    core.receive(session, Want(number=1, have=0, digest=digest), NOW)


def release(core: PublisherProtocol, session: Session) -> None:
    """Its reader has let go of all that it held."""
    for held in list(session.leases):
        core.receive(session.id, Release(lease=held), NOW)


def abandon(core: PublisherProtocol, session: Session) -> None:
    """Its reader has forked."""
    core.receive(session.id, Abandon(leases=tuple(session.leases)), NOW)


def lose(core: PublisherProtocol, session: Session) -> None:
    """It is lost, and perhaps its reader with it."""
    core.lost(session.id, NOW)


def settle(core: PublisherProtocol) -> None:
    """End what makes no difference: a second lease on a version, and sessions without a lease."""
    seen: set[int] = set()
    for session in [s for s in core.sessions.values() if s.id >= FIRST_OTHER]:
        entries = {id(held.entry) for held in session.leases.values()}
        if entries & seen:
            release(core, session)
        if not session.leases:
            core.lost(session.id, NOW)
        seen |= entries
