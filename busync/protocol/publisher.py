"""PublisherProtocol: one publisher, its topics, and its sessions. Sans-IO.

The shell calls a method for everything that happens and then carries out ``take_effects()`` in order. Nothing here
waits: a publish that finds no segment leaves a reservation, which a later call answers with a Reserved effect.

One class, and longer than others: what ends a lease may serve a reservation, drop a segment, end a wait and grant a
version, so its parts would share all of its books; and the explorer freezes and thaws it whole. What stands alone is
elsewhere: ``ledger``, ``topics``, ``waits``, ``status``.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

from busync.errors import OptionError, PoolExhausted, ViolationError, WireVersionError
from busync.ids import Incarnation, LeaseId, SegmentId, SessionId, Version, check_label
from busync.options import PublisherOptions
from busync.protocol import effects as fx
from busync.protocol import guards
from busync.protocol.ledger import Devices, Entry, Event, Lease, Ledger, State
from busync.protocol.status import describe
from busync.protocol.topics import Arrival, Content, Reservation, Session, Topic
from busync.protocol.waits import Wait, WaitFor, Waits
from busync.wire import (
    MAX_TEXT,
    WIRE_VERSION,
    Abandon,
    Ack,
    Announce,
    Digest,
    DoorUp,
    Forget,
    Hello,
    Joined,
    Nack,
    Refuse,
    RefuseCode,
    Release,
    Value,
    Want,
    Welcome,
    Withdraw,
)

MAX_TOPICS = 255
GREETING_TIMEOUT = 10.0  #: seconds from the connection to Hello, and again to Join


class PublisherProtocol:
    """The decisions of one publisher. Every method takes ``now`` in monotonic seconds where time matters."""

    def __init__(self, options: PublisherOptions, incarnation: Incarnation) -> None:
        self.options = options
        self.incarnation = incarnation
        self.topics: dict[str, Topic] = {}
        self.sessions: dict[SessionId, Session] = {}
        self.counters: Counter[str] = Counter(abandoned=0)
        self._greeting: dict[SessionId, float] = {}  #: sessions that are not attached yet, and when they end if not
        self._leases: dict[LeaseId, Lease] = {}
        self._reservations: dict[int, Reservation] = {}
        self._waits = Waits(lambda done: self._effects.append(done))
        self._effects: list[fx.PublisherEffect] = []
        self._ids = count(1)
        self._segments = count(1)
        self._digesting: dict[tuple[str, Version], Entry] = {}
        self._layouts: set[bytes] = set()

    def take_effects(self) -> list[fx.PublisherEffect]:
        """What the shell must do now, in order."""
        effects, self._effects = self._effects, []
        return effects

    def deadline(self) -> float | None:
        """When ``handle_timer`` wants to be called, at the latest."""
        soonest = self._waits.deadline()
        for deadline_at in self._greeting.values():
            soonest = deadline_at if soonest is None else min(soonest, deadline_at)
        for topic in self.topics.values():
            # A reservation that has timed out and still waits can only be helped by an event, not by the clock.
            if topic.queue and topic.ledger.relieve_possible():
                deadline_at = topic.queue[0].deadline_at
                soonest = deadline_at if soonest is None else min(soonest, deadline_at)
        return soonest

    def handle_timer(self, now: float) -> None:
        """Let time pass."""
        for session_id in [s for s, deadline_at in self._greeting.items() if deadline_at <= now]:
            self._end(self.sessions[session_id], "said nothing for too long")
        for topic in list(self.topics.values()):
            self._serve_queue(topic, now)
        self._waits.expire(now)

    # Publishing

    def topic(self, name: str) -> Topic:
        """The topic of that name, made if need be.

        Raises:
            OptionError: there are 255 topics already.
        """
        topic = self.topics.get(name)
        if topic is None:
            used = {t.slot for t in self.topics.values()}
            slot = next((i for i in range(1, MAX_TOPICS + 1) if i not in used), None)
            if slot is None:
                raise OptionError("topic", name, f"one of the {MAX_TOPICS} topics that exist")
            topic = Topic(name, slot, Ledger(self.options.max_segments, self._next_segment))
            self.topics[name] = topic
            self._effects.append(fx.WriteBoard(slot, Version(0)))
        return topic

    def _make_room(self) -> None:
        """Give up a topic that subscribers alone have asked for, if there is no slot left: the publisher's go first."""
        unused = next((t for t in self.topics.values() if t.unused), None)
        if len(self.topics) == MAX_TOPICS and unused is not None:
            del self.topics[unused.name]
            for session in unused.sessions.values():
                self.refuse(session.id, "topics", f"nothing was published on {unused.name!r}, and its place is needed")

    def reserve(self, topic_name: str, nbytes: int, state: State, now: float, devices: Devices = ()) -> int:
        """Ask for a segment with ``nbytes`` on the host, and so many on GPUs; a Reserved effect answers, now or later.

        Raises:
            OptionError: there are 255 topics already.
        """
        if topic_name not in self.topics:
            self._make_room()
        topic = self.topic(topic_name)
        deadline_at = now + self.options.lease_timeout
        reservation = Reservation(next(self._ids), topic, nbytes, state, now, deadline_at, devices=devices)
        self._reservations[reservation.id] = reservation
        topic.queue.append(reservation)
        self._serve_queue(topic, now)
        return reservation.id

    def commit(
        self, reservation_id: int, layout: bytes, label: str, values: dict[str, Value], now: float, *,
        referenced: bool = False,
    ) -> Version | None:  # fmt: skip
        """Publish what was written; None if the guards of the ledger forbid it (the loan is still referenced)."""
        reservation = self._reservations[reservation_id]
        topic, entry = reservation.topic, reservation.entry
        assert entry is not None, "committed without a segment"
        entry.referenced = referenced
        version = Version(topic.version + 1)
        if not topic.ledger.commit(entry, version, layout, label):
            return None
        del self._reservations[reservation_id]
        topic.version = version
        topic.content = Content(values, now)
        self.counters["published"] += 1
        self._effects.append(fx.WriteBoard(topic.slot, version))
        for session in topic.sessions.values():
            if session.want is not None:
                self._try_grant(session)
        self._drop_layouts(layout)
        self._serve_queue(topic, now)
        return version

    def discard(self, reservation_id: int, now: float, *, referenced: bool = False) -> None:
        """A reservation is not wanted any more; unknown ones are ignored.

        ``referenced``: the caller still refers to the loan's memory, which is then never used again; or a copy still
        runs, which keeps the segment until ``discard`` is called again after its return.
        """
        reservation = self._reservations.get(reservation_id)
        if reservation is None:
            return
        topic, entry = reservation.topic, reservation.entry
        if entry is None:
            topic.queue.remove(reservation)
        else:
            entry.referenced = referenced
            if not topic.ledger.step(entry, Event.DISCARD):
                return
        del self._reservations[reservation_id]
        self._serve_queue(topic, now)

    def allocation_failed(self, reservation_id: int, now: float) -> None:
        """The fresh segment of a reservation could not be made."""
        reservation = self._reservations.pop(reservation_id)
        assert reservation.entry is not None, "failed without a segment"
        reservation.topic.ledger.forget(reservation.entry)
        self._serve_queue(reservation.topic, now)

    def wear_out(self, segment: SegmentId) -> None:
        """A segment has been exported so often that a fresh one must take its place once nobody reads it."""
        for topic in self.topics.values():
            if segment in topic.ledger.devices:
                topic.ledger.worn.add(segment)

    def digest_done(self, topic_name: str, version: Version, digest: bytes | None, now: float) -> None:
        """ComputeDigest is answered (None: it could not be computed)."""
        topic = self.topics[topic_name]
        entry = self._digesting.pop((topic_name, version))
        entry.digest = digest
        if digest is not None and version > topic.digested[0]:
            self.counters["unchanged"] += digest == topic.digested[1]
            topic.digested = version, digest
        for reader in topic.digest_readers.pop(version, []):
            if reader in self.sessions and digest is not None:
                self._send_digest(self.sessions[reader], version, digest)
        topic.ledger.unpin(entry)
        self._serve_queue(topic, now)

    # Sessions

    def connected(self, pid: int, uid: int, token: bytes, now: float) -> SessionId:
        """A subscriber's connection was accepted."""
        session = Session(SessionId(next(self._ids)), pid, uid, token)
        self._greeting[session.id] = now + GREETING_TIMEOUT
        self.sessions[session.id] = session
        return session.id

    def receive(self, session_id: SessionId, message: DoorUp, now: float) -> None:
        """A packet of a session.

        Raises:
            ViolationError: the message is not allowed now; the shell ends the session.
        """
        session = self.sessions.get(session_id)
        if session is None or session.ended:
            return
        if isinstance(message, Hello):
            self._hello(session, message, now)
            return
        topic = session.topic
        if topic is None:
            raise ViolationError(self._peer(session), f"{type(message).__name__} before Hello")
        match message:
            case Want():
                if message.ack:
                    self._ack(session, message.ack)
                for number in message.released:
                    self._release(session, number)
                self._want(session, message)
                if message.released:
                    self._serve_queue(topic, now)
                if message.ack or message.released:
                    self._waits.progress(session)
                return
            case Withdraw():
                self._withdraw(session, message)
            case Ack():
                self._ack(session, message.version)
                self._waits.progress(session)
                return
            case Release():
                self._release(session, message.lease)
                self._try_grant(session)
            case Abandon():
                for lease_id in message.leases:
                    lease = session.leases.get(LeaseId(lease_id))
                    if lease is not None:
                        topic.ledger.taint(lease)
            case Nack():
                session.failed, session.reason = max(session.failed, Version(message.version)), message.text
                self.counters["nacks"] += 1
                self._waits.fail(session, message.version, message.text)
        self._serve_queue(topic, now)
        self._waits.progress(session)

    def joined(self, session_id: SessionId, now: float) -> None:
        """The session's routing id was seen on the bus: it is attached. Repetition changes nothing."""
        session = self.sessions.get(session_id)
        if session is None or session.ended or session.topic is None or session.attached:
            return
        session.attached = True
        del self._greeting[session.id]
        self.counters["attached"] += 1
        self._effects.append(fx.SendBus(session.id, Joined(incarnation=self.incarnation)))
        self._try_grant(session)

    def lost(self, session_id: SessionId, now: float) -> None:
        """The session's connection ended. Its open leases end without its word."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        self._greeting.pop(session_id, None)
        topic = session.topic
        if topic is None:
            return
        topic.sessions.pop(session.id, None)
        for lease in list(session.leases.values()):
            del self._leases[lease.id]
            topic.ledger.break_lease(lease)
            self.counters["broken leases"] += 1
        session.leases.clear()
        self._serve_queue(topic, now)
        self._waits.lose(session)
        if not topic.sessions and topic.unused and self.topics.get(topic.name) is topic:
            del self.topics[topic.name]

    def refuse(self, session_id: SessionId, code: RefuseCode, text: str) -> None:
        """Tell a session why it cannot be, and end it."""
        session = self.sessions[session_id]
        if session.ended:
            return
        self.counters["refused"] += 1
        self._effects.append(fx.SendDoor(session.id, Refuse(code=code, text=text[:MAX_TEXT])))
        self._end(session, text)

    # Waiting

    def attached(self, topic_name: str) -> dict[SessionId, str]:
        """Who is attached to a topic now."""
        topic = self.topics.get(topic_name)
        return {s.id: s.name for s in topic.sessions.values() if s.attached} if topic else {}

    def held(self) -> list[tuple[str, Version, dict[SessionId, str]]]:
        """Every version that sessions have a lease on: its topic, its number, and who they are."""
        return [
            (topic.name, e.version, {le.session: self.sessions[le.session].name for le in e.leases.values()})
            for topic in self.topics.values()
            for e in topic.ledger.entries
            if e.leases
        ]

    def wait(
        self, topic_name: str, version: Version, what: WaitFor, need: int | None,
        expected: dict[SessionId, str], deadline_at: float,
    ) -> int:  # fmt: skip
        """Wait until sessions acked or released a version; a WaitDone effect answers, now or later.

        ``expected`` are the sessions that count from the start; those that ended since are reported as gone.
        """
        wait = Wait(next(self._ids), self.topics[topic_name], version, what, need, dict(expected), deadline_at)
        self._waits.add(wait)
        return wait.id

    def cancel_wait(self, wait_id: int) -> None:
        """Nobody waits any more."""
        self._waits.cancel(wait_id)

    # Inside: messages

    def _hello(self, session: Session, hello: Hello, now: float) -> None:
        if session.topic is not None:
            raise ViolationError(self._peer(session), "a second Hello")
        try:
            check_label("topic", hello.topic)
            session.name = check_label("name", hello.name, empty=True) or f"pid-{session.pid}"
        except OptionError as error:
            raise ViolationError(self._peer(session), str(error)) from None
        if hello.wire != WIRE_VERSION:
            self.refuse(session.id, "wire-version", str(WireVersionError(WIRE_VERSION, hello.wire)))
            return
        try:
            topic = self.topic(hello.topic)
        except OptionError as error:
            self.refuse(session.id, "topics", str(error))
            return
        session.topic = topic
        self._greeting[session.id] = now + GREETING_TIMEOUT
        topic.sessions[session.id] = session
        welcome = Welcome(
            wire=WIRE_VERSION, incarnation=self.incarnation, token=session.token, slot=topic.slot,
            max_held=self.options.max_held,
        )  # fmt: skip
        self._effects.append(fx.SendDoor(session.id, welcome))

    def _want(self, session: Session, want: Want) -> None:
        if not guards.later_number(want.number, session.last_number):
            return
        if session.want is not None:
            raise ViolationError(self._peer(session), "a second Want while one is open")
        if session.arrival is not Arrival.SURE and guards.was_taken(session.arrival):
            session.arrival = Arrival.SURE
        session.last_number = want.number
        session.want = want
        self._try_grant(session)

    def _withdraw(self, session: Session, withdraw: Withdraw) -> None:
        if session.want is not None and session.want.number == withdraw.number:
            session.want = None
        if session.arrival is Arrival.GRANTED and withdraw.number == session.last_number:
            session.arrival = Arrival.OPEN
        for lease in [le for le in session.leases.values() if le.number == withdraw.number]:
            self._end_lease(lease)

    def _ack(self, session: Session, version: int) -> None:
        if version > session.granted:
            raise ViolationError(self._peer(session), f"ack of version {version}, which it was never granted")
        session.acked = max(session.acked, Version(version))

    def _release(self, session: Session, number: int) -> None:
        lease = self._leases.get(LeaseId(number))
        if lease is not None and guards.own_lease(lease, session.id):
            self._end_lease(lease)

    def _end_lease(self, lease: Lease) -> None:
        session = self.sessions[lease.session]
        assert session.topic is not None, "a lease without a topic"
        del self._leases[lease.id]
        del session.leases[lease.id]
        session.topic.ledger.end_lease(lease)
        if lease.entry.state is State.ABANDONED:
            self._tell_to_forget(session.topic, session)

    # Inside: granting

    def _try_grant(self, session: Session) -> None:
        topic, want = session.topic, session.want
        if topic is None or want is None or not session.attached or session.ended:
            return
        entry = topic.ledger.newest()
        if entry is None or not guards.newer(entry.version, want.have):
            return
        if not guards.within_held(len(session.leases), self.options.max_held):
            return
        lease = topic.ledger.grant(entry, LeaseId(next(self._ids)), session.id, want.number)
        session.leases[lease.id] = self._leases[lease.id] = lease
        session.want = None
        if session.granted and entry.version > session.granted:
            session.skipped += entry.version - session.granted - 1
        session.granted = max(session.granted, entry.version)
        self._send_grant(topic, session, lease)
        if want.digest:
            self._want_digest(topic, session, entry)

    def _send_grant(self, topic: Topic, session: Session, lease: Lease) -> None:
        """By the door, which is faster; behind the layout on the bus, as long as that may not have arrived."""
        entry, content = lease.entry, topic.content
        assert content is not None, "granted before anything was published"
        if entry.segment and entry.segment not in session.pushed:
            session.pushed.add(entry.segment)
            self._effects.append(fx.PushSegment(session.id, entry.segment))
        if session.layout != entry.layout:
            session.layout, session.arrival = entry.layout, Arrival.GRANTED
            self._effects.append(fx.SendManifest(session.id, entry.layout))
        announce = Announce(
            incarnation=self.incarnation, number=lease.number, lease=lease.id, version=entry.version,
            layout=entry.layout, segment=entry.segment,
            label=entry.label, published_at=content.published_at, values=content.values,
        )  # fmt: skip
        if session.arrival is Arrival.SURE:
            self._effects.append(fx.SendDoor(session.id, announce))
            return
        if session.arrival is Arrival.OPEN:
            session.arrival = Arrival.GRANTED
        self._effects.append(fx.SendBus(session.id, announce))

    def _want_digest(self, topic: Topic, session: Session, entry: Entry) -> None:
        if entry.digest is not None:
            self._send_digest(session, entry.version, entry.digest)
            return
        readers = topic.digest_readers.setdefault(entry.version, [])
        readers.append(session.id)
        if len(readers) == 1:
            topic.ledger.pin(entry)
            self._digesting[topic.name, entry.version] = entry
            self._effects.append(fx.ComputeDigest(topic.name, entry.version, entry.segment, entry.layout))

    def _send_digest(self, session: Session, version: Version, digest: bytes) -> None:
        message = Digest(incarnation=self.incarnation, version=version, digest=digest)
        self._effects.append(fx.SendBus(session.id, message))

    # Inside: segments

    def _next_segment(self) -> SegmentId:
        return SegmentId(next(self._segments))

    def _serve_queue(self, topic: Topic, now: float) -> None:
        ledger = topic.ledger
        while topic.queue:
            reservation = topic.queue[0]
            entry = ledger.take(reservation.nbytes, reservation.state, reservation.devices)
            if entry is not None:
                topic.queue.popleft()
                reservation.entry = entry
                self._answer(reservation, now, entry)
            elif self.options.when_full == "skip" and reservation.state is not State.LOANED:
                self._give_up(reservation, now, skipped=True)
            elif self.options.when_full == "skip" or not ledger.may_wait():
                loans = sum(e.state is State.LOANED for e in ledger.entries)
                self._give_up(reservation, now, error=PoolExhausted(topic.name, ledger.max_segments, loans))
            elif not ledger.relieve(timed_out=now >= reservation.deadline_at):
                reservation.blocked_by = reservation.blocked_by or self._holders(topic)
                break
        if ledger.dropped:
            self.counters["abandoned"] = sum(t.ledger.abandoned for t in self.topics.values())
            self._effects += [fx.DropSegment(segment) for segment in ledger.dropped]
            ledger.dropped.clear()
            for session in topic.sessions.values():
                self._tell_to_forget(topic, session)

    def _holders(self, topic: Topic) -> tuple[str, ...]:
        leases = (lease for e in topic.ledger.entries if e.state is State.RETIRED for lease in e.leases.values())
        return tuple(sorted({self.sessions[lease.session].name for lease in leases}))

    def _answer(self, reservation: Reservation, now: float, entry: Entry) -> None:
        waited = now - reservation.asked_at
        self._effects.append(
            fx.Reserved(
                reservation.id,
                entry.segment,
                entry.nbytes,
                entry.fresh,
                waited,
                reservation.blocked_by,
                devices=entry.devices,
            )
        )

    def _give_up(
        self, reservation: Reservation, now: float, *, skipped: bool = False, error: PoolExhausted | None = None
    ) -> None:
        reservation.topic.queue.remove(reservation)
        del self._reservations[reservation.id]
        self.counters["skipped"] += skipped
        waited = now - reservation.asked_at
        self._effects.append(fx.Reserved(reservation.id, SegmentId(0), 0, False, waited, (), error, skipped))

    def _tell_to_forget(self, topic: Topic, session: Session) -> None:
        """Have a session close what it caches of segments that have left the pool, unless it may still map them."""
        gone = session.pushed.difference(topic.ledger.live_segments())
        gone = {segment for segment in gone if guards.unneeded(segment, session.leases.values())}
        if gone:
            session.pushed -= gone
            forget = Forget(incarnation=self.incarnation, segments=tuple(sorted(gone)))
            self._effects.append(fx.SendDoor(session.id, forget))

    def _drop_layouts(self, added: bytes) -> None:
        if added not in self._layouts:
            used = {added}.union(*(t.ledger.layouts() for t in self.topics.values()))
            self._effects += [fx.DropLayout(layout) for layout in sorted(self._layouts - used)]
            self._layouts = used

    def _end(self, session: Session, reason: str) -> None:
        self._effects.append(fx.EndSession(session.id, reason))
        self._greeting.pop(session.id, None)
        session.ended = True

    @staticmethod
    def _peer(session: Session) -> str:
        return f"subscriber {session.name or '?'} (pid {session.pid})"

    # Looking

    def status(self) -> dict[str, Any]:
        """What there is, who holds it, and why; see ``Publisher.status``."""
        return describe(self.topics, self.sessions, self.counters)

    def validate(self) -> None:
        """Check every book; tests call it after every step.

        Raises:
            AssertionError: an invariant is broken.
        """
        for topic in self.topics.values():
            topic.ledger.validate()
            for entry in topic.ledger.entries:
                for lease in entry.leases.values():
                    assert self.sessions[lease.session].leases.get(lease.id) is lease, "a lease without its session"
        for session in self.sessions.values():
            assert len(session.leases) <= self.options.max_held, "a session holds more than it may"
            for lease in session.leases.values():
                assert lease.entry.leases.get(lease.id) is lease, "a session's lease that no entry knows"
