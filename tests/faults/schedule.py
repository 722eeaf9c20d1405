"""What happens to whom and when: a pure function of the seed. When a fault strikes is up to the kernel; see stage."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.faults import points
from tests.faults.points import Trap

FLAVOURS = ("asyncio", "uvloop", "blocking")
STEPS_PER_ROUND = 120

#: Kinds of steps and how often each comes up. Those of the second group are done by the children themselves.
WEIGHTS: dict[str, float] = {
    "kill reader": 5, "kill writer": 2, "trap reader": 10, "trap writer": 5,
    "stop reader": 7, "stop writer": 4, "directory": 3, "rude": 1.5,
    "fork reader": 6, "fork writer": 3, "exit reader": 3, "exit writer": 1.5,
    "starve reader": 6, "starve writer": 5, "reserve": 8,
    "cancel reader": 12, "cancel writer": 12,
}  # fmt: skip
EXITS = ("os._exit", "end", "end in a step", "SIGTERM")
DIRECTORY = ("deleted", "replaced by a file", "replaced by a link", "replaced by a stranger", "unreadable", "unlocked")


@dataclass(frozen=True, slots=True)
class Step:
    """One fault step."""

    delay: float  #: seconds after the step before
    kind: str
    target: int  #: which child of that side, modulo how many there are
    seed: int
    detail: str = ""
    seconds: float = 0.0  #: how long it lasts, where it lasts
    trap: Trap | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One round: a cast and what happens to it."""

    seed: int
    number: int
    topics: tuple[str, ...]
    readers: int
    options: dict[str, Any]  #: of the publisher
    unprivileged: bool  #: children run as another user than the one who breaks their directory
    steps: tuple[Step, ...]

    def child(self, count: int) -> random.Random:
        """The dice of the round's child with that number."""
        return random.Random(f"{self.seed}/{self.number}/child/{count}")


def make_round(seed: int, number: int, steps: int = STEPS_PER_ROUND) -> Round:
    """Round ``number`` of a seed."""
    rng = random.Random(f"{seed}/{number}")
    options = {
        "max_segments": rng.choice([2, 3, 4]),
        "max_held": rng.choice([2, 2, 3]),
        "lease_timeout": rng.choice([0.1, 0.2, 0.4]),
        "when_full": rng.choice(["wait", "wait", "wait", "skip"]),
        "copy_threads": rng.choice([1, 2, 4]),
    }
    kinds = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=steps)
    return Round(
        seed, number, tuple(f"t{i}" for i in range(rng.choice([1, 2, 3]))), rng.choice([2, 3, 4]), options,
        rng.random() < 0.5, tuple(_step(kind, rng) for kind in kinds),
    )  # fmt: skip


def _step(kind: str, rng: random.Random) -> Step:
    delay = rng.choice([0.0, rng.uniform(0, 0.01), rng.uniform(0, 0.05), rng.uniform(0, 0.1)])
    target, seed = rng.randrange(12), rng.randrange(1 << 30)
    detail, seconds, trap = "", 0.0, None
    what, _, side = kind.partition(" ")
    if what == "trap":
        trap = make_trap(side, rng)
    elif what == "stop":
        seconds = rng.choice([0.0, 0.01, 0.05, 0.1, 0.6])
    elif what == "exit":
        detail = rng.choice(EXITS)
    elif what == "directory":
        detail, seconds = rng.choice(DIRECTORY), rng.uniform(0.01, 0.3)
    elif what == "rude":
        detail = rng.choice(["bus", "door"])
    return Step(delay, kind, target, seed, detail, seconds, trap)


def make_trap(side: str, rng: random.Random) -> Trap:
    """A fault inside a step of a writer or a reader."""
    point = rng.choice(points.PUBLISHER if side == "writer" else points.SUBSCRIBER)
    actions = [a for a in points.ACTIONS if a != "fork" or point not in points.NO_FORK_INSIDE]
    return Trap(point, rng.choice(actions), rng.choice([1, 1, 1, 2, 3, 5, 10]), rng.random() < 0.5)
