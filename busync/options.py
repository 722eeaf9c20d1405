"""What a publisher and a subscriber can be told, checked once when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from busync.errors import OptionError
from busync.ids import DEFAULT_TOPIC, check_label

WhenFull = Literal["wait", "skip"]


def _check_count(option: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise OptionError(option, value, f"a whole number from {low} to {high}")


def check_seconds(option: str, value: object) -> float:
    """Return ``value`` as a number of seconds.

    Raises:
        OptionError: it is not a finite number of at least 0.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise OptionError(option, value, "a number of seconds, 0 or more")
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherOptions:
    """Options of a publisher. Frozen; checked when made.

    Raises:
        OptionError: a value is not allowed.
    """

    #: Segments per topic: the newest version, the one being written, and those that readers still use.
    max_segments: int = 4
    #: Versions that one subscriber may hold at a time: the old one while it adopts the new.
    max_held: int = 2
    #: What a publish does that finds no free segment: wait for one, or publish nothing and say so.
    when_full: WhenFull = "wait"
    #: Seconds that a publish waits for a segment before the oldest retired version is abandoned to its holders.
    lease_timeout: float = 10.0
    #: User ids besides the publisher's own that may subscribe. They get access to the endpoint's directory.
    allow_uids: frozenset[int] = frozenset()
    #: Threads that copy weights into shared memory.
    copy_threads: int = 4

    def __post_init__(self) -> None:
        _check_count("max_segments", self.max_segments, 2, 1024)
        _check_count("max_held", self.max_held, 2, 64)
        _check_count("copy_threads", self.copy_threads, 1, 64)
        if self.when_full not in ("wait", "skip"):
            raise OptionError("when_full", self.when_full, '"wait" or "skip"')
        check_seconds("lease_timeout", self.lease_timeout)
        for uid in self.allow_uids:
            _check_count("allow_uids", uid, 0, 2**32 - 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberOptions:
    """Options of a subscriber. Frozen; checked when made.

    Raises:
        OptionError: a value is not allowed.
    """

    topic: str = DEFAULT_TOPIC
    #: How the publisher's reports call this subscriber. Need not be unique.
    name: str = ""
    #: Seconds to wait for a publisher at first. Once attached, a subscriber reconnects for ever.
    connect_timeout: float = 10.0
    #: Keep one request standing, so that the next version is already here when it is asked for.
    prefetch: bool = False

    def __post_init__(self) -> None:
        check_label("topic", self.topic)
        check_label("name", self.name, empty=True)
        check_seconds("connect_timeout", self.connect_timeout)
        if type(self.prefetch) is not bool:
            raise OptionError("prefetch", self.prefetch, "True or False")
