"""What the publisher's process can do in one step, with its pool, its copy workers and its caller."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from msgspec import structs

from busync.errors import ViolationError
from busync.ids import LeaseId, SessionId, Version
from busync.protocol import effects as fx
from busync.protocol.ledger import State
from busync.protocol.topics import Session
from busync.wire import Abandon, Announce, DoorUp, Hello, Join, Release, Segment, Want, manifest_parts
from tests.explore import other
from tests.explore.bounds import Bound
from tests.explore.messages import BUS, DOOR, Packet, Packets
from tests.explore.publisher import (
    FIRST_OTHER,
    GARBAGE,
    GONE,
    LAYOUT_NUMBER,
    NOW,
    SLOTS,
    DigestState,
    EntryPlace,
    JobState,
    PublisherState,
    entry_place,
    freeze_others,
    freeze_sessions,
    freeze_topics,
    lease_id,
    lease_names,
    thaw,
    topic_name,
)
from tests.explore.reader import LAYOUTS, NBYTES, layout_of
from tests.protocol.world import Fault, digest_of, require

Action = tuple[str | int, ...]  #: a method of PublisherProcess and its arguments


@dataclass(frozen=True, slots=True)
class PublisherStep:
    """What a step of the process gives."""

    state: PublisherState
    sent: tuple[tuple[int, Packet], ...] = ()  #: session and message, in order
    ended: frozenset[int] = frozenset()  #: sessions that the publisher ended
    accused: str = ""  #: because of what it said


class PublisherProcess:
    """The process between thawing and freezing."""

    def __init__(self, bound: Bound, packets: Packets, state: PublisherState) -> None:
        self.bound = bound
        self.packets = packets
        self.core = thaw(bound, state)
        self.next_segment = state.next_segment
        self.pool = dict(state.pool)
        self.jobs: dict[int, JobState] = dict(enumerate(state.jobs))
        self.digests = {(topic_name(d.topic), d.version): d for d in state.digests}
        self.board = {i + 1: topic.version if topic else 0 for i, topic in enumerate(state.topics)}
        self.sent: list[tuple[int, fx.PublisherEffect]] = []
        self.ended: set[int] = set()
        self.accused = ""

    # Steps

    def connect(self, session: int) -> None:
        """A connection is accepted."""
        self.core._ids = iter([session])  # type: ignore[assignment]
        self.core.connected(1, 1, b"t" * 16, NOW)

    def receive(self, session: int, packet: int) -> None:
        """A message arrives."""
        message = self.packets.message(Packet(packet))
        if isinstance(message, Join):
            self.core.joined(SessionId(session), NOW)
        elif message is None:
            self.core.lost(SessionId(session), NOW)
        else:
            if isinstance(message, Release):
                message = Release(lease=lease_id(session, message.lease))
            elif isinstance(message, Hello):
                message = Hello(
                    wire=message.wire, topic=topic_name(session // SLOTS % self.bound.topics), name=message.name
                )
            elif isinstance(message, Abandon):
                message = Abandon(leases=tuple(lease_id(session, name) for name in message.leases))
            elif isinstance(message, Want):
                message = structs.replace(message, released=tuple(lease_id(session, name) for name in message.released))
            assert isinstance(message, DoorUp), "came up the door"
            try:
                self.core.receive(SessionId(session), message, NOW)
            except ViolationError as error:
                self.accused = str(error)
                self.end(session)

    def end(self, session: int) -> None:
        """The publisher notices the end of a session, or brings it about."""
        if SessionId(session) in self.core.sessions:
            self.ended.add(session)
            self.core.lost(SessionId(session), NOW)

    def reserve(self, topic: int) -> None:
        """A publish begins."""
        number = len(self.jobs)
        self.jobs[number] = JobState(topic, "waiting", None, False)
        self.core._ids = iter([number])  # type: ignore[assignment]
        self.core.reserve(topic_name(topic), NBYTES, State.WRITING, NOW)

    def commit(self, number: int) -> None:
        """What was written is published."""
        job = self.jobs.pop(number)
        topic = self.core.topics[topic_name(job.topic)]
        version = topic.version + 1
        assert job.entry is not None, "it has a segment"
        self.pool[job.entry.segment] = version
        layout = layout_of(self.bound, version).digest
        done = self.core.commit(number, layout, "", {"version": version}, NOW)
        require(done == version, "a publish was refused")

    def cancel(self, number: int, straggling: int) -> None:
        """A publish is cancelled, perhaps while a copy still runs."""
        job = self.jobs[number]
        if straggling:
            self.jobs[number] = job._replace(phase="straggling")
        else:
            del self.jobs[number]
        self.core.discard(number, NOW, referenced=bool(straggling))

    def straggle(self, number: int) -> None:
        """The copy that was cancelled writes once more and returns."""
        job = self.jobs.pop(number)
        assert job.entry is not None, "it has a segment"
        require(job.entry.segment in self.pool, f"segment {job.entry.segment} was written after it was dropped")
        self.pool[job.entry.segment] = GARBAGE
        self.core.discard(number, NOW, referenced=False)

    def time_out(self) -> None:
        """The publish that waits has waited for ``lease_timeout``."""
        for reservation in self.core._reservations.values():
            if reservation.entry is None:
                reservation.deadline_at = NOW
                job = self.jobs[reservation.id]
                self.jobs[reservation.id] = job._replace(timed_out=True)
        self.core.handle_timer(NOW)
        deadline = self.core.deadline()
        require(deadline is None or deadline > NOW, "the timer would fire for ever")

    def finish_digest(self, topic: int, version: int) -> None:
        """A digest is there."""
        self.digests.pop((topic_name(topic), version))
        digest = digest_of((self.core.incarnation, version))
        self.core.digest_done(topic_name(topic), Version(version), digest, NOW)

    # Any other reader

    def other_leases(self, topic: int) -> None:
        """Somebody else gets the newest version."""
        other.lease(self.core, topic)

    def other_asks(self, topic: int) -> None:
        """Somebody else gets the newest version, and asks for its digest."""
        other.lease(self.core, topic, digest=True)

    def other_releases(self, number: int) -> None:
        """Somebody else lets go of a version."""
        other.release(self.core, self._other(number))

    def other_is_lost(self, number: int) -> None:
        """Somebody else is gone without a word."""
        other.lose(self.core, self._other(number))

    def other_forks(self, number: int) -> None:
        """Somebody else forks."""
        other.abandon(self.core, self._other(number))

    def _other(self, number: int) -> Session:
        return self.core.sessions[SessionId(FIRST_OTHER + number)]

    # What the core asks for

    def pump(self) -> None:
        """Carry it out."""
        while effects := self.core.take_effects():
            for effect in effects:
                self._carry_out(effect)

    def _carry_out(self, effect: fx.PublisherEffect) -> None:
        match effect:
            case fx.SendDoor() | fx.SendBus() | fx.PushSegment() | fx.SendManifest():
                self.sent.append((effect.session, effect))
            case fx.WriteBoard(slot, version):
                require(version == 0 or version == self.board[slot] + 1, "the board jumps")
                self.board[slot] = version
            case fx.DropSegment(segment):
                self.pool.pop(segment, None)
            case fx.ComputeDigest(topic, version, segment):
                place = EntryPlace(-1, segment, version)
                self.digests[topic, version] = DigestState(int(topic[-1]), version, place, ())
            case fx.EndSession(session):
                self.end(session)
            case fx.Reserved():
                self._reserved(effect)
            case fx.DropLayout() | fx.WaitDone():
                pass

    def _reserved(self, effect: fx.Reserved) -> None:
        require(effect.error is None and not effect.skipped, "a publish that waits was given up")
        self.jobs[effect.reservation] = self.jobs[effect.reservation]._replace(
            phase="writing", entry=EntryPlace(-1, effect.segment, 0), timed_out=False
        )
        if effect.fresh:
            require(effect.segment == self.next_segment, "the number of a segment was used before")
            self.next_segment += 1
        else:
            require(effect.segment in self.pool, "a segment that was dropped is written")
        self.pool[effect.segment] = GARBAGE  # copying begins at once: that is the worst for whoever reads it

    # Freezing

    def step(self) -> PublisherStep:
        """What came of it."""
        if self.bound.other:
            other.settle(self.core)
        self.pump()
        self._check()
        core = self.core
        names = lease_names(core)
        jobs = []
        for number, job in self.jobs.items():
            reserved = core._reservations[number].entry if number in core._reservations else None
            place = job.entry and job.entry._replace(place=-1)
            if reserved is not None:
                place = entry_place(core.topics[topic_name(job.topic)], reserved)
            jobs.append(job._replace(entry=place))
        digests = []
        for (name, version), digest in self.digests.items():
            topic = core.topics[name]
            # That somebody has asked keeps the digest from being computed twice, even if he is gone.
            known = {s.id for s in core.sessions.values() if not (self.bound.other and s.id >= FIRST_OTHER)}
            readers = {r if r in known else GONE for r in topic.digest_readers[Version(version)]}
            place = entry_place(topic, core._digesting[name, Version(version)])
            digests.append(digest._replace(entry=place, readers=tuple(sorted(readers))))
        state = PublisherState(
            core.incarnation, self.next_segment, freeze_topics(core, self.bound),
            freeze_sessions(core, self.bound, names), tuple(sorted(self.pool.items())), tuple(jobs),
            tuple(sorted(digests)), tuple(sorted(LAYOUT_NUMBER[layout] for layout in core._layouts)),
            freeze_others(core, self.bound),
        )  # fmt: skip
        heard = FIRST_OTHER if self.bound.other else inf  # nobody models what others hear
        sent = tuple((to, packet) for to, e in self.sent if to < heard for packet in self._packets(e, names))
        return PublisherStep(state, sent, frozenset(self.ended), self.accused)

    def _packets(self, effect: fx.PublisherEffect, names: dict[LeaseId, int]) -> list[Packet]:
        match effect:
            case fx.SendDoor() | fx.SendBus():
                message = effect.message
                if isinstance(message, Announce):
                    fields = {name: getattr(message, name) for name in message.__struct_fields__}
                    message = Announce(**(fields | {"lease": names.get(LeaseId(message.lease), message.number)}))
                return [self.packets.down(message, DOOR if isinstance(effect, fx.SendDoor) else BUS)]
            case fx.PushSegment():
                require(effect.segment in self.pool, f"segment {effect.segment} is pushed, but not there")
                segment = Segment(incarnation=self.core.incarnation, segment=effect.segment, nbytes=NBYTES)
                return [self.packets.down(segment, DOOR)]
            case fx.SendManifest():
                manifest = LAYOUTS[LAYOUT_NUMBER[effect.layout]]
                return [self.packets.down(part, BUS) for part in manifest_parts(manifest, self.core.incarnation)]
        raise Fault(f"not a message: {effect}")

    def _check(self) -> None:
        """What holds between two steps whatever the readers do."""
        self.core.validate()
        ledgers = [topic.ledger for topic in self.core.topics.values()]
        booked = {segment for ledger in ledgers for segment in ledger.all_segments()}
        require(set(self.pool) == booked, f"pool {set(self.pool)} and books {booked} differ")
        require(len(self.pool) <= self.bound.topics * self.bound.max_segments, "the pool is too large")
        for topic in self.core.topics.values():
            for e in topic.ledger.entries:
                kept = e.leases or e.pins or e.referenced or e.state is not State.RETIRED
                require(kept, "a version that nobody holds is kept")
            if topic.queue:
                ledger = topic.ledger
                require(ledger.pooled == ledger.max_segments and ledger.may_wait(), "a publish waits for nothing")
                overdue = topic.queue[0].deadline_at <= NOW and ledger.relieve_possible()
                require(not overdue, "nothing helps a publish that timed out")


def describe_error(error: Exception) -> str:
    """A fault that a core or its process has shown itself; braces would be taken for names of readers."""
    text = str(error) if isinstance(error, AssertionError) else repr(error)
    return (text or "an assertion").replace("{", "(").replace("}", ")")


def restart(bound: Bound, state: PublisherState) -> PublisherState:
    """A new incarnation."""
    return PublisherState(incarnation=state.incarnation + 1, topics=(None,) * bound.topics)


def swapped(state: PublisherState, bound: Bound) -> PublisherState:
    """The same state with the two readers (and their topics) exchanged."""
    sessions = tuple(sorted(s._replace(id=s.id ^ SLOTS) for s in state.sessions))
    digests = tuple(
        d._replace(readers=tuple(sorted(r if r == GONE else r ^ SLOTS for r in d.readers))) for d in state.digests
    )
    jobs, topics = state.jobs, state.topics
    if bound.topics == 2:
        topics = topics[::-1]
        jobs = tuple(job._replace(topic=1 - job.topic) for job in jobs)
        digests = tuple(d._replace(topic=1 - d.topic) for d in digests)
    return state._replace(sessions=sessions, topics=topics, jobs=jobs, digests=tuple(sorted(digests)))
