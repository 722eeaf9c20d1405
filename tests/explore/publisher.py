"""The publisher's process in a state: the real core, thawed for one step and frozen again.

Sessions are called ``4 * reader + slot``, leases by the Want that they answer, publishes by their place in the list:
the counters of the core, which only have to give something new, are not part of a state. Time is whether a publish
that waits has waited for ``lease_timeout``.
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

from busync.ids import Incarnation, LeaseId, SegmentId, SessionId, Version
from busync.options import PublisherOptions
from busync.protocol.ledger import Entry, Lease, Ledger, State
from busync.protocol.publisher import PublisherProtocol
from busync.protocol.topics import Arrival, Content, Reservation, Session, Topic
from busync.wire import Want
from tests.explore.bounds import Bound
from tests.explore.reader import LAYOUTS, NBYTES, layout_of
from tests.protocol.world import digest_of

NOW, TIMED_OUT, LATER, NEVER = 0.0, -1.0, 1.0, 1e9
GARBAGE = 0  #: the content of a segment that is being written
SLOTS = 4  #: sessions of one reader that the publisher may know at a time
NAMES = 32  #: leases of one session
NEW = 1 << 20  #: identifiers that were given in this step
FIRST_OTHER = SLOTS  #: where there is any other reader, its sessions are those from here on
GONE = -1  #: in the place of a session whose name makes no difference any more
LAYOUT_NUMBER = {b"": -1} | {manifest.digest: i for i, manifest in enumerate(LAYOUTS)}
LAYOUT_DIGEST = {number: digest for digest, number in LAYOUT_NUMBER.items()}


class EntryState(NamedTuple):
    """A ledger's entry, without its leases: those are with the sessions."""

    segment: int
    state: State
    fresh: bool
    version: int
    tainted: bool
    pins: int
    referenced: bool
    timed_out: bool
    digested: bool


class TopicState(NamedTuple):
    """One topic."""

    version: int
    entries: tuple[EntryState, ...]
    free: tuple[int, ...]


class EntryPlace(NamedTuple):
    """An entry that something refers to. Without a guard, it may have left the books."""

    place: int  #: in the ledger; -1 when it is not there
    segment: int
    version: int


class SessionState(NamedTuple):
    """One session."""

    id: int
    greeted: bool
    attached: bool
    want: tuple[int, int] | None
    last_number: int
    pushed: tuple[int, ...]
    layout: int
    arrival: Arrival
    leases: tuple[tuple[int, EntryPlace], ...]  #: its name and what it is on
    granted: int
    acked: int

    @property
    def reader(self) -> int:
        """Whose it is."""
        return self.id // SLOTS


class JobState(NamedTuple):
    """One publish: it waits for a segment, writes, or was cancelled while a copy still runs."""

    topic: int
    phase: str  #: "waiting", "writing" or "straggling"
    entry: EntryPlace | None  #: None while it waits
    timed_out: bool


class DigestState(NamedTuple):
    """A digest that is being computed."""

    topic: int
    version: int
    entry: EntryPlace
    readers: tuple[int, ...]


class OtherState(NamedTuple):
    """A version that any other reader holds; see ``other``."""

    topic: int
    entry: EntryPlace


class PublisherState(NamedTuple):
    """Everything that decides what the process does next."""

    incarnation: int = 1
    next_segment: int = 1
    topics: tuple[TopicState | None, ...] = ()
    sessions: tuple[SessionState, ...] = ()
    pool: tuple[tuple[int, int], ...] = ()  #: segment and content
    jobs: tuple[JobState, ...] = ()
    digests: tuple[DigestState, ...] = ()
    layouts: tuple[int, ...] = ()
    others: tuple[OtherState, ...] = ()


def topic_name(topic: int) -> str:
    """What the core calls it."""
    return f"topic-{topic}"


def thaw(bound: Bound, state: PublisherState) -> PublisherProtocol:
    """The core in that state."""
    options = PublisherOptions(max_segments=bound.max_segments, max_held=bound.max_held, lease_timeout=LATER)
    core = PublisherProtocol(options, Incarnation(state.incarnation))
    core._segments = count(state.next_segment)
    core._layouts = {LAYOUT_DIGEST[layout] for layout in state.layouts}
    for i, frozen in enumerate(state.topics):
        if frozen is not None:
            core.topics[topic_name(i)] = _thaw_topic(core, bound, i, frozen)
    for session in state.sessions:
        _thaw_session(core, bound, session)
    for i, other in enumerate(state.others):
        _thaw_other(core, FIRST_OTHER + i, other)
    for number, job in enumerate(state.jobs):
        _thaw_job(core, number, job)
    for digest in state.digests:
        topic = core.topics[topic_name(digest.topic)]
        entry = _thaw_entry(topic, digest.entry)
        entry.pins = max(entry.pins, 1)
        core._digesting[topic.name, Version(digest.version)] = entry
        topic.digest_readers[Version(digest.version)] = [SessionId(reader) for reader in digest.readers]
    core._ids = count(NEW)
    return core


def _thaw_topic(core: PublisherProtocol, bound: Bound, i: int, frozen: TopicState) -> Topic:
    ledger = Ledger(bound.max_segments, core._next_segment)
    topic = Topic(topic_name(i), i + 1, ledger, Version(frozen.version))
    if frozen.version:
        topic.content = Content({"version": frozen.version}, NOW)
    ledger.free = {SegmentId(segment): NBYTES for segment in frozen.free}
    for e in frozen.entries:
        layout = layout_of(bound, e.version).digest if e.version else b""
        ledger.entries.append(
            Entry(
                segment=SegmentId(e.segment), nbytes=NBYTES, state=e.state, fresh=e.fresh, version=Version(e.version),
                layout=layout, tainted=e.tainted, pins=e.pins, referenced=e.referenced, timed_out=e.timed_out,
                digest=digest_of((core.incarnation, e.version)) if e.digested else None,
            )
        )  # fmt: skip
    return topic


def _thaw_entry(topic: Topic, place: EntryPlace) -> Entry:
    if place.place >= 0:
        return topic.ledger.entries[place.place]
    return Entry(SegmentId(place.segment), NBYTES, State.RECLAIMED, False, Version(place.version))


def entry_place(topic: Topic, entry: Entry) -> EntryPlace:
    """Where an entry is."""
    entries = topic.ledger.entries
    return EntryPlace(entries.index(entry) if entry in entries else -1, entry.segment, entry.version)


def _thaw_session(core: PublisherProtocol, bound: Bound, frozen: SessionState) -> None:
    topic = core.topics[topic_name(frozen.reader % bound.topics)] if frozen.greeted else None
    session = Session(
        SessionId(frozen.id), 1, 1, b"t" * 16, "reader", topic, frozen.attached, last_number=frozen.last_number,
        want=Want(number=frozen.want[0], have=frozen.want[1], digest=bound.digests) if frozen.want else None,
        pushed={SegmentId(segment) for segment in frozen.pushed}, layout=LAYOUT_DIGEST[frozen.layout],
        arrival=frozen.arrival, granted=Version(frozen.granted), acked=Version(frozen.acked),
    )  # fmt: skip
    core.sessions[session.id] = session
    if not frozen.attached:
        core._greeting[session.id] = NEVER
    if topic is None:
        return
    topic.sessions[session.id] = session
    for name, place in frozen.leases:
        _thaw_lease(core, session, name, _thaw_entry(topic, place))


def _thaw_lease(core: PublisherProtocol, session: Session, name: int, entry: Entry) -> None:
    lease = Lease(lease_id(session.id, name), session.id, entry, name % NAMES)
    session.leases[lease.id] = entry.leases[lease.id] = core._leases[lease.id] = lease


def _thaw_other(core: PublisherProtocol, number: int, other: OtherState) -> None:
    topic = core.topics[topic_name(other.topic)]
    session = Session(SessionId(number), 1, 1, b"t" * 16, "other", topic, True, last_number=1)
    core.sessions[session.id] = topic.sessions[session.id] = session
    _thaw_lease(core, session, 1, _thaw_entry(topic, other.entry))


def _thaw_job(core: PublisherProtocol, number: int, job: JobState) -> None:
    topic = core.topics[topic_name(job.topic)]
    deadline_at = TIMED_OUT if job.timed_out else LATER
    entry = _thaw_entry(topic, job.entry) if job.entry is not None else None
    reservation = Reservation(
        id=number, topic=topic, nbytes=NBYTES, state=State.WRITING, asked_at=NOW, deadline_at=deadline_at, entry=entry
    )
    core._reservations[number] = reservation
    if entry is None:
        topic.queue.append(reservation)


def lease_id(session: int, name: int) -> LeaseId:
    """What the core calls a lease that was named before the step."""
    return LeaseId(session * 2 * NAMES + name)


def lease_names(core: PublisherProtocol) -> dict[LeaseId, int]:
    """A lease is called by its Want; by twice as much only if a switched off guard lets a Want be answered twice."""
    names: dict[LeaseId, int] = {}
    for session in core.sessions.values():
        taken = {le - lease_id(session.id, 0) for le in session.leases if le < NEW}
        for lease in session.leases.values():
            name = lease.id - lease_id(session.id, 0)
            if lease.id >= NEW:
                name = lease.number if lease.number not in taken else lease.number + NAMES
            taken.add(name)
            names[lease.id] = name
    return names


def freeze_topics(core: PublisherProtocol, bound: Bound) -> tuple[TopicState | None, ...]:
    """The topics. What an entry no longer needs is left out: ``fresh`` once it has a version, taint once abandoned."""
    topics: list[TopicState | None] = []
    for i in range(bound.topics):
        topic = core.topics.get(topic_name(i))
        if topic is None:
            topics.append(None)
            continue
        entries = tuple(
            EntryState(
                e.segment, e.state, e.fresh and not e.version, e.version, e.tainted and e.state is not State.ABANDONED,
                e.pins, e.referenced, e.timed_out and bool(e.leases), e.digest is not None,
            )
            for e in topic.ledger.entries
        )  # fmt: skip
        topics.append(TopicState(topic.version, entries, tuple(sorted(topic.ledger.free))))
    return tuple(topics)


def freeze_sessions(core: PublisherProtocol, bound: Bound, names: dict[LeaseId, int]) -> tuple[SessionState, ...]:
    """The sessions, in the order of their names: what one gets does not depend on another's place.

    What was granted last matters to acknowledgements alone. Those of any other reader are frozen by what they hold.
    """
    return tuple(
        SessionState(
            s.id,
            s.topic is not None,
            s.attached,
            (s.want.number, s.want.have) if s.want else None,
            s.last_number,
            tuple(sorted(s.pushed)),
            LAYOUT_NUMBER[s.layout],
            s.arrival,
            tuple(sorted((names[le.id], entry_place(s.topic, le.entry)) for le in s.leases.values()))
            if s.topic
            else (),
            s.granted if bound.acks else 0,
            s.acked,
        )
        for _, s in sorted(core.sessions.items())
        if not (bound.other and s.id >= FIRST_OTHER)
    )


def freeze_others(core: PublisherProtocol, bound: Bound) -> tuple[OtherState, ...]:
    """What any other reader holds."""
    return tuple(
        sorted(
            OtherState(s.topic.slot - 1, entry_place(s.topic, lease.entry))
            for s in core.sessions.values()
            if bound.other and s.id >= FIRST_OTHER and s.topic is not None
            for lease in s.leases.values()
        )
    )
