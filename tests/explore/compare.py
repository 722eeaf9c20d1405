"""What one reader sees in a world with two, and in one with any other reader: the second must have all of the first.

A view is the publisher and one session, with its reader: what the session's queues carry, the ledger, and what others
hold there. It is the same whatever sessions, Wants, leases, segments and incarnations are called.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from busync.wire import encode
from tests.explore.bounds import Bound
from tests.explore.messages import Packet, Packets
from tests.explore.names import (
    ranks,
    rename_segments,
    rename_session,
    rename_side,
    segments_at_publisher,
    segments_at_side,
    wants_at_publisher,
    wants_at_side,
)
from tests.explore.publisher import GONE, OtherState, PublisherState, TopicState
from tests.explore.search import tables
from tests.explore.sides import COUNTED, DEAD, OVER, Link, Side
from tests.explore.space import Remnant, Space
from tests.explore.steps import swapped

View = tuple[PublisherState, object]
Left = frozenset[Remnant]


@dataclass
class Views:
    """All that readers of a world see."""

    sessions: set[View] = field(default_factory=set)
    #: sessions that their reader has ended, and what it has left mapped
    ends: defaultdict[View, set[Left]] = field(default_factory=lambda: defaultdict(set))

    def missing_in(self, more: Views) -> int:
        """How many are not in ``more``. There, as much must be left mapped, so that as much is watched."""
        sessions = len(self.sessions - more.sessions)
        ends = sum(
            not any(left <= known for known in more.ends.get(view, ())) for view, lefts in self.ends.items()
            for left in lefts
        )  # fmt: skip
        return sessions + ends

    def add_session(self, packets: Packets, state: PublisherState, side: Side) -> None:
        """A reader in its session, or without one."""
        self.sessions.add(view_of(packets, state, side._replace(old=())))

    def add_end(self, packets: Packets, state: PublisherState, up: tuple[Packet, ...], left: Left) -> None:
        """An ended session. What it has left mapped is what it alone has a lease on, that is not tainted."""
        state = state._replace(sessions=tuple(s._replace(pushed=(), layout=-1) for s in state.sessions))
        own = {(place.segment, place.version) for s in state.sessions for _, place in s.leases}
        own -= {(o.entry.segment, o.entry.version) for o in state.others}
        own -= {(e.segment, e.version) for topic in state.topics if topic for e in topic.entries if e.tainted}
        segment = ranks(segments_at_publisher(state))
        side = Side(link=Link(0, COUNTED, up, ()))
        self.ends[view_of(packets, state, side)].add(frozenset((segment(s), version) for s, version in left & own))


def views(bound: Bound) -> Views:
    """All that readers of a world see: of both where there are two, of reader A where there is any other."""
    space = tables(bound)[0]
    found = Views()
    for publisher, number, remnants, mirrored in parts_of_interest(space):
        side, state = space.sides.table[number], space.publishers[publisher]
        if mirrored:
            state = swapped(state, bound)
        slot = side.link.slot if side.link else -1
        if not side.gone:
            found.add_session(space.packets, alone(state, slot, bound), side)
        for ended, up in side.old:
            found.add_end(space.packets, alone(state, ended, bound), up, space.remnants[remnants])
    return found


def parts_of_interest(space: Space) -> set[tuple[int, int, int, bool]]:
    """Every publisher with a reader, what is left mapped if that has left a session, and whether it is the second."""
    _, seen = tables(space.bound)
    level = [space.start()]
    seen.add(level[0])
    parts = set()
    for state in level:  # it grows
        publisher, a, b, remnants, _ = space.parts(state)
        for number, mirrored in ((a, False), (b, True))[: 1 if space.bound.other else 2]:
            parts.add((publisher, number, remnants if space.sides.table[number].old else 0, mirrored))
        for successor in space.successors(state):
            assert not successor.fault, successor.fault
            if seen.add(successor.state):
                level.append(successor.state)
    return parts


def alone(state: PublisherState, slot: int, bound: Bound) -> PublisherState:
    """One session of reader A, and what all others hold."""
    if bound.other:
        return state
    own = tuple(s._replace(id=0) for s in state.sessions if s.id == slot)
    others = {
        OtherState(s.reader % bound.topics, place) for s in state.sessions if s.id != slot for _, place in s.leases
    }
    digests = tuple(
        d._replace(readers=tuple(sorted({0 if reader == slot else GONE for reader in d.readers})))
        for d in state.digests
    )  # fmt: skip
    return state._replace(sessions=own, others=tuple(sorted(others)), digests=digests)


def view_of(packets: Packets, state: PublisherState, side: Side) -> View:
    """A view, whatever things are called."""
    wants = wants_at_side(side, packets)
    for session in state.sessions:
        wants |= wants_at_publisher(session)
    segments = ranks(segments_at_publisher(state) | segments_at_side(side, packets))
    renamed = rename_segments(rename_session(state, 0, 0, ranks(wants)), segments, 0)
    topics = tuple(None if topic == TopicState(0, (), ()) else topic for topic in state.topics)
    topics = tuple(topic and new for topic, new in zip(topics, renamed.topics, strict=True))
    side = rename_side(side, packets, 0, ranks(wants), segments)
    reader, link = side.reader, side.link
    living = reader.incarnation == state.incarnation or (link is not None and link.counted == DEAD)
    now = 1 if living else OVER
    announce = messages(packets, (reader.announce,)) if reader.announce else None
    reader = reader._replace(
        incarnation=now if reader.incarnation else 0,
        last=(now, reader.last[1]) if reader.last[0] == reader.incarnation != 0 else (0, 0),
        announce=None,
    )
    queues = (link.counted, messages(packets, link.up), messages(packets, link.down)) if link else None
    return renamed._replace(incarnation=1, topics=topics), (reader, announce, queues)


def messages(packets: Packets, queue: tuple[Packet, ...]) -> tuple[tuple[bool, bytes], ...]:
    """A queue, with each message as a first incarnation sends it. Whatever is in a session is of one incarnation."""
    sent = []
    for packet in queue:
        message = packets.message(Packet(abs(packet)))
        if message is not None and hasattr(message, "incarnation"):
            fields = {name: getattr(message, name) for name in message.__struct_fields__}
            message = type(message)(**(fields | {"incarnation": 1}))
        sent.append((packet < 0, encode(message) if message is not None else b""))
    return tuple(sent)
