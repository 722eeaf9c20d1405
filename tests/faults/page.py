"""What a child counts, in a shared page: it survives the child's death, and costs no message."""

from __future__ import annotations

import mmap
from enum import IntEnum, auto

#: Every kind of fault. The counters of a page follow this order.
KINDS = (
    "publisher: SIGKILL",
    "publisher: SIGKILL inside a step",
    "publisher: SIGSTOP, SIGCONT",
    "publisher: SIGSTOP inside a step, SIGCONT",
    "publisher: fork",
    "publisher: fork inside a step",
    "publisher: exit",
    "publisher: exit inside a step",
    "publisher: descriptors exhausted",
    "publisher: reserve fails",
    "publisher: await cancelled",
    "publisher: call interrupted by a signal",
    "subscriber: SIGKILL",
    "subscriber: SIGKILL inside a step",
    "subscriber: SIGSTOP, SIGCONT",
    "subscriber: SIGSTOP inside a step, SIGCONT",
    "subscriber: fork",
    "subscriber: fork inside a step",
    "subscriber: exit",
    "subscriber: exit inside a step",
    "subscriber: descriptors exhausted",
    "subscriber: await cancelled",
    "subscriber: call interrupted by a signal",
    "subscriber: bus not read",
    "subscriber: door not read",
    "endpoint: directory deleted",
    "endpoint: directory replaced",
    "endpoint: directory unreadable",
    "endpoint: lock and sockets removed",
)


class Slot(IntEnum):
    """The numbers of a page. Times are monotonic nanoseconds."""

    OP = auto()  #: index of the operation in ``child.OPS``
    SINCE = auto()  #: when the operation began; 0 between operations
    STOPS = auto()  #: how often the process was stopped
    ASLEEP = auto()  #: it has stopped itself and waits for SIGCONT
    FAULTY = auto()  #: when the endpoint's directory was last found in order again; -1 while it is not
    OPENED = auto()  #: how often it was attached, or served
    ADOPTED = auto()
    ELEMENTS = auto()
    WRONG = auto()
    PUBLISHED = auto()
    SLOWEST_PUBLISH = auto()  #: without waiting for acks; publishes during which the process was stopped do not count
    SLOWEST_WAIT = auto()  #: for a segment
    OVER_LEASE = auto()  #: the most that a publish took beyond its lease_timeout
    SLOWEST_OP = auto()
    SLOWEST_OP_NAME = auto()
    CALM = auto()  #: traps do nothing any more
    FULL = auto()  #: how often the publisher ended a session that did not read
    FAULTS = 40  #: the first counter of KINDS


class Page:
    """One child's numbers. Made before the fork."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._numbers = memoryview(self._memory).cast("q")

    def __getitem__(self, slot: int) -> int:
        return int(self._numbers[slot])

    def __setitem__(self, slot: int, value: int) -> None:
        self._numbers[slot] = value

    def add(self, slot: int, value: int = 1) -> None:
        self._numbers[slot] += value

    def most(self, slot: int, value: int) -> bool:
        """Keep the larger one; whether that is the new one."""
        if value <= self._numbers[slot]:
            return False
        self._numbers[slot] = value
        return True

    def fault(self, kind: str) -> None:
        """Count a fault step."""
        self._numbers[Slot.FAULTS + KINDS.index(kind)] += 1

    def faults(self) -> dict[str, int]:
        return {kind: self[Slot.FAULTS + index] for index, kind in enumerate(KINDS) if self[Slot.FAULTS + index]}

    def close(self) -> None:
        self._numbers.release()
        self._memory.close()
