"""Every condition that protects a reader, by name.

Each is a pure function that says whether an action may go on. The core asks for it as ``guards.NAME(...)``, so that a
test can switch one off and show that the invariants then break: a guard that nothing misses would not be needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from busync.protocol.ledger import Entry, Lease


def unleased(entry: Entry) -> bool:
    """No reader has a right to the segment."""
    return not entry.leases


def untainted(entry: Entry) -> bool:
    """Every lease that ended did so by its reader's word, so no mapping is left anywhere."""
    return not entry.tainted


def unpinned(entry: Entry) -> bool:
    """The publisher itself is not reading the segment (a content digest)."""
    return entry.pins == 0


def unreferenced(entry: Entry) -> bool:
    """No tensor in the publisher's process, and no copy that still runs, refers to the segment."""
    return not entry.referenced


def own_lease(lease: Lease, session: int) -> bool:
    """A session can only end leases of its own."""
    return lease.session == session


def within_held(held: int, max_held: int) -> bool:
    """A session holds no more versions than it may."""
    return held < max_held


def newer(version: int, have: int) -> bool:
    """A Want is answered only by a version newer than what the reader has."""
    return version > have


def later_number(number: int, last: int) -> bool:
    """A Want that was seen before, or is older than one seen, opens nothing."""
    return number > last


def was_taken(arrival: str) -> bool:
    """A layout has arrived when the reader asks again after the grant that needed it, which it did not withdraw."""
    return arrival == "GRANTED"


def asked_for(number: int, open_number: int | None) -> bool:
    """A reader takes only the answer to the Want that is open: what it withdrew it never maps."""
    return number == open_number


def same_incarnation(incarnation: int, ours: int | None) -> bool:
    """Only what carries the session's incarnation is believed."""
    return incarnation == ours


def not_older(version: int, adopted: int) -> bool:
    """Versions handed to the application never go back."""
    return version >= adopted


def unneeded(segment: int, leases: Iterable[Lease]) -> bool:
    """A reader is told to forget a segment only when it has no lease on it, not even one that it does not know yet."""
    return all(lease.entry.segment != segment for lease in leases)


GUARDS: dict[str, Callable[..., bool]] = {
    guard.__name__: guard
    for guard in (
        unleased, untainted, unpinned, unreferenced, own_lease, within_held, newer, later_number,
        was_taken, asked_for, same_incarnation, not_older, unneeded,
    )
}  # fmt: skip
