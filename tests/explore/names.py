"""States that differ only in the numbers of sessions, Wants, leases and segments are one state.

All these numbers are only ever compared with one another, or tested for being equal. So after each step those that
are in use are counted from 1 again, in their order; the same holds for what is compared with them but used up. Which
are in use is kept as a bit mask per part of a state: a number of ones and nothing else means that all is well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from busync.wire import DoorUp, Join
from tests.explore.messages import Down, Packet, Packets
from tests.explore.publisher import SLOTS, EntryPlace, PublisherState, SessionState
from tests.explore.reader import MappingState
from tests.explore.sides import COUNTED, Link, Side

Rename = Callable[[int], int]
NO_NUMBERS: Rename = int


def mask_of(numbers: Iterable[int]) -> int:
    """The numbers from 1 as bits from the lowest."""
    mask = 0
    for number in numbers:
        mask |= 1 << number >> 1  # nothing for 0
    return mask


def dense(mask: int) -> bool:
    """Whether the numbers are 1, 2, 3 and so on."""
    return mask & (mask + 1) == 0


def ranks(mask: int) -> Rename:
    """How many of the numbers in use are not greater."""
    return lambda number: (mask & ((1 << number) - 1)).bit_count()


# What is in use


def wants_at_publisher(session: SessionState) -> int:
    """Numbers of Wants and leases."""
    return mask_of([name for name, _ in session.leases] + ([session.want[0]] if session.want else []))


def segments_at_publisher(state: PublisherState) -> int:
    """Numbers of segments."""
    used = {segment for segment, _ in state.pool}
    used.update(segment for session in state.sessions for segment in session.pushed)
    used.update(place.segment for session in state.sessions for _, place in session.leases)
    used.update(other.entry.segment for other in state.others)
    used.update(digest.entry.segment for digest in state.digests)  # perhaps given up meanwhile, and read all the same
    used.update(e.segment for topic in state.topics if topic for e in topic.entries)
    return mask_of(used)


def _messages(packets: Packets, link: Link | None) -> list[DoorUp | Join | Down | None]:
    return [packets.message(Packet(abs(packet))) for packet in (*link.up, *link.down)] if link else []


def wants_at_side(side: Side, packets: Packets) -> int:
    """Numbers of Wants and leases of the present session."""
    reader = side.reader
    used = {lease for lease, _ in reader.leases} | {m.lease for m in reader.mappings}
    used |= {reader.want[0]} if reader.want else set()
    for message in _messages(packets, side.link):
        used.update(getattr(message, name) for name in ("number", "lease") if hasattr(message, name))
        used.update(getattr(message, "leases", ()), getattr(message, "released", ()))
    return mask_of(used)


def segments_at_side(side: Side, packets: Packets) -> int:
    """Numbers of segments."""
    reader = side.reader
    used = {*reader.segments, *(m.segment for m in reader.mappings)}
    held = [packets.message(reader.announce)] if reader.announce else []
    for message in (*_messages(packets, side.link), *held):
        used.update(getattr(message, "segments", ()))
        used.update([getattr(message, "segment", None) or 0])
    return mask_of(used)


# Renaming


def rename_message(packets: Packets, packet: Packet, want: Rename, segment: Rename) -> Packet:
    """A message with other numbers."""
    message = packets.message(Packet(abs(packet)))
    if message is None:
        return packet
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    for name, value in fields.items():
        if name in ("number", "lease"):
            fields[name] = want(value)
        elif name in ("leases", "released"):
            fields[name] = tuple(want(v) for v in value)
        elif name == "segment":
            fields[name] = segment(value)
        elif name == "segments":
            fields[name] = tuple(segment(v) for v in value)
    renamed = packets.again(type(message)(**fields), Packet(abs(packet)))
    return renamed if packet > 0 else Packet(-renamed)


def rename_side(side: Side, packets: Packets, slot: int, want: Rename, segment: Rename) -> Side:
    """A side with other numbers; what is under way from earlier sessions names no segment and need not be dense."""
    reader, link = side.reader, side.link
    if link is not None:
        queues = ([rename_message(packets, p, want, segment) for p in q] for q in (link.up, link.down))
        up, down = (tuple(queue) for queue in queues)
        link = link._replace(slot=slot, up=up, down=down)
    reader = reader._replace(
        number=want(reader.number),
        leases=tuple((want(lease), version) for lease, version in reader.leases),
        spare=tuple(want(lease) for lease in reader.spare),
        segments=tuple(segment(s) for s in reader.segments),
        want=(want(reader.want[0]), reader.want[1]) if reader.want else None,
        announce=rename_message(packets, reader.announce, want, segment) if reader.announce else None,
        mappings=tuple(MappingState(want(m.lease), segment(m.segment), m.version) for m in reader.mappings),
    )
    return side._replace(reader=reader, link=link)


def rename_session(state: PublisherState, old: int, new: int, want: Rename) -> PublisherState:
    """A publisher that calls a session, its Wants and its leases something else."""
    sessions = []
    for s in state.sessions:
        if s.id == old:
            leases = tuple((want(name), place) for name, place in s.leases)
            numbers = (want(s.want[0]), s.want[1]) if s.want else None
            s = s._replace(id=new, leases=leases, want=numbers, last_number=want(s.last_number))
        sessions.append(s)
    digests = tuple(d._replace(readers=tuple(sorted(new if r == old else r for r in d.readers))) for d in state.digests)
    return state._replace(sessions=tuple(sorted(sessions)), digests=digests)


def rename_segments(state: PublisherState, segment: Rename, following: int) -> PublisherState:
    """A publisher that calls its segments something else."""

    def place(where: EntryPlace) -> EntryPlace:
        return where._replace(segment=segment(where.segment))

    topics = tuple(
        topic._replace(
            entries=tuple(e._replace(segment=segment(e.segment)) for e in topic.entries),
            free=tuple(segment(s) for s in topic.free),
        )
        if topic
        else None
        for topic in state.topics
    )
    sessions = tuple(
        s._replace(
            pushed=tuple(segment(n) for n in s.pushed), leases=tuple((name, place(where)) for name, where in s.leases)
        )
        for s in state.sessions
    )
    return state._replace(
        next_segment=following,
        topics=topics,
        sessions=sessions,
        pool=tuple((segment(s), content) for s, content in state.pool),
        jobs=tuple(job._replace(entry=place(job.entry) if job.entry else None) for job in state.jobs),
        digests=tuple(d._replace(entry=place(d.entry)) for d in state.digests),
        others=tuple(o._replace(entry=place(o.entry)) for o in state.others),
    )


class SideNumbers:
    """What is in use on a side."""

    def __init__(self, side: Side, packets: Packets) -> None:
        link = side.link
        self.wants = wants_at_side(side, packets)
        self.segments = segments_at_side(side, packets)
        self.number = side.reader.number
        self.slot = link.slot if link else 0
        self.known = link is not None and link.counted == COUNTED
        self.move_slot = link is not None and link.slot > 0 and not side.old


class PublisherNumbers:
    """What is in use at the publisher."""

    def __init__(self, state: PublisherState) -> None:
        self.segments = segments_at_publisher(state)
        self.next_segment = state.next_segment
        self.wants = {s.id: wants_at_publisher(s) for s in state.sessions}
        self.last = {s.id: s.last_number for s in state.sessions}


class Names:
    """Renames the parts of states, and remembers what it has renamed."""

    def __init__(
        self, packets: Packets, side: Callable[[int], Side], side_number: Callable[[Side], int],
        publisher: Callable[[int], PublisherState], publisher_number: Callable[[PublisherState], int],
    ) -> None:  # fmt: skip
        self.packets = packets
        self._side, self._side_number = side, side_number
        self._publisher, self._publisher_number = publisher, publisher_number
        self._sides: dict[int, SideNumbers] = {}
        self._publishers: dict[int, PublisherNumbers] = {}
        self._renamed_sides: dict[tuple[int, int, int, int], int] = {}
        self._renamed_sessions: dict[tuple[int, int, int, int], int] = {}
        self._renamed_segments: dict[tuple[int, int], int] = {}

    def side(self, number: int) -> SideNumbers:
        """What is in use on a side."""
        found = self._sides.get(number)
        if found is None:
            found = self._sides[number] = SideNumbers(self._side(number), self.packets)
        return found

    def publisher(self, number: int) -> PublisherNumbers:
        """What is in use at a publisher."""
        found = self._publishers.get(number)
        if found is None:
            found = self._publishers[number] = PublisherNumbers(self._publisher(number))
        return found

    def sessions(self, publisher: int, sides: list[int]) -> int:
        """Give the sessions of both readers, their Wants and leases the smallest numbers."""
        for reader in (0, 1):
            side = self.side(sides[reader])
            session = SLOTS * reader + side.slot
            at_publisher = self.publisher(publisher)
            known = side.known
            mask = side.wants | (at_publisher.wants.get(session, 0) if known else 0)
            used = mask.bit_count()
            last = at_publisher.last.get(session, 0) if known else 0
            # The number said last is what the next one is counted from, so it must not be below any in use.
            if dense(mask) and side.number == used and last <= used and not side.move_slot:
                continue
            slot = 0 if side.move_slot else side.slot
            sides[reader] = self._rename_side(sides[reader], slot, mask, -1)
            if known:
                publisher = self._rename_session(publisher, session, SLOTS * reader + slot, mask)
        return publisher

    def segments(self, publisher: int, sides: list[int], remnants: int) -> tuple[int, int]:
        """Give the segments the smallest numbers; ``remnants`` is their mask. Says which were in use, or -1 for all."""
        facts = self.publisher(publisher)
        mask = facts.segments | self.side(sides[0]).segments | self.side(sides[1]).segments | remnants
        if dense(mask) and facts.next_segment == mask.bit_count() + 1:
            return publisher, -1
        for reader in (0, 1):
            if self.side(sides[reader]).segments:
                sides[reader] = self._rename_side(sides[reader], self.side(sides[reader]).slot, -1, mask)
        key = (publisher, mask)
        renamed = self._renamed_segments.get(key)
        if renamed is None:
            state = rename_segments(self._publisher(publisher), ranks(mask), mask.bit_count() + 1)
            renamed = self._renamed_segments[key] = self._publisher_number(state)
        return renamed, mask

    def _rename_side(self, number: int, slot: int, wants: int, segments: int) -> int:
        key = (number, slot, wants, segments)
        renamed = self._renamed_sides.get(key)
        if renamed is None:
            want = ranks(wants) if wants >= 0 else NO_NUMBERS
            segment = ranks(segments) if segments >= 0 else NO_NUMBERS
            side = rename_side(self._side(number), self.packets, slot, want, segment)
            renamed = self._renamed_sides[key] = self._side_number(side)
        return renamed

    def _rename_session(self, publisher: int, old: int, new: int, wants: int) -> int:
        key = (publisher, old, new, wants)
        renamed = self._renamed_sessions.get(key)
        if renamed is None:
            state = rename_session(self._publisher(publisher), old, new, ranks(wants))
            renamed = self._renamed_sessions[key] = self._publisher_number(state)
        return renamed
