"""PeerNet: a publisher, its subscribers, and everything between them that may go wrong.

Each queue is FIFO, as the kernel and ZeroMQ give it; across queues anything may overtake anything. A message is only
lost with its session. Beyond that a message may be repeated and one of a session that ended may come late: that may
end a session, but never harm a reader.
"""

from __future__ import annotations

from busync.ids import Incarnation, Version
from busync.options import PublisherOptions
from tests.protocol.publisher_process import PublisherProcess
from tests.protocol.subscriber_process import SubscriberProcess
from tests.protocol.world import DOWN, UP, Link, Mapping, Packet, QueueName, require


class PeerNet:
    """The world."""

    def __init__(
        self, options: PublisherOptions | None = None, readers: int = 1, *, topics: int = 1, digests: bool = False
    ) -> None:
        self.options = options or PublisherOptions()
        self.now = 1000.0
        self.acked: dict[tuple[str, Incarnation], Version] = {}
        self.zombies: list[Mapping] = []
        self.links: list[Link] = []
        self.publishers: dict[Incarnation, PublisherProcess] = {}
        self.publisher = self.start_publisher()
        self.readers = [
            SubscriberProcess(self, f"reader-{i}", f"topic-{i % topics}", digests=digests) for i in range(readers)
        ]

    def start_publisher(self) -> PublisherProcess:
        """A new incarnation; the one before dies, and nobody tells its readers but their connections."""
        for link in self.links:
            if link.at_publisher:
                link.at_publisher = False
                link.end("door_down")
        incarnation = Incarnation(len(self.publishers) + 1)
        self.publisher = self.publishers[incarnation] = PublisherProcess(self, self.options, incarnation)
        return self.publisher

    def connect(self, reader: SubscriberProcess) -> Link:
        """A connection to the publisher's door."""
        token = len(self.links).to_bytes(16, "big")
        session = self.publisher.core.connected(1, 1, token, self.now)
        link = Link(self.publisher, reader, session)
        self.publisher.links[session] = link
        self.links.append(link)
        return link

    def kill(self, reader: SubscriberProcess) -> None:
        """SIGKILL. The kernel closes the door at once, but its mappings may live on for a while."""
        self.zombies += [*reader.mappings.values(), *reader.orphans]
        reader.disconnect()
        new = SubscriberProcess(self, reader.name, reader.topic, digests=reader.core.digests)
        self.readers[self.readers.index(reader)] = new

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        core = self.publisher.core
        core.handle_timer(self.now)
        self.publisher.pump()
        deadline = core.deadline()
        require(deadline is None or deadline > self.now, "the timer would fire for ever")

    # Delivery

    def waiting(self) -> list[tuple[Link, QueueName]]:
        """Queues that hold something which somebody will receive."""
        up = [(link, queue) for link in self.links for queue in UP if link.queues[queue] and link.at_publisher]
        links = [r.link for r in self.readers if r.link is not None]
        return up + [(link, queue) for link in links for queue in DOWN if link.queues[queue]]

    def deliver(self, link: Link, queue: QueueName) -> None:
        """Deliver the first message of a queue."""
        packet = link.queues[queue].popleft()
        if packet.data:
            link.seen.append((queue, packet))
        self._hand_over(link, queue, packet)

    def repeat(self, link: Link, index: int) -> None:
        """Deliver again something that a session has seen."""
        queue, packet = link.seen[index % len(link.seen)]
        link.disturbed = True
        self._hand_over(link, queue, packet)

    def deliver_stale(self, reader: SubscriberProcess, index: int) -> None:
        """Deliver something of a session that ended."""
        queue, packet = reader.stale.pop(index % len(reader.stale))
        if reader.link is not None:
            reader.link.disturbed = True
            reader.receive(reader.link, queue, packet)

    def _hand_over(self, link: Link, queue: QueueName, packet: Packet) -> None:
        if queue in UP:
            link.publisher.receive(link, queue, packet)
        elif link.reader.link is link:
            link.reader.receive(link, queue, packet)

    def drain(self) -> None:
        """Deliver everything."""
        for _ in range(10_000):
            waiting = self.waiting()
            if not waiting:
                return
            self.deliver(*waiting[0])
        raise AssertionError("the messages never end")

    # Invariants

    def check_memory(self) -> None:
        """The rule above all: nobody ever reads anything but what was promised to him."""
        for mapping in self.zombies:
            mapping.check()
        for mapping in self.publisher.digests.values():
            mapping.check()
        for reader in self.readers:
            for mapping in (*reader.mappings.values(), *reader.orphans):
                mapping.check()

    def check(self) -> None:
        """All invariants that hold between two steps."""
        self.check_memory()
        self.publisher.check()
        for reader in self.readers:
            reader.check()
        self._check_bound()

    def _check_bound(self) -> None:
        """Memory: the pool, what living sessions hold (max_held each), what dead or forked processes map."""
        charged = {id(m.memory) for r in self.readers for m in r.mappings.values() if m.memory}
        dead = {id(m.memory) for r in self.readers for m in r.orphans if m.memory}
        dead |= {id(m.memory) for m in self.zombies if m.memory}
        pool = {id(m) for m in self.publisher.pool.values()}
        topics = len(self.publisher.core.topics)
        bound = topics * self.options.max_segments + len(self.readers) * self.options.max_held
        require(len(pool) <= topics * self.options.max_segments, "the pool is too large")
        require(len((pool | charged) - dead) <= bound, "more memory than promised")

    def settle(self) -> None:
        """Let everything come to rest, then check that nobody waits in vain and that nothing is left over."""
        publisher = self.publisher
        for job in list(publisher.jobs.values()):
            if job.phase == "straggling":
                publisher.straggle(job)
        for job in list(publisher.jobs.values()):
            if job.id in publisher.jobs:
                publisher.discard(job)
        for topic, version in list(publisher.digests):
            publisher.finish_digest(topic, version)
        self._attach_all()
        self.check()
        for reader in self.readers:
            self._check_waiting(reader)
        self._check_everybody_gets_the_newest()

    def _attach_all(self) -> None:
        for _ in range(20):
            self.drain()
            alone = [reader for reader in self.readers if reader.link is None]
            if not alone:
                return
            for reader in alone:
                reader.connect()
        raise AssertionError("sessions end again and again")

    def _check_waiting(self, reader: SubscriberProcess) -> None:
        link = reader.link
        assert link is not None
        require(reader.core.attached, f"{reader.name} does not get in")
        session = link.publisher.core.sessions[link.session]
        same = set(session.leases) == set(reader.core.leases)
        require(same, f"{reader.name} and its publisher disagree about leases")
        if reader.have is not None and len(session.leases) < self.options.max_held:
            newest = self.publisher.core.topics[reader.topic].version
            require(newest <= reader.have, f"{reader.name} waits for {newest} in vain")

    def _check_everybody_gets_the_newest(self) -> None:
        self.zombies.clear()
        for reader in self.readers:
            for lease in list(reader.mappings):
                reader.release(lease)
            reader.orphans.clear()
            if any(lease not in reader.mappings for lease in reader.core.leases):
                reader.disconnect()  # disarmed leases count until the session ends
            if reader.link is not None:
                reader.withdraw()
        self._attach_all()
        for reader in self.readers:
            reader.demand()
        self._attach_all()
        for topic, version in list(self.publisher.digests):
            self.publisher.finish_digest(topic, version)
        for reader in self.readers:
            newest = self.publisher.core.topics[reader.topic].version
            require(reader.core.adopted == newest, f"{reader.name} stays at {reader.core.adopted}, not {newest}")
            for lease in list(reader.mappings):
                reader.release(lease)
        self.drain()
        self.check()
        for stream in self.publisher.core.topics.values():
            left = [e for e in stream.ledger.entries if e is not stream.ledger.newest()]
            require(not left, f"{stream.name} keeps what nobody holds: {left}")
