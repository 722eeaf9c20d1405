"""Who may still read which version, and when a segment may be written again. The heart of busync.

One ledger keeps one topic. It knows *entries*: an entry is a segment in the hands of one version (or of one that is
still being made), with the leases that sessions hold on it. The rule above all is:

    A segment is written again only when it has no lease, no lease on it ever ended without its reader's word, and
    nothing in the publisher's own process refers to it.

An entry begins as LOANED (the caller writes in place) or WRITING (copy workers write). Commit makes it PUBLISHED: the
newest version, the only one that is granted. The next commit makes it RETIRED: still leased, perhaps, but never
granted again. A retired entry *settles* whenever something about it ends. If every lease ended by Release or Withdraw
it is RECLAIMED: its segment goes back to the pool, warm. If a session ended with a lease open (killed, closed with
tensors alive) or said Abandon (it forks), the entry is tainted: some process may map the segment for as long as it
likes, so it is ABANDONED: taken out of the pool, never written, freed by the kernel with its last mapping. A publish
that has waited ``lease_timeout`` for a segment also abandons the oldest retired entry to its holders, who are then
*overdue*: they read on undisturbed, but later publishes do not wait for them.

An abandoned entry stays in the books while a living session still holds a lease on it, so that every byte is charged
to somebody, and so that ``max_held`` counts it. Then it is forgotten.

``TABLE`` is the whole machine. The first row whose state and event match and whose guards all hold is taken; if none
is, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from busync.ids import LeaseId, SegmentId, SessionId, Version
from busync.protocol import guards


class State(StrEnum):
    """Where an entry is in its life."""

    LOANED = "LOANED"
    WRITING = "WRITING"
    PUBLISHED = "PUBLISHED"
    RETIRED = "RETIRED"
    RECLAIMED = "RECLAIMED"
    ABANDONED = "ABANDONED"


class Event(StrEnum):
    """What happens to an entry."""

    COMMIT = "commit"
    DISCARD = "discard"
    SUPERSEDE = "supersede"
    SETTLE = "settle"
    TIME_OUT = "time out"


class Row(NamedTuple):
    """One transition."""

    state: State
    event: Event
    guards: tuple[str, ...]
    to: State
    meaning: str


IDLE = ("unleased", "untainted", "unpinned", "unreferenced")

TABLE: tuple[Row, ...] = (
    Row(State.LOANED, Event.COMMIT, ("unreferenced",), State.PUBLISHED, "the caller's loan is published"),
    Row(State.LOANED, Event.DISCARD, ("unreferenced",), State.RECLAIMED, "an unused loan comes back"),
    Row(State.LOANED, Event.DISCARD, (), State.ABANDONED, "it comes back while the caller keeps a tensor of it"),
    Row(State.WRITING, Event.COMMIT, (), State.PUBLISHED, "the copy is complete and the board is written"),
    Row(State.WRITING, Event.DISCARD, ("unreferenced",), State.RECLAIMED, "cancelled or failed, and no copy runs"),
    Row(State.PUBLISHED, Event.SUPERSEDE, (), State.RETIRED, "a newer version was published"),
    Row(State.RETIRED, Event.SETTLE, IDLE, State.RECLAIMED, "every reader has let go"),
    Row(State.RETIRED, Event.SETTLE, ("tainted",), State.ABANDONED, "a reader ended, or forked, without letting go"),
    Row(State.RETIRED, Event.TIME_OUT, (), State.ABANDONED, "a publish has waited for lease_timeout"),
)

_ROWS: dict[tuple[State, Event], tuple[Row, ...]] = {
    (state, event): tuple(row for row in TABLE if row.state is state and row.event is event)
    for state in State
    for event in Event
}

NO_VERSION = Version(0)
#: Memory of a segment besides the host's: the UUIDs of GPUs, in the order of the layout, and bytes.
Devices = tuple[tuple[str, int], ...]
POOLED = frozenset({State.LOANED, State.WRITING, State.PUBLISHED, State.RETIRED})


@dataclass(slots=True, eq=False)
class Lease:
    """One session's right to read one entry."""

    id: LeaseId
    session: SessionId
    entry: Entry
    number: int  #: the Want that it answers


@dataclass(slots=True, eq=False)
class Entry:
    """A segment in the hands of one version."""

    segment: SegmentId  #: 0: the version stores no bytes
    nbytes: int  #: on the host
    state: State
    fresh: bool
    version: Version = NO_VERSION
    layout: bytes = b""
    label: str = ""
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    tainted: bool = False
    pins: int = 0
    referenced: bool = False
    timed_out: bool = False
    digest: bytes | None = None
    devices: Devices = ()


class Ledger:
    """The entries, leases and free segments of one topic."""

    def __init__(self, max_segments: int, next_segment: Callable[[], SegmentId]) -> None:
        self.max_segments = max_segments
        self.entries: list[Entry] = []
        self.free: dict[SegmentId, int] = {}  #: their bytes on the host
        self.devices: dict[SegmentId, Devices] = {}  #: of segments in the pool that have memory on GPUs
        self.worn: set[SegmentId] = set()  #: in the pool, and not to be used for another version
        self.dropped: list[SegmentId] = []  #: left the pool; the core turns them into effects
        self.abandoned = 0
        self._next_segment = next_segment

    # Segments

    @property
    def pooled(self) -> int:
        """Segments that count against ``max_segments``."""
        return len(self.free) + sum(1 for e in self.entries if e.segment and e.state in POOLED)

    def live_segments(self) -> tuple[SegmentId, ...]:
        """Segments that may still be announced: everything in the pool."""
        used = [e.segment for e in self.entries if e.segment and e.state in POOLED]
        return tuple(sorted((*self.free, *used)))

    def take(self, nbytes: int, state: State, devices: Devices = ()) -> Entry | None:
        """A new entry with a segment of at least ``nbytes`` and so many on each device; None when the pool is full."""
        if nbytes == 0 and not devices:
            return self._add(Entry(SegmentId(0), 0, state, fresh=False))
        fitting = [
            (size, segment)
            for segment, size in self.free.items()
            if nbytes <= size <= 2 * nbytes and _fits(devices, self.devices.get(segment, ()))
        ]
        if fitting:
            size, segment = min(fitting)
            del self.free[segment]
            return self._add(Entry(segment, size, state, fresh=False, devices=self.devices.get(segment, ())))
        if self.pooled >= self.max_segments:
            if not self.free:
                return None
            unfit = min(self.free)
            del self.free[unfit]
            self._drop(unfit)
        entry = Entry(self._next_segment(), nbytes, state, fresh=True, devices=devices)
        if devices:
            self.devices[entry.segment] = devices
        return self._add(entry)

    def forget(self, entry: Entry) -> None:
        """The memory of a fresh entry could not be had."""
        self.entries.remove(entry)
        self.devices.pop(entry.segment, None)

    def _drop(self, segment: SegmentId) -> None:
        self.dropped.append(segment)
        self.devices.pop(segment, None)
        self.worn.discard(segment)

    def may_wait(self) -> bool:
        """Whether waiting can bring a segment: one is retired, or still being written."""
        return any(e.segment and e.state in (State.RETIRED, State.WRITING) for e in self.entries)

    def relieve(self, *, timed_out: bool) -> bool:
        """Abandon one retired entry that need not be waited for (any more); False if there is none."""
        overdue = self.overdue()
        retired = [e for e in self.entries if e.segment and e.state is State.RETIRED]
        for entry in sorted(retired, key=lambda e: e.version):  # a loan's entry may be older than its version
            holders = {lease.session for lease in entry.leases.values()}
            if timed_out or (holders and holders <= overdue and not entry.pins):
                entry.timed_out = True
                return self.step(entry, Event.TIME_OUT)
        return False

    def relieve_possible(self) -> bool:
        """Whether time alone can bring a segment."""
        return any(e.segment and e.state is State.RETIRED for e in self.entries)

    def overdue(self) -> set[SessionId]:
        """Sessions that were waited for once, and still hold what they were waited for."""
        return {lease.session for e in self.entries if e.timed_out for lease in e.leases.values()}

    # The machine

    def step(self, entry: Entry, event: Event) -> bool:
        """Take the transition that TABLE has for ``event``, if any; says whether one was taken."""
        for row in _ROWS[entry.state, event]:
            for name in row.guards:
                if not _guard(name, entry):
                    break
            else:
                entry.state = row.to
                self._entered(entry)
                return True
        return False

    def _entered(self, entry: Entry) -> None:
        if entry.state is State.RECLAIMED:
            self.entries.remove(entry)
            # Made for a publish that was cancelled, there may be no memory yet.
            if entry.segment and (entry.version or not entry.fresh) and entry.segment not in self.worn:
                self.free[entry.segment] = entry.nbytes
            elif entry.segment:
                self._drop(entry.segment)
        elif entry.state is State.ABANDONED:
            if entry.segment:
                self._drop(entry.segment)
                self.abandoned += 1
            if not entry.leases:
                self.entries.remove(entry)

    def commit(self, entry: Entry, version: Version, layout: bytes, label: str) -> bool:
        """Make an entry the newest version and retire the one before; False if it may not be published."""
        before = self.newest()
        if not self.step(entry, Event.COMMIT):
            return False
        entry.version, entry.layout, entry.label = version, layout, label
        if before is not None:
            self.step(before, Event.SUPERSEDE)
            self.step(before, Event.SETTLE)
        return True

    def newest(self) -> Entry | None:
        """The published entry."""
        for entry in reversed(self.entries):
            if entry.state is State.PUBLISHED:
                return entry
        return None

    def find(self, version: Version) -> Entry | None:
        """The entry of a version that is still in the books."""
        return next((e for e in self.entries if e.version == version and version), None)

    def layouts(self) -> set[bytes]:
        """Layouts that some version still has."""
        return {e.layout for e in self.entries if e.version}

    # Leases

    def grant(self, entry: Entry, lease: LeaseId, session: SessionId, number: int) -> Lease:
        """Open a lease on the newest version."""
        granted = Lease(lease, session, entry, number)
        entry.leases[lease] = granted
        return granted

    def end_lease(self, lease: Lease) -> None:
        """The reader let go: Release or Withdraw."""
        del lease.entry.leases[lease.id]
        self._after_lease(lease.entry)

    def break_lease(self, lease: Lease) -> None:
        """The reader's session ended with the lease open."""
        lease.entry.tainted = True
        self.end_lease(lease)

    def taint(self, lease: Lease) -> None:
        """The reader forks: its word on this lease is worth nothing any more, but it still counts as held."""
        lease.entry.tainted = True
        self.step(lease.entry, Event.SETTLE)

    def pin(self, entry: Entry) -> None:
        """The publisher itself reads the segment."""
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """It has read it."""
        entry.pins -= 1
        self.step(entry, Event.SETTLE)

    def _after_lease(self, entry: Entry) -> None:
        if entry.state is State.ABANDONED:
            if not entry.leases:
                self.entries.remove(entry)
        else:
            self.step(entry, Event.SETTLE)

    # Tests

    def _add(self, entry: Entry) -> Entry:
        self.entries.append(entry)
        return entry

    def all_segments(self) -> Iterator[SegmentId]:
        """Every pooled segment, with repetitions if the books are wrong."""
        yield from self.free
        yield from (e.segment for e in self.entries if e.segment and e.state in POOLED)

    def validate(self) -> None:
        """Check the books; tests call it after every step.

        Raises:
            AssertionError: the books contradict themselves.
        """
        pooled = list(self.all_segments())
        assert len(pooled) == len(set(pooled)), f"a segment has two owners: {pooled}"
        assert {*self.devices, *self.worn} <= set(pooled), "something is known of segments that were dropped"
        assert self.pooled <= self.max_segments, f"{self.pooled} segments of {self.max_segments}"
        assert sum(e.state is State.PUBLISHED for e in self.entries) <= 1, "two newest versions"
        for e in self.entries:
            assert e.devices == self.devices.get(e.segment, ()) or e.state is State.ABANDONED, (
                "devices of another segment"
            )
            assert e.state is not State.RECLAIMED, "a reclaimed entry is still in the books"
            assert e.state is not State.ABANDONED or e.leases, "an abandoned entry without a holder"
            assert not (e.state is State.RETIRED and e.tainted), "a tainted entry still counts as poolable"
            assert not (e.leases and e.state in (State.LOANED, State.WRITING)), "a lease on an unpublished entry"


def _fits(devices: Devices, found: Devices) -> bool:
    """Whether memory on the same devices is large enough, and not more than twice as large."""
    if len(devices) != len(found):
        return False
    sizes = dict(found)
    return all(nbytes <= sizes.get(device, 0) <= 2 * nbytes for device, nbytes in devices)


def _guard(name: str, entry: Entry) -> bool:
    # "tainted" is the one condition that permits nothing: it only takes a segment out of use.
    return entry.tainted if name == "tainted" else bool(getattr(guards, name)(entry))
