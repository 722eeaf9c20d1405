"""The states of a world with any other reader, and their successors.

Reader A is followed for one session after another. When a session ends there are two things to see to, and neither
needs the other, so they are states of their own:

* The process goes on, with what a subscriber keeps over the end of a session. What it left at the publisher is another
  reader's: leases that end by their reader's word, or without it.
* What it left: messages under way, leases, and mappings that stay for ever. The process is another reader now, and
  whatever it does later others do. This goes on until no such mapping is in the pool any more.

A process that was killed starts again as one that never was, and as long as reader A has not connected others do all
there is to do. So a kill leads to the second of these alone. And as what goes wrong with sessions and processes leaves
nothing to be counted, it may happen any number of times; the same goes for the publisher's end.

When the publisher has ended a session, or has ended itself, nothing that it does reaches the reader, and nothing that
the reader says is heard. What the reader still does is taken at once: who maps something early and keeps it is seen to
read it at every later moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from busync.protocol.ledger import State
from tests.explore.bounds import FREE, SHIFT, Bound, calm, spend
from tests.explore.other import acts
from tests.explore.publisher import GONE, OtherState, PublisherState
from tests.explore.reader import NOT_WAITING
from tests.explore.sides import Move, Remnants, Side
from tests.explore.space import Remnant, Space, Successor
from tests.explore.steps import PublisherProcess

DEAD_INCARNATION = 99  #: every incarnation that is over: none comes again
UNLIMITED = frozenset(SHIFT[kind] for kind in ("publisher_crashes", "reader_crashes", "lost_sessions"))
OF_PUBLISHER = sum(3 << SHIFT[kind] for kind in ("publishes", "cancels"))


class Outcome(NamedTuple):
    """How a session that the publisher does not know any more may end for its reader."""

    fault: str
    again: int  #: the side that goes on
    left: Remnants  #: what it has mapped
    budget: int
    text: str


class View:
    """What the invariants of these worlds ask about a publisher besides."""

    def __init__(self, state: PublisherState) -> None:
        entries = [e for topic in state.topics if topic for e in topic.entries if e.version]
        newest = {(e.segment, e.version) for e in entries if e.state is State.PUBLISHED}
        tainted = {(e.segment, e.version) for e in entries if e.tainted}
        held = {(place.segment, place.version) for s in state.sessions for _, place in s.leases}
        #: what any other reader may map
        self.others: frozenset[Remnant] = frozenset({(o.entry.segment, o.entry.version) for o in state.others} | newest)
        #: what reader A may map, or have left: that on which it has a lease, and what is tainted
        self.covered: frozenset[Remnant] = frozenset(tainted | held)


class OtherSpace(Space):
    """All tables of one world with any other reader. The second reader of a state never connects."""

    def __init__(self, bound: Bound) -> None:
        super().__init__(bound)
        self._views: dict[int, View] = {}
        self._outcomes: dict[tuple[int, int], list[Outcome]] = {}
        self._absorbed: dict[int, int] = {}
        self._unheard: dict[int, int] = {}
        self._outlived: dict[int, int] = {}
        self._restarted = self._publisher(PublisherState(topics=(None,) * bound.topics))

    def _state(self, publisher: int, a: int, b: int, remnants: int, budget: int) -> tuple[int, bool]:
        return self._pack(publisher, a, b, remnants, budget), False

    # Successors

    def successors(self, state: int) -> list[Successor]:
        """Everything that may happen next."""
        publisher, side, nobody, remnants, budget = self.parts(state)
        found: list[Successor] = []
        calmly = self.bound.reduced and not self.bound.any_order and calm(budget)
        moves = self.sides.hurry(side, calm=calmly)
        if not moves and (end := self.sides.idle_end(side, self.publisher_facts[publisher].busy[0])):
            moves = [end]
        if not moves:
            moves = self.sides.calm_moves(side) if calmly else self.sides.moves(side)
            moves = [*moves, *self._moves_of_publisher(publisher)]
        for move in moves:
            left = budget if move.cost in UNLIMITED and budget >> move.cost & 3 else spend(budget, move.cost)
            if left < 0:
                continue
            if move.action == ("crash",):
                self._crash(found, side, nobody, left, move)
            else:
                self._move(found, publisher, [side, nobody], remnants, left, move, 0)
        return found

    def _publisher_moves_of(self, state: PublisherState) -> list[Move]:
        moves = super()._publisher_moves_of(state)
        for act in acts(state, reduced=self.bound.reduced, digests=self.bound.digests):
            moves.append(Move(act.text, remnants=act.left, action=(act.method, act.argument)))
        return moves

    def _crash(self, found: list[Successor], side: int, nobody: int, budget: int, move: Move) -> None:
        """The publisher is killed: what reader A still gets, it gets before it finds the next one."""
        side = self.sides.publisher_dies(side)
        for outcome in self._ends(side, budget):
            if outcome.fault:
                found.append(Successor(-1, outcome.fault, replace(move, text=move.text + outcome.text), 0, False))
                continue
            sides = [self._outlive(outcome.again), nobody]
            self._add(found, self._restarted, sides, 0, outcome.budget, move, 0)

    def _move(
        self, found: list[Successor], publisher: int, sides: list[int], remnants: int, budget: int, move: Move,
        reader: int,
    ) -> None:  # fmt: skip
        super()._move(found, publisher, sides, remnants, budget, move, reader)
        if move.again >= 0:
            self._add(found, self._absorb(publisher), [move.again, sides[1]], 0, budget, move, reader)

    def _add(
        self, found: list[Successor], publisher: int, sides: list[int], remnants: int, budget: int, move: Move,
        reader: int,
    ) -> None:  # fmt: skip
        side = self.sides.facts[sides[0]]
        if side.link is not None and not side.counted:
            self._add_ends(found, publisher, sides, remnants, budget, move)
            return
        if self.sides.table[sides[0]].gone:
            if not remnants:
                return
            publisher, budget = self._unhear(publisher), budget & OF_PUBLISHER
        super()._add(found, publisher, sides, remnants, budget, move, reader)

    def _add_ends(
        self, found: list[Successor], publisher: int, sides: list[int], remnants: int, budget: int, move: Move
    ) -> None:
        """The publisher has ended the session: what reader A still gets and does, it does at once."""
        if fault := self.fault(publisher, sides, remnants):
            found.append(Successor(-1, fault, move, 0, False))
            return
        for outcome in self._ends(sides[0], budget):
            then = replace(move, text=move.text + outcome.text)
            if outcome.fault:
                found.append(Successor(-1, outcome.fault, then, 0, False))
                continue
            left = self._leave(remnants, outcome.left, publisher)
            self._add(found, publisher, [self.gone, sides[1]], left, outcome.budget, then, 0)
            self._add(found, publisher, [outcome.again, sides[1]], 0, outcome.budget, then, 0)

    # The ends of sessions

    @cached_property
    def gone(self) -> int:
        """A reader that will not come again."""
        return self.sides.number(Side(gone=True))

    def _ends(self, number: int, budget: int) -> list[Outcome]:
        """How a session ends for its reader that the publisher does not know any more."""
        key = (number, budget)
        outcomes = self._outcomes.get(key)
        if outcomes is None:
            outcomes = self._outcomes[key] = list(self._find_ends(number, budget))
        return outcomes

    def _find_ends(self, number: int, budget: int) -> Iterator[Outcome]:
        if self.sides.table[number].link is None:
            yield Outcome("", number, (), budget, "")
            return
        seen: set[tuple[int, int, int]] = set()
        after = [(number, budget, "")]
        for number, budget, text in after:  # noqa: B020, PLR1704
            for move in self.sides.late_moves(number):
                left = spend(budget, move.cost)
                then = f"{text}; {move.text}"
                if left >= 0 and move.fault:
                    yield Outcome(move.fault, -1, (), left, then)
                elif left >= 0 and (move.side, left, move.again) not in seen:
                    seen.add((move.side, left, move.again))
                    if move.again >= 0:
                        yield Outcome("", move.again, move.remnants, left, then)
                    else:
                        after.append((move.side, left, then))

    def _outlive(self, number: int) -> int:
        """The side of a reader whose publisher is dead: the next one is another incarnation."""
        other = self._outlived.get(number)
        if other is None:
            side = self.sides.table[number]
            reader = side.reader
            if reader.incarnation:
                reader = reader._replace(incarnation=DEAD_INCARNATION)
            if reader.last[0]:
                reader = reader._replace(last=(DEAD_INCARNATION, reader.last[1]))
            other = self._outlived[number] = self.sides.number(side._replace(reader=reader))
        return other

    def _absorb(self, publisher: int) -> int:
        """What reader A had at the publisher is another reader's."""
        absorbed = self._absorbed.get(publisher)
        if absorbed is None:
            state = self.publishers[publisher]
            leases = [OtherState(0, place) for s in state.sessions for _, place in s.leases]
            digests = tuple(d._replace(readers=tuple(GONE for _ in d.readers)) for d in state.digests)
            state = state._replace(sessions=(), others=tuple(sorted((*state.others, *leases))), digests=digests)
            absorbed = self._publisher(PublisherProcess(self.bound, self.packets, state).step().state)
            self._absorbed[publisher] = absorbed
        return absorbed

    def _unhear(self, publisher: int) -> int:
        """Nobody listens to what the publisher says to reader A, so it makes no difference what it has said."""
        unheard = self._unheard.get(publisher)
        if unheard is None:
            state = self.publishers[publisher]
            sessions = tuple(s._replace(pushed=(), layout=-1) for s in state.sessions)
            unheard = self._unheard[publisher] = self._publisher(state._replace(sessions=sessions))
        return unheard

    # Invariants

    def fault(self, publisher: int, sides: list[int], remnants: int) -> str:
        """What is wrong with a state, or nothing."""
        view = self._views.get(publisher)
        if view is None:
            view = self._views[publisher] = View(self.publishers[publisher])
        pool = self.publisher_facts[publisher].pool
        for segment, version in view.others:
            if pool.get(segment, version) != version:
                return f"segment {segment} was written while another reader may read version {version} there"
        if fault := super().fault(publisher, sides, remnants):
            return fault
        mapped = (*self.sides.facts[sides[0]].maps, *self.remnants[remnants])
        if mapped and not view.covered.issuperset(where for where in mapped if where[0] in pool):
            return "{0} maps what it has no lease on, or has left it so, and the publisher does not know"
        return ""
