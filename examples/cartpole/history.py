"""What happened during a run: for the display, the picture and the last line."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

EPISODES = 20  #: over so many the return is averaged


@dataclass(slots=True)
class History:
    """Times are seconds since the start."""

    version: int = 0
    steps: int = 0  #: that went into training
    episodes: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=EPISODES))  #: returns
    returns: list[tuple[float, float]] = field(default_factory=list)  #: mean of the recent ones
    lags: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  #: actor by actor
    latencies: list[tuple[float, float]] = field(default_factory=list)  #: seconds from publish to loaded
    calls: list[float] = field(default_factory=list)  #: seconds that the learner spent in publish
    ages: list[int] = field(default_factory=list)  #: versions between a batch and the learner that took it
    events: list[tuple[float, str]] = field(default_factory=list)

    @property
    def mean_return(self) -> float:
        """Of the recent episodes; 0 before there were enough."""
        return fmean(self.recent) if len(self.recent) == EPISODES else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie (nearest rank); 0 if there are none."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


def middle(values: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return median(values) if values else 0.0
