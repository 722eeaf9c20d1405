"""A subscriber's process in the fake world: the real core, and what a shell and an application do with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from busync.errors import ViolationError
from busync.ids import Incarnation, LeaseId, SegmentId, Version
from busync.protocol import effects as fx
from busync.protocol.subscriber import SubscriberProtocol
from busync.wire import Abandon, Join, Release, Segment, decode_bus_down, decode_door_down, encode
from tests.protocol.world import DOWN, END, Fault, Link, Mapping, Memory, Packet, QueueName, digest_of, require

if TYPE_CHECKING:
    from tests.protocol.harness import PeerNet
    from tests.protocol.publisher_process import PublisherProcess


class SubscriberProcess:
    """One process with one subscriber."""

    def __init__(self, net: PeerNet, name: str, topic: str, *, digests: bool) -> None:
        self.net = net
        self.name = name
        self.topic = topic
        self.core = SubscriberProtocol(topic, name, digests=digests)
        self.link: Link | None = None
        self.fds: dict[tuple[Incarnation, SegmentId], Memory] = {}
        self.mappings: dict[LeaseId, Mapping] = {}  #: of the present session
        self.orphans: list[Mapping] = []  #: of sessions that ended
        self.stale: list[tuple[QueueName, Packet]] = []  #: of sessions that ended, not delivered yet
        self.have: Version | None = None  #: the application waits for something newer than this
        self.grants: list[Version] = []
        self.rejections: list[fx.Rejected] = []
        self._last = (Incarnation(0), Version(0))

    # The application

    def connect(self) -> None:
        """Begin a session."""
        require(self.link is None, "two sessions at a time")
        self.link = self.net.connect(self)
        self.core.start()
        self.pump()

    def demand(self, have: Version | None = None) -> None:
        """Wait for a version newer than ``have``, or than what was handed over last."""
        self.have = self.core.adopted if have is None else have
        self.core.demand(self.have)
        self.pump()

    def withdraw(self) -> None:
        """Wait no longer."""
        self.have = None
        self.core.demand(None)
        self.pump()

    def ack(self, version: Version) -> None:
        """Use a version."""
        if self.link is not None and self.core.incarnation is not None:
            key = (self.name, self.core.incarnation)
            self.net.acked[key] = max(self.net.acked.get(key, Version(0)), version)
        self.core.ack(version)
        self.pump()

    def release(self, lease: LeaseId) -> None:
        """The last tensor of a lease dies: unmap, then say so, unless Abandon has disarmed the finalizer."""
        mapping = self.mappings.pop(lease)
        mapping.check()
        if not mapping.disarmed:
            assert self.link is not None, "a mapping of no session"
            self.link.push("door_up", encode(Release(lease=lease)))
            self.core.ended(lease)

    def fork(self, *, disarm: bool) -> None:
        """Say Abandon for what is mapped in place, then fork: the child reads on."""
        leases = tuple(lease for lease, m in self.mappings.items() if m.in_place)
        if leases and self.link is not None:
            self.link.push("door_up", encode(Abandon(leases=leases)))
        inherited = [self.mappings[lease] for lease in leases] + [m for m in self.orphans if m.in_place]
        for mapping in inherited:
            mapping.disarmed = mapping.disarmed or disarm
            child = Mapping(mapping.memory, mapping.payload, mapping.version, f"child of {self.name}")
            self.net.zombies.append(child)

    def disconnect(self) -> None:
        """End the session, with whatever is mapped still mapped."""
        link, self.link = self.link, None
        if link is None:
            return
        link.end("door_up")
        for queue in DOWN:
            self.stale += [(queue, packet) for packet in link.queues[queue] if packet is not END]
            link.queues[queue].clear()
        self.core.stop()
        self.fds.clear()
        self.orphans += self.mappings.values()
        self.mappings.clear()

    # The network

    def receive(self, link: Link, queue: QueueName, packet: Packet) -> None:
        """Something arrived from the publisher."""
        if packet is END:
            self.disconnect()
            return
        try:
            if queue == "bus_down":
                self.core.receive_bus(decode_bus_down(packet.data))
            else:
                message = decode_door_down(packet.data)
                if isinstance(message, Segment):
                    assert packet.memory is not None, "a descriptor is missing"
                    self.fds[Incarnation(message.incarnation), SegmentId(message.segment)] = packet.memory
                self.core.receive_door(message)
        except ViolationError as error:
            require(link.disturbed, f"an honest publisher is accused: {error}")
            self.disconnect()
        self.pump()

    def pump(self) -> None:
        """Carry out what the core asks for."""
        while effects := self.core.take_effects():
            for effect in effects:
                self._carry_out(effect)

    def _carry_out(self, effect: fx.SubscriberEffect) -> None:
        assert self.link is not None, "an effect without a session"
        match effect:
            case fx.ToDoor():
                self.link.push("door_up", encode(effect.message))
            case fx.ConnectBus():
                self.link.push("bus_up", encode(Join()))
            case fx.TakeSegment():
                assert self.core.incarnation is not None
                memory = self.fds.get((self.core.incarnation, effect.segment))
                require(memory is not None and memory.nbytes == effect.nbytes, "another segment")
            case fx.Attached():
                if self.have is not None:
                    self.have = min(self.have, self.core.adopted)
                    self.core.demand(self.have)
            case fx.Granted():
                self._granted(effect)
            case fx.ForgetSegments():
                assert self.core.incarnation is not None
                for segment in effect.segments:
                    del self.fds[self.core.incarnation, segment]
            case fx.DigestArrived():
                payload = self._publisher().contents[self.topic, effect.version]
                require(effect.digest == digest_of(payload), "a digest of something else")
            case fx.Rejected():
                self.rejections.append(effect)

    def _publisher(self) -> PublisherProcess:
        assert self.core.incarnation is not None
        return self.net.publishers[self.core.incarnation]

    def _granted(self, effect: fx.Granted) -> None:
        publisher = self._publisher()
        payload = publisher.contents[self.topic, effect.version]
        require(effect.values == {"payload": payload[1]}, "values of another version")
        require(self.have is not None and effect.version > self.have, f"{effect.version} was not asked for")
        incarnation, last = self._last
        require(incarnation != publisher.incarnation or effect.version >= last, "versions go back")
        self._last = (publisher.incarnation, effect.version)
        memory = None
        if effect.segment:
            memory = self.fds.get((publisher.incarnation, effect.segment))
            if memory is None:
                raise Fault(f"the descriptor of segment {effect.segment} is not here")
            require(effect.segment_nbytes == memory.nbytes, "the size of another segment")
        self.have = None
        self.grants.append(effect.version)
        mapping = Mapping(memory, payload, effect.version, self.name, lease=effect.lease)
        self.mappings[effect.lease] = mapping
        mapping.check()

    # Invariants

    def check(self) -> None:
        """Everything about this process that can be checked between two steps."""
        self.core.validate()
        link = self.link
        if link is not None and link.at_publisher:
            booked = link.publisher.core.sessions[link.session].leases
            for lease in self.mappings:
                require(lease in booked, f"{self.name} maps what it has no lease on")
