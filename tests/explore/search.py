"""Breadth-first search, so that the first fault found has the shortest story."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from busync.protocol.guards import GUARDS
from tests.explore.bounds import Bound
from tests.explore.bounds import BUDGET_BITS, covers
from tests.explore.space import NAMES_OF_READERS, Space, BUDGET_MASK
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


def explore(bound: Bound, *, report: Callable[[str], None] | None = None, limit_s: float = float("inf")) -> Result:
    """Visit every state of a world, until one is at fault."""
    if bound.other:
        return explore_other(bound, report=report, limit_s=limit_s)
    space = Space(bound)
    result = Result(bound)
    began = said = time.process_time()
    start = space.start()
    seen = {start}
    level: list[tuple[int, bytes]] = [(start, b"")]
    while level:
        following: list[tuple[int, bytes]] = []
        for state, path in level:
            for i, successor in enumerate(space.successors(state)):
                result.transitions += 1
                if successor.fault:
                    result.fault, result.states = successor.fault, len(seen)
                    result.story, result.depth = tell(space, path + bytes([i])), result.depth + 1
                    result.seconds = time.process_time() - began
                    return result
                if successor.state not in seen:
                    seen.add(successor.state)
                    following.append((successor.state, path + bytes([i])))
            if report is not None and result.transitions % 64 == 0 and time.process_time() - said > 10:
                said = time.process_time()
                report(f"  {bound.name}: {len(seen):,} states, depth {result.depth}, {said - began:.0f} s")
        level = following
        result.depth += bool(level)
        result.states, result.seconds = len(seen), time.process_time() - began
        if result.seconds > limit_s:
            return result
    result.complete = True
    return result


def explore_other(
    bound: Bound, *, report: Callable[[str], None] | None = None, limit_s: float = float("inf")
) -> Result:
    space = OtherSpace(bound)
    result = Result(bound)
    began = said = time.process_time()
    start = space.start()
    seen: dict[int, list[int]] = {start >> BUDGET_BITS: [start & BUDGET_MASK]}
    level: list[tuple[int, bytes]] = [(start, b"")]
    result.states = 1
    while level:
        following: list[tuple[int, bytes]] = []
        for state, path in level:
            if state & BUDGET_MASK not in seen[state >> BUDGET_BITS]:
                continue
            for i, successor in enumerate(space.successors(state)):
                result.transitions += 1
                if successor.fault:
                    result.fault = successor.fault
                    result.story, result.depth = tell(space, path + bytes([i])), result.depth + 1
                    result.seconds = time.process_time() - began
                    return result
                new = successor.state
                core, budget = new >> BUDGET_BITS, new & BUDGET_MASK
                known = seen.get(core)
                if known is None:
                    seen[core] = [budget]
                elif any(covers(b, budget) for b in known):
                    continue
                else:
                    seen[core] = [b for b in known if not covers(budget, b)] + [budget]
                result.states += 1
                following.append((new, path + bytes([i])))
            if report is not None and result.transitions % 64 == 0 and time.process_time() - said > 10:
                said = time.process_time()
                report(f"  {bound.name}: {result.states:,} states, {len(space.publishers):,}p {len(space.sides.table):,}s depth {result.depth}, {said - began:.0f} s")
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
    GUARDS[guard] = lambda *_: True
    try:
        yield
    finally:
        GUARDS[guard] = kept
