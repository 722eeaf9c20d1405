"""How far a world is explored: what there is in it, and how often each thing may go wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any, Final

#: What is limited, and how often it may happen in one run (0 to 7 each). A state carries what is left, three bits each.
KINDS: Final = (
    "publishes", "cancels", "withdrawals",
    "publisher_crashes", "reader_crashes", "forks", "lost_sessions", "repeats", "swaps",
)  # fmt: skip
SHIFT: Final = {kind: 3 * i for i, kind in enumerate(KINDS)}
FAULTS: Final = KINDS[3:]
FIRST_FAULT: Final = SHIFT[FAULTS[0]]
EACH: Final = 7  #: the mask of three bits
ALL_FAULTS: Final = 3 * len(KINDS)  #: the shift of how many faults may come in all, three bits
BUDGET_BITS: Final = ALL_FAULTS + 3
FREE: Final = -1  #: the shift of a step that costs nothing


def spend(budget: int, shift: int) -> int:
    """What is left after a step; -1 if the budget does not allow it."""
    if shift == FREE:
        return budget
    if not budget >> shift & EACH:
        return -1
    budget -= 1 << shift
    if shift >= FIRST_FAULT:
        budget -= 1 << ALL_FAULTS
        if not budget >> ALL_FAULTS:
            budget &= (1 << FIRST_FAULT) - 1
    return budget


@cache
def covers(more: int, less: int) -> bool:
    """Whether everything that the second budget allows, the first one does."""
    if more >> ALL_FAULTS < less >> ALL_FAULTS:
        return False
    return all(more >> shift & EACH >= less >> shift & EACH for shift in SHIFT.values())


def calm(budget: int) -> bool:
    """Whether nothing but publishes, perhaps cancelled, and what readers do by themselves can come."""
    return not budget >> SHIFT["withdrawals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One world. Every interleaving of what it allows is explored."""

    name: str
    topics: int = 1  #: with two, reader A reads the first and reader B the second
    max_segments: int = 3  #: per topic
    max_held: int = 2
    publishes: int = 3  #: begun, over all topics and incarnations
    publisher_crashes: int = 0  #: each followed by a new incarnation
    reader_crashes: int = 0  #: SIGKILL; the mappings live on for ever, and a new process takes its place
    forks: int = 0  #: each child keeps for ever what it inherits
    lost_sessions: int = 0  #: noticed by either side first, or by both at once
    repeats: int = 0  #: one packet is delivered twice
    swaps: int = 0  #: one message overtakes what is ahead of it on the other channel of its session
    faults: int = 6  #: of the six before, in all
    withdrawals: int = 0  #: a reader stops waiting
    cancels: int = 0  #: a publish is cancelled, perhaps while its copy still runs
    in_flight: int = 3  #: messages in one direction of one session
    layouts: int = 1  #: 2: see ``reader.layout_of``
    reduced: bool = True  #: leave out interleavings that make no difference; see ``Sides.hurry``
    digests: bool = False  #: readers ask for content digests
    any_order: bool = False  #: messages of the two channels overtake each other without limit
    acks: bool = False  #: readers acknowledge what they adopt
    copies: bool = False  #: readers copy what they adopt, and say so with their next Want
    #: Instead of reader B there is any other reader: see ``other`` and ``views``. What others hold is taken apart into
    #: sessions of one version each. That makes no difference as long as nobody is overdue when a publish has to wait:
    #: the first that waits is the last here.
    other: bool = False

    def __post_init__(self) -> None:
        if self.other:
            assert self.publishes <= self.max_segments + 1, "it would matter who is overdue"
            assert self.faults == len(FAULTS) > self.forks + self.repeats + self.swaps, (
                "each fault by itself is limited"
            )

    def budget(self) -> int:
        """What may happen, packed."""
        left = {kind: int(getattr(self, kind)) for kind in KINDS}
        if not self.faults:
            left |= dict.fromkeys(FAULTS, 0)
        faults = min(self.faults, sum(left[kind] for kind in FAULTS))
        return sum(n << SHIFT[kind] for kind, n in left.items()) + (faults << ALL_FAULTS)


EVERY_FAULT: Final = {
    "publisher_crashes": 1, "reader_crashes": 1, "forks": 1, "lost_sessions": 1, "repeats": 1, "swaps": 1,
}  # fmt: skip


def world(name: str, **limits: Any) -> Bound:
    """A world of that name with each fault once, ``faults`` of them in all."""
    return Bound(name=name, **(EVERY_FAULT | limits))


def pair(a: str, b: str) -> Bound:
    """A world where two faults may come, once each."""
    limits: dict[str, Any] = {a: 1, b: 1}
    return Bound(name=f"{a} + {b}", publishes=2, **limits)


def with_other(bound: Bound) -> Bound:
    """The same world with any other reader, where each fault is limited by itself."""
    return replace(bound, name=f"{bound.name}, any other reader", faults=len(FAULTS), other=True)


#: What ``make test`` explores.
SMALL: Final = (
    Bound(name="three versions"),
    Bound(name="two topics", topics=2, max_segments=2),
    Bound(name="cancelled publishes", max_segments=2, cancels=1),
    Bound(name="layouts and acks", publishes=2, layouts=2, acks=True),
    Bound(name="copies", publishes=2, copies=True),
    Bound(name="digests", publishes=2, digests=True),
    Bound(name="withdrawals", publishes=2, withdrawals=1),
    Bound(name="any order", publishes=2, any_order=True),
    Bound(name="fork, repetition or swap", publishes=2, faults=1, forks=1, repeats=1, swaps=1),
    world("any one fault", publishes=1, faults=1),
    world("any other reader, two versions", publishes=2, other=True),
)

#: What ``make explore`` explores besides.
FULL: Final = (
    world("three segments", faults=1),
    world("two segments", max_segments=2, faults=1),
    world("two topics with faults", topics=2, max_segments=2, faults=1),
    Bound(name="digests of three versions", digests=True),
    Bound(name="three versions withdrawn", withdrawals=1),
    Bound(name="three versions in any order", any_order=True),
    *(pair(a, b) for a, b in combinations(EVERY_FAULT, 2)),
    Bound(name="forks + repeats + swaps", publishes=2, forks=1, repeats=1, swaps=1),
    world("any three faults", publishes=1, faults=3),
    world("any other reader", other=True),
    world("any other reader, two segments", max_segments=2, other=True),
    world("any other reader, two topics", topics=2, max_segments=2, other=True),
    world("any other reader, withdrawn and cancelled", max_segments=2, withdrawals=1, cancels=1, other=True),
    world("any other reader, any order", max_segments=2, any_order=True, swaps=0, other=True),
    world("any other reader, layouts and acks", publishes=2, max_segments=2, layouts=2, acks=True, other=True),
    world("any other reader, two layouts", max_segments=2, layouts=2, other=True),
    world("any other reader, copies", max_segments=2, copies=True, other=True),
    world("any other reader, digests", publishes=2, max_segments=2, digests=True, other=True),
)

#: Where switching off a guard shows: the smallest world with what it takes. Nothing is left out there, so that the
#: story is a shortest one.
GUARD_WORLDS: Final = {
    "unleased": Bound(name="unleased", max_segments=2, reduced=False),
    "untainted": Bound(name="untainted", max_segments=2, reader_crashes=1, reduced=False),
    "unpinned": Bound(name="unpinned", max_segments=2, digests=True, reduced=False),
    "unreferenced": Bound(name="unreferenced", publishes=2, cancels=1, reduced=False),
    "within_held": Bound(name="within_held", reduced=False),
    "newer": Bound(name="newer", publishes=1, reduced=False),
    "later_number": Bound(name="later_number", publishes=2, repeats=1, reduced=False),
    "asked_for": Bound(name="asked_for", publishes=1, withdrawals=1, reduced=False),
    "was_taken": Bound(name="was_taken", publishes=1, withdrawals=1, swaps=1, reduced=False),
    "unneeded": Bound(name="unneeded", publishes=2, forks=1, swaps=1, reduced=False),
}

#: Guards against what does not happen in these worlds. ``tests/protocol/test_guards.py`` tells a story of each.
NOT_REACHED: Final = {
    "own_lease": "leases of all sessions have different numbers, and an honest reader names only its own",
    "same_incarnation": "a session has one incarnation, and nothing of an ended session arrives in a later one",
    "not_older": "a publisher grants the newest version only, and answers a Want once",
}
