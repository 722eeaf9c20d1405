"""One subscriber's process in a state: the real core, thawed for one step and frozen again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from busync.errors import ViolationError
from busync.ids import Incarnation, LeaseId, SegmentId, Version
from busync.manifest import Manifest
from busync.protocol import effects as fx
from busync.protocol.subscriber import SubscriberProtocol
from busync.wire import Abandon, Announce, BusDown, Join, Release, Want
from tests.explore.bounds import Bound
from tests.explore.messages import BUS, DOOR, Packet, Packets
from tests.protocol.world import Fault, digest_of, layout_for, require

LAYOUTS = (layout_for(128, 1), layout_for(128, 2))
NBYTES = 128
NOT_WAITING = -1


def layout_of(bound: Bound, version: int) -> Manifest:
    """The layout of a version. Where there are two, version 2 has another than version 1, and version 3 the same."""
    return LAYOUTS[version // 2 % bound.layouts]


class MappingState(NamedTuple):
    """A version that is mapped in the present session."""

    lease: int
    segment: int
    version: int


class ReaderState(NamedTuple):
    """Everything that decides what the process does next."""

    incarnation: int = 0
    adopted: int = 0
    number: int = 0
    greeted: bool = False
    attached: bool = False
    leases: tuple[tuple[int, int], ...] = ()
    spare: tuple[int, ...] = ()  #: of these leases, those that end with the next Want
    segments: tuple[int, ...] = ()
    want: tuple[int, int] | None = None
    announce: Packet | None = None
    layout: int = -1
    granted: int = 0
    acked: int = 0
    have: int = NOT_WAITING  #: the application waits for something newer
    last: tuple[int, int] = (0, 0)  #: incarnation and version handed over last
    mappings: tuple[MappingState, ...] = ()


@dataclass(frozen=True, slots=True)
class ReaderStep:
    """What a step of the process gives."""

    state: ReaderState
    sent: tuple[Packet, ...] = ()
    accused: str = ""  #: the core ended the session because of what the publisher said
    inherited: tuple[MappingState, ...] = ()  #: by a forked child


class ReaderProcess:
    """The process between thawing and freezing: what a shell and an application do."""

    def __init__(self, bound: Bound, packets: Packets, state: ReaderState) -> None:
        self.bound = bound
        self.packets = packets
        self.have = state.have
        self.last = state.last
        self.mappings = list(state.mappings)
        self.sent: list[Packet] = []
        core = self.core = SubscriberProtocol("topic", "reader", digests=bound.digests)
        core.incarnation = Incarnation(state.incarnation) if state.incarnation else None
        core.adopted = Version(state.adopted)
        core._number = state.number
        core.greeted, core.attached = state.greeted, state.attached
        core.max_held = bound.max_held if state.greeted else 0
        core.leases = {LeaseId(lease): Version(version) for lease, version in state.leases}
        core.spare = {LeaseId(lease) for lease in state.spare}
        core.segments = {SegmentId(segment): NBYTES for segment in state.segments}
        if state.want is not None:
            core._want = Want(number=state.want[0], have=state.want[1], digest=bound.digests)
        if state.announce is not None:
            announce = packets.message(state.announce)
            assert isinstance(announce, Announce), "kept as one"
            core._announce = announce
        core._manifest = LAYOUTS[state.layout] if state.layout >= 0 else None
        core._granted, core._acked = Version(state.granted), Version(state.acked)

    def freeze(self) -> ReaderState:
        """The state after the step; parts of manifests never stay behind, as a layout here is one part."""
        core = self.core
        core.validate()
        want, manifest = core._want, core._manifest
        assert core._part is None, "half a manifest"
        return ReaderState(
            incarnation=core.incarnation or 0,
            adopted=core.adopted,
            number=core._number if core.greeted else 0,
            greeted=core.greeted,
            attached=core.attached,
            leases=tuple(sorted(core.leases.items())),
            spare=tuple(sorted(core.spare)),
            segments=tuple(sorted(core.segments)),
            want=(want.number, want.have) if want else None,
            announce=self.packets.down(core._announce, BUS) if core._announce else None,
            layout=LAYOUTS.index(manifest) if manifest else -1,
            granted=core._granted if self.bound.acks else 0,
            acked=core._acked,
            have=self.have,
            last=self.last if self.last[0] == (core.incarnation or 0) or not self.bound.other else (0, 0),
            mappings=tuple(sorted(self.mappings)),
        )

    # Steps

    def receive(self, packet: Packet) -> str:
        """A message arrives; the text of a violation if it is one."""
        message = self.packets.message(packet)
        try:
            if self.packets.channel(packet) == DOOR:
                self.core.receive_door(message)  # type: ignore[arg-type]
            else:
                assert isinstance(message, BusDown), "came down the bus"
                self.core.receive_bus(message)
        except ViolationError as error:
            self.end()
            return str(error)
        self.pump()
        return ""

    def connect(self) -> None:
        """The door is connected. Want numbers are only ever compared within a session: count them anew in each."""
        self.core._number = 0
        self.core.start()
        self.pump()

    def end(self) -> None:
        """The session is over."""
        self.core.stop()
        self.mappings.clear()  # what they map goes on as a remnant

    def demand(self) -> None:
        """The application waits for something newer than what it adopted."""
        self.have = self.core.adopted
        self.core.demand(Version(self.have))
        self.pump()

    def ack(self) -> None:
        """It says that it uses what it got last."""
        self.core.ack(self.core._granted)
        self.pump()

    def ack_and_demand(self) -> None:
        """It says so as it waits again: in one message."""
        self.core.ack(self.core._granted)
        self.demand()

    def withdraw(self) -> None:
        """It waits no longer."""
        self.have = NOT_WAITING
        self.core.demand(None)
        self.pump()

    def release(self, mapping: MappingState) -> None:
        """The last tensor dies: unmap, then say so."""
        self.mappings.remove(mapping)
        self.release_spare(mapping.lease)

    def copy(self, mapping: MappingState) -> None:
        """The version is copied: unmap, and say so with the next Want; at once if the one that stands is stuck."""
        self.mappings.remove(mapping)
        self.core.spared(LeaseId(mapping.lease))
        if self.have != NOT_WAITING:
            self.core.demand(Version(self.have))
            self.pump()

    def release_spare(self, lease: int) -> None:
        """What nothing of is mapped is let go of before there is another Want."""
        self.sent.append(self.packets.up(Release(lease=lease)))
        self.core.ended(LeaseId(lease))

    def fork(self) -> None:
        """Say so for all that is mapped."""
        self.sent.append(self.packets.up(Abandon(leases=tuple(m.lease for m in self.mappings))))

    def pump(self) -> None:
        """Carry out what the core asks for."""
        while effects := self.core.take_effects():
            for effect in effects:
                self._carry_out(effect)

    def _carry_out(self, effect: fx.SubscriberEffect) -> None:
        match effect:
            case fx.ToDoor():
                self.sent.append(self.packets.up(effect.message))
            case fx.ConnectBus():
                self.sent.append(self.packets.up(Join()))
            case fx.Attached():
                if self.have != NOT_WAITING:
                    self.have = min(self.have, self.core.adopted)
                    self.core.demand(Version(self.have))
            case fx.Granted():
                self._granted(effect)
            case fx.DigestArrived():
                incarnation = self.core.incarnation or 0
                require(effect.digest == digest_of((incarnation, effect.version)), "a digest of something else")
            case fx.TakeSegment():
                require(effect.nbytes == NBYTES, "the size of another segment")
            case fx.ForgetSegments():
                pass  # the core's books of descriptors are taken for the descriptors
            case fx.Rejected():
                raise Fault(f"refused: {effect.text}")

    def _granted(self, effect: fx.Granted) -> None:
        require(effect.values == {"version": effect.version}, "values of another version")
        require(effect.manifest == layout_of(self.bound, effect.version), "the layout of another version")
        require(self.have != NOT_WAITING and effect.version > self.have, f"{effect.version} was not asked for")
        incarnation, last = self.last
        require(incarnation != self.core.incarnation or effect.version >= last, "versions go back")
        require(effect.segment in self.core.segments, f"the descriptor of segment {effect.segment} is not here")
        self.last = (self.core.incarnation or 0, effect.version)
        self.have = NOT_WAITING
        self.mappings.append(MappingState(effect.lease, effect.segment, effect.version))
