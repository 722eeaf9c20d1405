"""The publisher's process in the fake world: the real core, and what a shell does for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from busync.errors import ViolationError
from busync.ids import Incarnation, SegmentId, SessionId, Version
from busync.manifest import Manifest
from busync.options import PublisherOptions
from busync.protocol import effects as fx
from busync.protocol.ledger import Entry, State
from busync.protocol.publisher import PublisherProtocol
from busync.protocol.waits import WaitFor
from busync.wire import DoorUp, Segment, Value, decode_bus_up, decode_door_up, encode
from tests.protocol.world import (
    END,
    Job,
    Link,
    Mapping,
    Memory,
    Packet,
    Payload,
    QueueName,
    digest_of,
    layout_for,
    one_by_one,
    require,
)

if TYPE_CHECKING:
    from tests.protocol.harness import PeerNet


class PublisherProcess:
    """One incarnation of the publisher, with its pool, its copy workers and its caller."""

    def __init__(self, net: PeerNet, options: PublisherOptions, incarnation: Incarnation) -> None:
        self.net = net
        self.incarnation = incarnation
        self.core = PublisherProtocol(options, incarnation)
        self.pool: dict[SegmentId, Memory] = {}
        self.links: dict[SessionId, Link] = {}
        self.layouts: dict[bytes, Manifest] = {}
        self.board: dict[int, Version] = {}
        self.contents: dict[tuple[str, Version], Payload] = {}
        self.jobs: dict[int, Job] = {}
        self.answers: dict[int, fx.Reserved] = {}
        self.digests: dict[tuple[str, Version], Mapping] = {}  #: being computed
        self.borrowed: list[Memory] = []  #: the caller still refers to these
        self.waits: dict[int, tuple[WaitFor, str, Version, float]] = {}
        self.reports: dict[int, fx.WaitDone] = {}

    # The caller

    def reserve(self, topic: str, nbytes: int, *, loan: bool = False, tensors: int = 1) -> Job:
        """Begin a publish or a loan."""
        manifest = layout_for(nbytes, tensors)
        state = State.LOANED if loan else State.WRITING
        number = self.core.reserve(topic, nbytes, state, self.net.now)
        job = self.jobs[number] = Job(number, topic, state, nbytes, manifest)
        self.pump()
        return job

    def write(self, job: Job, content: Payload | str | None = None) -> None:
        """Make the segment if need be, and write all of it or, with ``content``, something else."""
        require(job.phase in ("reserved", "written"), "written without a segment")
        if job.segment:
            if job.fresh and job.segment not in self.pool:
                self.pool[job.segment] = Memory(self.incarnation, job.segment, job.segment_nbytes)
            self.pool[job.segment].write(content or self.payload(job))
        job.phase = "written"

    def payload(self, job: Job) -> Payload:
        """What the publish writes."""
        return (self.incarnation, job.id)

    def commit(self, job: Job, *, referenced: bool = False) -> Version | None:
        """Publish what was written; ``referenced`` tries it with a loan whose tensors are still in use."""
        require(job.phase == "written", "committed before it was written")
        layout = job.manifest.digest
        self.layouts[layout] = job.manifest
        values: dict[str, Value] = {"payload": job.id}
        version = self.core.commit(job.id, layout, "", values, self.net.now, referenced=referenced)
        if version is not None:
            del self.jobs[job.id]
            self.contents[job.topic, version] = self.payload(job)
            if referenced and job.segment:
                self.borrowed.append(self.pool[job.segment])
        self.pump()
        return version

    def publish(self, topic: str, nbytes: int = 64, *, tensors: int = 1) -> Version:
        """A publish that finds a segment at once."""
        job = self.reserve(topic, nbytes, tensors=tensors)
        self.write(job)
        version = self.commit(job)
        assert version is not None, "a publish was refused"
        return version

    def discard(self, job: Job, *, referenced: bool = False) -> None:
        """Cancel. ``referenced``: the caller keeps a tensor of the loan, or a copy worker still runs."""
        referenced = referenced and job.phase == "written" and job.segment != 0
        if referenced and job.state is State.WRITING:
            job.phase = "straggling"
        else:
            del self.jobs[job.id]
            if referenced:
                self.borrowed.append(self.pool[job.segment])
        self.core.discard(job.id, self.net.now, referenced=referenced)
        self.pump()

    def straggle(self, job: Job) -> None:
        """A copy that was cancelled writes once more and returns."""
        require(job.phase == "straggling", "no copy is left")
        self.pool[job.segment].content = "late"
        self.net.check_memory()
        del self.jobs[job.id]
        self.core.discard(job.id, self.net.now, referenced=False)
        self.pump()

    def allocation_failed(self, job: Job) -> None:
        """There was no memory for a fresh segment."""
        del self.jobs[job.id]
        self.core.allocation_failed(job.id, self.net.now)
        self.pump()

    def scribble(self) -> None:
        """The caller writes into whatever it still refers to, as it may."""
        for memory in self.borrowed:
            memory.content = "scribbled"

    def wait(self, topic: str, version: Version, what: WaitFor, need: int | None, timeout: float) -> int:
        """Wait for acks or releases."""
        deadline_at = self.net.now + timeout
        wait = self.core.wait(topic, version, what, need, self.core.attached(topic), deadline_at)
        self.waits[wait] = (what, topic, version, deadline_at)
        self.pump()
        return wait

    def finish_digest(self, topic: str, version: Version) -> None:
        """The digest is there."""
        reading = self.digests.pop((topic, version))
        reading.check()
        self.core.digest_done(topic, version, digest_of(reading.payload), self.net.now)
        self.pump()

    # The network

    def receive(self, link: Link, queue: QueueName, packet: Packet) -> None:
        """Something arrived from a subscriber."""
        if not link.at_publisher:
            return
        if packet is END:
            self.end(link)
            return
        if queue == "bus_up":
            decode_bus_up(packet.data)
            self.core.joined(link.session, self.net.now)
        else:
            self.receive_message(link, decode_door_up(packet.data))
        self.pump()

    def receive_message(self, link: Link, message: DoorUp) -> None:
        """A message on the door; a violation ends the session."""
        try:
            self.core.receive(link.session, message, self.net.now)
        except ViolationError as error:
            require(link.disturbed, f"an honest subscriber is accused: {error}")
            self.end(link)
        self.pump()

    def end(self, link: Link) -> None:
        """The session's door or bus ended, or the core ends it."""
        if link.at_publisher:
            link.at_publisher = False
            link.end("door_down")
            del self.links[link.session]
            self.core.lost(link.session, self.net.now)
            self.pump()

    def pump(self) -> None:
        """Carry out what the core asks for."""
        while effects := self.core.take_effects():
            for effect in effects:
                self._carry_out(effect)

    def _carry_out(self, effect: fx.PublisherEffect) -> None:
        match effect:
            case fx.SendDoor() | fx.SendBus() | fx.PushSegment() | fx.SendManifest():
                link = self.links.get(effect.session)
                if link is not None:
                    self._send(link, effect)
            case fx.WriteBoard():
                require(effect.version == 0 or effect.version == self.board[effect.slot] + 1, "the board jumps")
                self.board[effect.slot] = effect.version
            case fx.DropSegment():
                memory = self.pool.pop(effect.segment, None)  # None: cancelled before it was made
                if memory is not None:
                    memory.dropped = True
            case fx.DropLayout():
                self.layouts.pop(effect.layout, None)
            case fx.ComputeDigest():
                payload = self.contents[effect.topic, effect.version]
                memory = self.pool[effect.segment] if effect.segment else None
                self.digests[effect.topic, effect.version] = Mapping(memory, payload, effect.version, "the digest")
            case fx.EndSession():
                link = self.links.get(effect.session)
                if link is not None:
                    self.end(link)
            case fx.Reserved():
                self._reserved(effect)
            case fx.WaitDone():
                self._waited(effect)

    def _send(self, link: Link, effect: fx.SendDoor | fx.SendBus | fx.PushSegment | fx.SendManifest) -> None:
        match effect:
            case fx.SendDoor():
                link.push("door_down", encode(effect.message))
            case fx.SendBus():
                link.push("bus_down", encode(effect.message))
            case fx.PushSegment():
                require(effect.segment in self.pool, f"segment {effect.segment} is pushed, but not there")
                memory = self.pool[effect.segment]
                message = Segment(incarnation=self.incarnation, segment=memory.segment, nbytes=memory.nbytes)
                link.push("door_down", encode(message), memory)
            case fx.SendManifest():
                for part in one_by_one(self.layouts[effect.layout], self.incarnation):
                    link.push("bus_down", encode(part))

    def _reserved(self, effect: fx.Reserved) -> None:
        self.answers[effect.reservation] = effect
        job = self.jobs.get(effect.reservation)
        require(job is not None, "an answer that nobody waits for")
        assert job is not None
        if effect.error is not None or effect.skipped:
            del self.jobs[job.id]
        else:
            job.phase, job.segment, job.fresh = "reserved", effect.segment, effect.fresh
            job.segment_nbytes = effect.nbytes
            require(effect.nbytes >= job.nbytes, "the segment is too small")

    def _waited(self, effect: fx.WaitDone) -> None:
        self.reports[effect.wait] = effect
        if effect.wait in self.waits:
            what, topic, version, _ = self.waits.pop(effect.wait)
            for name in effect.acked if what == "acked" else ():
                acked = self.net.acked.get((name, self.incarnation), 0)
                require(acked >= version, f"{name} is said to have acked {topic} {version}")

    # Invariants

    def check(self) -> None:
        """Everything about this process that can be checked between two steps."""
        self.core.validate()
        ledgers = {name: topic.ledger for name, topic in self.core.topics.items()}
        promised = {j.segment for j in self.jobs.values() if j.phase == "reserved" and j.fresh}
        booked = {s for ledger in ledgers.values() for s in ledger.all_segments()}
        require(set(self.pool) == booked - promised, f"pool {set(self.pool)} and books {booked - promised} differ")
        for session in self.core.sessions.values():
            require(session.id in self.links, "a session without a connection")
        for name, ledger in ledgers.items():
            queue = self.core.topics[name].queue
            if queue:
                require(ledger.pooled == ledger.max_segments and ledger.may_wait(), "waits for nothing")
                require(self.core.options.when_full == "wait", "waits although it should skip")
            overdue = queue and queue[0].deadline_at <= self.net.now
            require(not overdue or not self._retired(ledger.entries), "nothing helps a publish that timed out")

    @staticmethod
    def _retired(entries: list[Entry]) -> list[Entry]:
        return [e for e in entries if e.segment and e.state is State.RETIRED]
