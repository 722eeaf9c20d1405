"""The states of a world with any other reader, and their successors.

Reader A is followed for one session after another, in full; everybody else is what ``other`` says. When a session ends
at its reader, there are two things to see to. Neither needs the other, so they are two states:

* The process goes on, with what a subscriber keeps over the end of a session, or starts again. What it had at the
  publisher is another reader's now: leases that end by their reader's word or without it, at any moment.
* What it has left behind: messages under way, leases, and mappings that stay for ever. Whatever its process does from
  now on, others do. This ends when nothing is under way and no such mapping is in the pool any more.

So nothing counts how many sessions and processes there have been, and it need not be limited how often a session is
lost, a reader is killed, or the publisher: each may happen any number of times. A new publisher calls itself 1 again,
and whoever remembers an earlier one remembers it as ``OVER``.

What makes this sound is the order of time. Take any run of any number of readers with any of these faults, and in it
the first state with something wrong. It is about one session, or about what one session or its forked child has left
mapped, or about the publisher's books, which are in every view. Before it, nobody had mapped what the publisher did not
know of, and the publisher had sent no reader away unless it had repeated itself: then its session is lost like others.
So what everybody but that session and its reader did to the publisher is among what others do here, and this world has
the same run as that reader sees it. Its last state shows the same.
"""

from __future__ import annotations

from busync.protocol.ledger import State
from tests.explore.bounds import EACH, SHIFT, Bound, spend
from tests.explore.other import acts
from tests.explore.publisher import GONE, OtherState, PublisherState
from tests.explore.sides import Move
from tests.explore.space import Remnant, Space, Successor
from tests.explore.steps import PublisherProcess

UNLIMITED = frozenset(SHIFT[kind] for kind in ("publisher_crashes", "reader_crashes", "lost_sessions"))
OF_PUBLISHER = sum(EACH << SHIFT[kind] for kind in ("publishes", "cancels"))


class Watched:
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
        self._watched: dict[int, Watched] = {}
        self._absorbed: dict[int, int] = {}
        self._unheard: dict[int, int] = {}
        self._restarted = self._publisher(PublisherState(topics=(None,) * bound.topics))

    def _state(self, publisher: int, a: int, b: int, remnants: int, budget: int) -> tuple[int, bool]:
        return self._pack(publisher, a, b, remnants, budget), False  # they are not to be exchanged

    # Successors

    def successors(self, state: int) -> list[Successor]:
        """Everything that may happen next."""
        publisher, side, nobody, remnants, budget = self.parts(state)
        found: list[Successor] = []
        for move in (*self.sides.moves(side), *self._moves_of_publisher(publisher)):
            left = budget if move.cost in UNLIMITED and budget >> move.cost & EACH else spend(budget, move.cost)
            if left < 0:
                continue
            if move.action == ("crash",):
                sides = [self.sides.publisher_dies(side), nobody]
                self._add(found, self._restarted, sides, 0, left, move, 0)
            else:
                self._move(found, publisher, [side, nobody], remnants, left, move, 0)
        return found

    def _publisher_moves_of(self, state: PublisherState) -> list[Move]:
        moves = super()._publisher_moves_of(state)
        for act in acts(state, digests=self.bound.digests):
            moves.append(Move(act.text, remnants=act.left, action=(act.method, act.argument)))
        return moves

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
        side = self.sides.table[sides[0]]
        if side.gone:
            if not remnants and not side.old:
                return
            publisher, budget = self._unhear(publisher), budget & OF_PUBLISHER
        super()._add(found, publisher, sides, remnants, budget, move, reader)

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
        watched = self._watched.get(publisher)
        if watched is None:
            watched = self._watched[publisher] = Watched(self.publishers[publisher])
        pool = self.publisher_facts[publisher].pool
        for segment, version in watched.others:
            if pool.get(segment, version) != version:
                return f"segment {segment} was written while another reader may read version {version} there"
        if fault := super().fault(publisher, sides, remnants):
            return fault
        mapped = (*self.sides.facts[sides[0]].maps, *self.remnants[remnants])
        if mapped and not watched.covered.issuperset(where for where in mapped if where[0] in pool):
            return "{0} maps, or has left mapped, what it has no lease on, and the publisher does not know"
        return ""
