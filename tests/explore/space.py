"""The states and their successors.

A state is a number made of five: the publisher, the two readers with their connections, the mappings that nobody will
ever report on, and what may still go wrong. Each of the first four is an entry of a table. The cores are pure: what one
does depends on its state and its input alone. So every step of the real code is run once for each pair of them, and
remembered; a state's successors are then a matter of looking up. The number holds the whole state, so that no two
states are ever taken for one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from tests.explore.bounds import BUDGET_BITS, SHIFT, Bound, calm, spend
from tests.explore.messages import Packet, Packets
from tests.explore.names import Names, mask_of, ranks
from tests.explore.publisher import SLOTS, PublisherState
from tests.explore.reader import NOT_WAITING
from tests.explore.sides import Move, SideFacts, Sides
from tests.explore.steps import Action, PublisherProcess, PublisherStep, describe_error, restart, swapped

BITS = 24
MASK, BUDGET_MASK = (1 << BITS) - 1, (1 << BUDGET_BITS) - 1
NAMES_OF_READERS = ("A", "B")
Remnant = tuple[int, int]


class Successor(NamedTuple):
    """What may come next."""

    state: int  #: -1 if the step itself shows a fault
    fault: str
    move: Move
    reader: int
    swapped: bool  #: the readers have exchanged their places in ``state``


class PublisherFacts:
    """What the invariants ask about a publisher."""

    def __init__(self, state: PublisherState, bound: Bound) -> None:
        self.pool = dict(state.pool)
        self.leases = {s.id: frozenset(name for name, _ in s.leases) for s in state.sessions}
        newest = [topic.version if topic else 0 for topic in state.topics]
        self.newest = [newest[reader % bound.topics] for reader in (0, 1)]
        self.busy = [
            {s.id % SLOTS for s in state.sessions if s.reader == reader and (s.leases or s.want)} for reader in (0, 1)
        ]
        self.digests = tuple((d.entry.segment, d.version) for d in state.digests)


class Space:
    """All tables of one world."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self.packets = Packets()
        self.sides = Sides(bound, self.packets)
        self.publishers: list[PublisherState] = []
        self.publisher_facts: list[PublisherFacts] = []
        self._publisher_numbers: dict[PublisherState, int] = {}
        self._publisher_moves: dict[int, list[Move]] = {}
        self._steps: dict[tuple[int, Action], tuple[int, PublisherStep] | str] = {}
        self._swapped: dict[int, int] = {}
        self._names = Names(
            self.packets, self.sides.table.__getitem__, self.sides.number, self.publishers.__getitem__, self._publisher
        )
        self.remnants: list[frozenset[Remnant]] = [frozenset()]
        self._remnant_masks = [0]
        self._remnant_numbers: dict[frozenset[Remnant], int] = {frozenset(): 0}

    def start(self) -> int:
        """Nobody has connected, nothing is published."""
        publisher = self._publisher(PublisherState(topics=(None,) * self.bound.topics))
        return self._state(publisher, self.sides.start, self.sides.start, 0, self.bound.budget())[0]

    # Tables

    def _publisher(self, state: PublisherState) -> int:
        number = self._publisher_numbers.get(state)
        if number is None:
            number = self._publisher_numbers[state] = len(self.publishers)
            self.publishers.append(state)
            self.publisher_facts.append(PublisherFacts(state, self.bound))
        return number

    def _publisher_step(self, number: int, action: Action) -> tuple[int, PublisherStep] | str:
        key = (number, action)
        result = self._steps.get(key)
        if result is None:
            process = PublisherProcess(self.bound, self.packets, self.publishers[number])
            try:
                getattr(process, str(action[0]))(*action[1:])
                step = process.step()
                result = (self._publisher(step.state), step)
            except Exception as error:  # also what a core does not expect is a fault
                result = describe_error(error)
            self._steps[key] = result
        return result

    def _swap(self, publisher: int) -> int:
        other = self._swapped.get(publisher)
        if other is None:
            other = self._publisher(swapped(self.publishers[publisher], self.bound))
            self._swapped[publisher], self._swapped[other] = other, publisher
        return other

    def _state(self, publisher: int, a: int, b: int, remnants: int, budget: int) -> tuple[int, bool]:
        """The number of a state and of its mirror image: the smaller one."""
        swap = a > b
        if swap:
            a, b, publisher = b, a, self._swap(publisher)
        elif a == b:
            other = self._swap(publisher)
            swap = other < publisher
            publisher = min(publisher, other)
        return self._pack(publisher, a, b, remnants, budget), swap

    @staticmethod
    def _pack(publisher: int, a: int, b: int, remnants: int, budget: int) -> int:
        return (((((publisher << BITS) | a) << BITS) | b) << BITS | remnants) << BUDGET_BITS | budget

    def parts(self, state: int) -> tuple[int, int, int, int, int]:
        """Publisher, reader A, reader B, remnants, budget."""
        budget, rest = state & BUDGET_MASK, state >> BUDGET_BITS
        return rest >> 3 * BITS, rest >> 2 * BITS & MASK, rest >> BITS & MASK, rest & MASK, budget

    def _leave(self, remnants: int, more: tuple[Remnant, ...], publisher: int) -> int:
        """Mappings that stay, as far as their segments may ever be written again."""
        if not remnants and not more:
            return 0
        pool = self.publisher_facts[publisher].pool
        kept = frozenset(r for r in self.remnants[remnants].union(more) if r[0] in pool)
        return self._remnant(kept)

    def _remnant(self, kept: frozenset[Remnant]) -> int:
        number = self._remnant_numbers.get(kept)
        if number is None:
            number = self._remnant_numbers[kept] = len(self.remnants)
            self.remnants.append(kept)
            self._remnant_masks.append(mask_of(segment for segment, _ in kept))
        return number

    # Successors

    def successors(self, state: int) -> list[Successor]:
        """Everything that may happen next."""
        publisher, a, b, remnants, budget = self.parts(state)
        found: list[Successor] = []
        calmly = self.bound.reduced and not self.bound.any_order and calm(budget)
        for reader, side in enumerate((a, b)):
            hurry = self.sides.hurry(side, calm=calmly)
            if not hurry and (end := self.sides.idle_end(side, self.publisher_facts[publisher].busy[reader])):
                hurry = [end]
            for move in hurry:
                left = spend(budget, move.cost)
                if left >= 0:
                    self._move(found, publisher, [a, b], remnants, left, move, reader)
            if hurry:
                return found
        for reader, side in enumerate((a, b)):
            for move in self.sides.calm_moves(side) if calmly else self.sides.moves(side):
                left = spend(budget, move.cost)
                if left >= 0:
                    self._move(found, publisher, [a, b], remnants, left, move, reader)
        for move in self._moves_of_publisher(publisher):
            left = spend(budget, move.cost)
            if left < 0:
                continue
            if move.action == ("crash",):
                new = self._publisher(restart(self.bound, self.publishers[publisher]))
                sides = [self.sides.publisher_dies(a), self.sides.publisher_dies(b)]
                self._add(found, new, sides, 0, left, move, 0)
            else:
                self._move(found, publisher, [a, b], remnants, left, move, 0)
        return found

    def _move(
        self, found: list[Successor], publisher: int, sides: list[int], remnants: int, budget: int, move: Move,
        reader: int,
    ) -> None:  # fmt: skip
        if move.fault:
            found.append(Successor(-1, move.fault, move, reader, False))
            return
        if move.side >= 0:
            sides[reader] = move.side
        if move.action is not None:
            action = move.action
            if move.side >= 0:  # a session is meant
                action = (action[0], SLOTS * reader + int(action[1]), *action[2:])
            result = self._publisher_step(publisher, action)
            if isinstance(result, str):
                found.append(Successor(-1, result, move, reader, False))
                return
            publisher, step = result
            if step.accused and not move.repeated:
                fault = f"an honest subscriber is accused: {step.accused}"
                found.append(Successor(-1, fault, move, reader, False))
                return
            if (step.sent or step.ended) and not self._hear(step, sides):
                return
        remnants = self._leave(remnants, move.remnants, publisher)
        self._add(found, publisher, sides, remnants, budget, move, reader)

    def _hear(self, step: PublisherStep, sides: list[int]) -> bool:
        """The readers' queues take what the publisher says; False if one would become too long."""
        sent: defaultdict[int, tuple[Packet, ...]] = defaultdict(tuple)
        for session, packet in step.sent:
            sent[session] += (packet,)
        for session in {*sent, *step.ended}:
            reader = session // SLOTS
            side = self.sides.answer(sides[reader], session % SLOTS, sent[session], session in step.ended)
            if side < 0:
                return False
            sides[reader] = side
        return True

    def _add(
        self, found: list[Successor], publisher: int, sides: list[int], remnants: int, budget: int, move: Move,
        reader: int,
    ) -> None:  # fmt: skip
        fault = self.fault(publisher, sides, remnants)
        if not fault and self.bound.reduced:
            publisher = self._names.sessions(publisher, sides)
            publisher, used = self._names.segments(publisher, sides, self._remnant_masks[remnants])
            if used >= 0 and remnants:
                rename = ranks(used)
                remnants = self._remnant(frozenset((rename(s), version) for s, version in self.remnants[remnants]))
        state, swap = self._state(publisher, sides[0], sides[1], remnants, budget)
        found.append(Successor(-1 if fault else state, fault, move, reader, swap))

    def _moves_of_publisher(self, number: int) -> list[Move]:
        moves = self._publisher_moves.get(number)
        if moves is None:
            moves = self._publisher_moves[number] = list(self._publisher_moves_of(self.publishers[number]))
        return moves

    def _publisher_moves_of(self, state: PublisherState) -> list[Move]:
        moves = []
        if all(job.phase == "straggling" for job in state.jobs) and len(state.jobs) < 2:
            for topic in range(self.bound.topics):
                about = f" on topic {NAMES_OF_READERS[topic]}" if self.bound.topics > 1 else ""
                moves.append(Move(f"a publish begins{about}", SHIFT["publishes"], action=("reserve", topic)))
        for i, job in enumerate(state.jobs):
            if job.phase == "writing":
                moves.append(Move("the publish commits", action=("commit", i)))
                text = "the publish is cancelled, but its copy goes on"
                moves.append(Move(text, SHIFT["cancels"], action=("cancel", i, 1)))
            if job.phase == "straggling":
                moves.append(Move("the copy of the cancelled publish ends", action=("straggle", i)))
            else:
                moves.append(Move("the publish is cancelled", SHIFT["cancels"], action=("cancel", i, 0)))
            if job.phase == "waiting" and not job.timed_out:
                moves.append(Move("the publish has waited for lease_timeout", action=("time_out",)))
        for digest in state.digests:
            text = f"the digest of version {digest.version} is there"
            moves.append(Move(text, action=("finish_digest", digest.topic, digest.version)))
        moves.append(Move("the publisher is killed, and starts again", SHIFT["publisher_crashes"], action=("crash",)))
        return moves

    # Invariants

    def fault(self, publisher: int, sides: list[int], remnants: int) -> str:
        """What is wrong with a state, or nothing."""
        facts = self.publisher_facts[publisher]
        pool = facts.pool
        for segment, version in (*self.remnants[remnants], *facts.digests):
            if pool.get(segment, version) != version:
                return f"segment {segment} was written while something that has no lease reads version {version} there"
        for reader, number in enumerate(sides):
            side = self.sides.facts[number]
            for segment, version in side.maps:
                if pool.get(segment, version) != version:
                    return f"segment {segment} was written while {{{reader}}} reads version {version} there"
            if side.counted:
                leases = facts.leases.get(SLOTS * reader + side.slot)
                if fault := self._fault_of_session(facts, reader, side, leases):
                    return fault
        return ""

    def _fault_of_session(
        self, facts: PublisherFacts, reader: int, side: SideFacts, leases: frozenset[int] | None
    ) -> str:
        if leases is None:
            return f"the session of {{{reader}}} was forgotten"
        if not side.mapped <= leases:
            return f"{{{reader}}} maps what it has no lease on"
        if side.ending is not None and not leases <= side.ending:
            return f"a lease of {{{reader}}} has no end"
        if side.quiet:
            if not side.attached:
                return f"{{{reader}}} does not get in"
            if leases != side.held:
                return f"{{{reader}}} and the publisher disagree about leases"
            if side.have != NOT_WAITING and side.free_hand and facts.newest[reader] > side.have:
                return f"{{{reader}}} waits for version {facts.newest[reader]} in vain"
        return ""
