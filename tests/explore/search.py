"""Breadth-first search, so that the first fault found has the shortest story."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from busync.protocol import guards
from busync.protocol.guards import GUARDS
from tests.explore.bounds import BUDGET_BITS, Bound, covers
from tests.explore.space import BUDGET_MASK, NAMES_OF_READERS, Space
from tests.explore.views import OtherSpace


@dataclass(slots=True)
class Result:
    """What came of exploring one world."""

    bound: Bound
    states: int = 0
    transitions: int = 0
    depth: int = 0  #: steps from the start to the farthest state
    seconds: float = 0.0  #: of processor time
    complete: bool = False
    fault: str = ""
    story: list[str] = field(default_factory=list)  #: the steps to the fault


class Seen:
    """Every state that was found, as a whole."""

    def __init__(self) -> None:
        self._states: set[int] = set()

    def add(self, state: int) -> bool:
        """Whether it is new."""
        if state in self._states:
            return False
        self._states.add(state)
        return True

    def stands(self, _state: int) -> bool:
        """Whether what comes after it is still to be looked at."""
        return True


class SeenWithMore(Seen):
    """Every state that was found but those that were found where more may still go wrong.

    Whatever can happen can also happen where the budget allows more. So the first fault to be found is as near.
    """

    def __init__(self) -> None:
        self._budgets: dict[int, list[int]] = {}

    def add(self, state: int) -> bool:
        """Whether it is new."""
        place, budget = state >> BUDGET_BITS, state & BUDGET_MASK
        known = self._budgets.get(place, [])
        if any(covers(more, budget) for more in known):
            return False
        self._budgets[place] = [less for less in known if not covers(budget, less)] + [budget]
        return True

    def stands(self, state: int) -> bool:
        """Whether none was found since where more may go wrong."""
        return state & BUDGET_MASK in self._budgets[state >> BUDGET_BITS]


def tables(bound: Bound) -> tuple[Space, Seen]:
    """What it takes to explore a world."""
    return (OtherSpace(bound), SeenWithMore()) if bound.other else (Space(bound), Seen())


def explore(bound: Bound, *, report: Callable[[str], None] | None = None, limit_s: float = float("inf")) -> Result:
    """Visit every state of a world, until one is at fault."""
    space, seen = tables(bound)
    result = Result(bound, states=1)
    began = said = time.process_time()
    start = space.start()
    seen.add(start)
    level: list[tuple[int, bytes]] = [(start, b"")]
    while level:
        following: list[tuple[int, bytes]] = []
        for state, path in level:
            if not seen.stands(state):
                continue
            for i, successor in enumerate(space.successors(state)):
                result.transitions += 1
                if successor.fault:
                    result.fault = successor.fault
                    result.story, result.depth = tell(space, path + bytes([i])), result.depth + 1
                    result.seconds = time.process_time() - began
                    return result
                if seen.add(successor.state):
                    result.states += 1
                    following.append((successor.state, path + bytes([i])))
            if report is not None and result.transitions % 64 == 0 and time.process_time() - said > 10:
                said = time.process_time()
                report(f"  {bound.name}: {result.states:,} states, depth {result.depth}, {said - began:.0f} s")
        level = following
        result.depth += bool(level)
        result.seconds = time.process_time() - began
        if result.seconds > limit_s:
            return result
    result.complete = True
    return result


def tell(space: Space, path: bytes) -> list[str]:
    """The steps of a path, and the fault at its end if there is one. Readers keep their names throughout."""
    state, names = space.start(), list(NAMES_OF_READERS)
    story = []
    for i in path:
        successor = space.successors(state)[i]
        story.append(successor.move.text.format(r=f"reader {names[successor.reader]}"))
        if successor.fault:
            named = [f"reader {name}" for name in names]
            story.append(f"FAULT: {successor.fault.format(*named)}")
            break
        state = successor.state
        if successor.swapped:
            names.reverse()
    return story


@contextmanager
def without(guard: str) -> Iterator[None]:
    """Switch a guard off."""
    kept = GUARDS[guard]
    setattr(guards, guard, lambda *_: True)
    try:
        yield
    finally:
        setattr(guards, guard, kept)
