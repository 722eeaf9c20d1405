"""SubscriberProtocol: what one subscriber knows and says, over one session after another. Sans-IO.

At most one Want is open. A grant is complete when its Announce, its layout and its segment's descriptor are all here;
they travel on two channels and may arrive in any order, so they are joined here. What is kept over the end of a session
is only how far the application has come in the present incarnation.
"""

from __future__ import annotations

from collections.abc import Container

from busync.errors import OptionError, ViolationError, WireVersionError
from busync.ids import Incarnation, LeaseId, SegmentId, Version, check_label
from busync.manifest import MAX_DEVICES, GroupSpec, Manifest, TensorSpec, check_part
from busync.protocol import effects as fx
from busync.protocol import guards
from busync.protocol.ledger import NO_VERSION
from busync.wire import (
    MAX_TEXT,
    WIRE_VERSION,
    Ack,
    Announce,
    BusDown,
    DeviceSegment,
    Digest,
    DoorDown,
    Forget,
    Hello,
    Joined,
    ManifestPart,
    Nack,
    NackCode,
    Refuse,
    Segment,
    Want,
    Welcome,
    Withdraw,
)

PEER = "the publisher"


def make_nack(version: Version, code: NackCode, text: str) -> Nack:
    """A Nack whose text can be sent."""
    return Nack(version=version, code=code, text=text.encode("utf-8", "replace").decode()[:MAX_TEXT])


def _whole(part: ManifestPart) -> tuple[object, ...]:
    """What all parts of a manifest have in common."""
    return part.layout, part.parts, part.nbytes, part.devices


class SubscriberProtocol:
    """The decisions of one subscriber of one topic."""

    def __init__(self, topic: str, name: str, *, digests: bool = False) -> None:
        self.topic = topic
        self.name = name
        self.digests = digests
        self.incarnation: Incarnation | None = None
        #: the newest version handed to the application in this incarnation
        self.adopted = NO_VERSION
        self._number = 0
        self._effects: list[fx.SubscriberEffect] = []
        self._reset()

    def _reset(self) -> None:
        self.greeted = False
        self.attached = False
        self.max_held = 0
        #: leases of this session that have not ended: version by lease
        self.leases: dict[LeaseId, Version] = {}
        self.spare: set[LeaseId] = set()  #: those that the application does not need: they end with the next Want
        self.segments: dict[SegmentId, int] = {}  #: bytes on the host
        self.devices: dict[SegmentId, dict[str, int]] = {}  #: bytes on GPUs
        self._want: Want | None = None
        self._announce: Announce | None = None  #: of the open Want, until the grant is complete
        self._manifest: Manifest | None = None
        self._part: ManifestPart | None = None  #: the last one of a manifest that is not complete
        self._groups: list[GroupSpec] = []
        self._tensors: list[TensorSpec] = []
        self._names: set[str] = set()
        self._ends: dict[int, int] = {}
        self._granted = NO_VERSION  #: the newest of this session
        self._acked = NO_VERSION

    def take_effects(self) -> list[fx.SubscriberEffect]:
        """What the shell must do now, in order."""
        effects, self._effects = self._effects, []
        return effects

    @property
    def speaks(self) -> bool:
        """Whether there are effects to be taken."""
        return bool(self._effects)

    @property
    def taken(self) -> int:
        """Leases of which ``max_held`` may be open, without those that the next Want ends."""
        return len(self.leases) - len(self.spare)

    @property
    def held(self) -> int:
        """Those of them that the application has: one may be of a version which is still arriving."""
        return self.taken - (self._announce is not None)

    @property
    def full(self) -> bool:
        """Whether the publisher grants nothing until a lease ends."""
        return len(self.leases) >= self.max_held

    def without_hold(self, holds: Container[LeaseId]) -> list[LeaseId]:
        """Leases of versions that the application was handed, and that are not among ``holds``."""
        arriving = self._announce.lease if self._announce is not None else None
        return [lease for lease in self.leases if lease != arriving and lease not in holds]

    # The session

    def start(self) -> None:
        """The door is connected."""
        self._reset()
        self._say(Hello(wire=WIRE_VERSION, topic=self.topic, name=self.name))

    def stop(self) -> None:
        """The session ended: its leases and whatever was in flight are gone with it."""
        self._reset()
        self._effects.clear()

    def receive_door(self, message: DoorDown) -> None:
        """A packet from the door. The effects that follow say what to do with the descriptor that came with it.

        Raises:
            ViolationError: the message is not allowed now; the shell ends the session.
        """
        match message:
            case Announce():
                if self.greeted and guards.same_incarnation(message.incarnation, self.incarnation):
                    self._announced(message)
            case Welcome():
                if self.greeted:
                    raise ViolationError(PEER, "a second Welcome")
                if message.wire != WIRE_VERSION:
                    text = str(WireVersionError(WIRE_VERSION, message.wire))
                    self._effects.append(fx.Rejected("wire-version", text))
                    return
                self.greeted, self.max_held = True, message.max_held
                if message.incarnation != self.incarnation:
                    self.incarnation, self.adopted = Incarnation(message.incarnation), NO_VERSION
                self._effects.append(fx.ConnectBus(message.token, Incarnation(message.incarnation), message.slot))
            case Refuse():
                self._effects.append(fx.Rejected(message.code, message.text))
            case Segment():
                if self.greeted and guards.same_incarnation(message.incarnation, self.incarnation):
                    self.segments[SegmentId(message.segment)] = message.nbytes
                    self._effects.append(fx.TakeSegment(SegmentId(message.segment), message.nbytes))
                    self._complete()
            case DeviceSegment():
                if self.greeted and guards.same_incarnation(message.incarnation, self.incarnation):
                    self._take_device(message)
            case Forget():
                if self.greeted and guards.same_incarnation(message.incarnation, self.incarnation):
                    known = self.segments.keys() | self.devices.keys()
                    gone = tuple(s for s in map(SegmentId, message.segments) if s in known)
                    for segment in gone:
                        self.segments.pop(segment, None)
                        self.devices.pop(segment, None)
                    self._effects.append(fx.ForgetSegments(gone))

    def receive_bus(self, message: BusDown) -> None:
        """A message from the bus.

        Raises:
            ViolationError: the message is not allowed now; the shell ends the session.
        """
        if not self.greeted or not guards.same_incarnation(message.incarnation, self.incarnation):
            return
        match message:
            case Joined():
                if not self.attached:
                    self.attached = True
                    self._effects.append(fx.Attached(Incarnation(message.incarnation)))
            case ManifestPart():
                self._add_part(message)
            case Announce():
                self._announced(message)
            case Digest():
                self._effects.append(fx.DigestArrived(Version(message.version), message.digest))

    # What the application wants

    def demand(self, have: Version | None) -> None:
        """Have one Want open for a version newer than ``have``, or none. To be called again in each session."""
        if not self.attached:
            return
        if self._want is not None:
            # It may be that only leases stand in its way which were needed when it was said.
            stuck = self.full and self.spare and self._announce is None
            if self._want.have == have and not stuck:
                return
            self._withdraw(self._want)
        if have is not None:
            self._number += 1
            self._want = Want(
                number=self._number, have=have, digest=self.digests, ack=self._take_ack(), released=self._take_spare()
            )
            self._say(self._want)

    def _take_spare(self) -> tuple[LeaseId, ...]:
        """Leases that end with a Want: one packet less wakes the publisher once less."""
        if not self.spare:
            return ()
        released = tuple(sorted(self.spare))
        for lease in released:
            del self.leases[lease]
        self.spare.clear()
        return released

    def _take_ack(self) -> Version:
        """An Ack that was about to be said on its own: one packet less wakes the publisher once less."""
        last = self._effects[-1] if self._effects else None
        if not isinstance(last, fx.ToDoor) or not isinstance(last.message, Ack):
            return NO_VERSION
        self._effects.pop()
        return Version(last.message.version)

    def ack(self, version: Version) -> None:
        """The application uses ``version``, which this session granted. More would be a violation, and is not said."""
        if self._acked < version <= self._granted:
            self._acked = version
            self._say(Ack(version=version))

    def nack(self, version: Version, code: NackCode, text: str) -> None:
        """The application cannot use ``version``."""
        self._say(make_nack(version, code, text))

    def ended(self, lease: LeaseId) -> None:
        """A lease's Release was sent (by the finalizer of its last user)."""
        self.leases.pop(lease, None)
        self.spare.discard(lease)

    def spared(self, lease: LeaseId) -> None:
        """The application needs a lease no more, though it has not ended: the next Want will say so."""
        if lease in self.leases:
            self.spare.add(lease)

    # Inside

    def _take_device(self, message: DeviceSegment) -> None:
        segment = SegmentId(message.segment)
        devices = self.devices.setdefault(segment, {})
        if message.device in devices or len(devices) == MAX_DEVICES:
            raise ViolationError(PEER, f"segment {segment} has memory on {message.device} for the second time")
        devices[message.device] = message.nbytes
        self._effects.append(fx.TakeDevice(segment, message.device, message.nbytes, message.handle))
        self._complete()

    def _withdraw(self, want: Want) -> None:
        if self._announce is not None:
            del self.leases[LeaseId(self._announce.lease)]
        self._want = self._announce = None
        self._say(Withdraw(number=want.number))

    def _announced(self, announce: Announce) -> None:
        open_number = self._want.number if self._want is not None else None
        if self._announce is not None or not guards.asked_for(announce.number, open_number):
            return
        if not guards.not_older(announce.version, self.adopted):
            raise ViolationError(PEER, f"version {announce.version} after version {self.adopted}")
        if LeaseId(announce.lease) in self.leases:
            raise ViolationError(PEER, f"lease {announce.lease} for a second version")
        if announce.label:
            try:
                check_label("label", announce.label)
            except OptionError as error:
                raise ViolationError(PEER, str(error)) from None
        self._announce = announce
        self.leases[LeaseId(announce.lease)] = Version(announce.version)
        self._complete()

    def _complete(self) -> None:
        """Hand the announced version over if everything that it needs is here."""
        announce, manifest = self._announce, self._manifest
        if announce is None:
            return
        segment = SegmentId(announce.segment)
        if self._part is not None or manifest is None or manifest.digest != announce.layout:
            raise ViolationError(PEER, f"version {announce.version} has a layout that was never sent")
        if manifest.nbytes and segment not in self.segments:
            return
        nbytes = self.segments[segment] if manifest.nbytes else 0
        self._check_room(manifest.nbytes, nbytes)
        devices = self.devices.get(segment, {}) if manifest.devices else {}
        for spec in manifest.devices:
            if spec.device not in devices:
                return
            self._check_room(spec.nbytes, devices[spec.device])
        self._want = self._announce = None
        self._granted = Version(announce.version)
        self.adopted = max(self.adopted, self._granted)
        self._effects.append(
            fx.Granted(
                LeaseId(announce.lease),
                Version(announce.version),
                segment,
                nbytes,
                manifest,
                announce.label,
                announce.values,
                announce.published_at,
            )
        )

    @staticmethod
    def _check_room(needed: int, nbytes: int) -> None:
        if needed > nbytes:
            raise ViolationError(PEER, f"a layout of {needed} bytes in a segment of {nbytes}")

    def _add_part(self, part: ManifestPart) -> None:
        last = self._part
        expected = 0 if last is None else last.part + 1
        same = last is None or _whole(last) == _whole(part)
        if part.part != expected or not same:
            raise ViolationError(PEER, f"part {part.part} of a manifest does not follow what came before")
        if last is None:
            self._groups, self._tensors, self._names, self._ends = [], [], set(), {}
        try:
            check_part(
                part.nbytes, part.groups, part.tensors, devices=part.devices, groups_before=self._groups,
                names_before=self._names, ends=self._ends,
            )  # fmt: skip
        except ValueError as error:
            raise ViolationError(PEER, f"a manifest that cannot be: {error}") from None
        self._groups += part.groups
        self._tensors += part.tensors
        self._names.update(t.name for t in part.tensors)
        self._part = part
        if part.part + 1 == part.parts:
            self._part = None
            self._manifest = Manifest(part.layout, part.nbytes, tuple(self._groups), tuple(self._tensors), part.devices)
            self._groups, self._tensors, self._names = [], [], set()

    def _say(self, message: Hello | Want | Withdraw | Ack | Nack) -> None:
        self._effects.append(fx.ToDoor(message))

    def validate(self) -> None:
        """Check the books; tests call it after every step.

        Raises:
            AssertionError: an invariant is broken.
        """
        assert len(self.leases) <= max(self.max_held, 0), "more leases than allowed"
        assert self.spare <= self.leases.keys(), "a lease that has ended is spare"
        assert self._announce is None or self._want is not None, "an answer without a question"
