"""What one sees while it runs: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from examples.cartpole.crew import Member
from examples.cartpole.history import History, middle

INTERVAL = 2.0  #: seconds between plain lines
RECENT = 40  #: latencies that the display averages over


class Screen:
    """Shows a run. ``show`` may be called as often as one likes."""

    def __init__(self, bus: str) -> None:
        self._bus = bus
        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=8) if self._console.is_terminal else None
        self._next_at = 0.0
        self._last_event = ""

    def __enter__(self) -> Self:
        (self._live or nullcontext()).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Something has happened."""
        self._last_event = text
        if self._live is None:
            self._console.print(text, highlight=False, soft_wrap=True)

    def show(self, history: History, members: Iterable[Member], lags: dict[str, int]) -> None:
        """How things stand."""
        if self._live is not None:
            self._live.update(self._table(history, members, lags))
        elif time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + INTERVAL
            lag = " ".join(f"{name}:{lags.get(name, '-')}" for name in (member.name for member in members))
            self._console.print(f"  {self._headline(history)} | lag {lag}", highlight=False, soft_wrap=True)

    def _headline(self, history: History) -> str:
        latency = middle([seconds for _, seconds in history.latencies[-RECENT:]])
        return (
            f"version {history.version}, return {history.mean_return:.0f}, {history.steps} steps, "
            f"{history.episodes} episodes, publish to loaded {latency * 1000:.1f} ms"
        )

    def _table(self, history: History, members: Iterable[Member], lags: dict[str, int]) -> Table:
        table = Table(title=f"{self._bus}: {self._headline(history)}", title_justify="left", caption=self._last_event)
        for column in ("actor", "pid", "version", "lag", "publish to loaded", "batches"):
            table.add_column(column, justify="left" if column == "actor" else "right")
        for member in members:
            table.add_row(
                member.name, str(member.process.pid), str(member.version), str(lags.get(member.name, "-")),
                f"{member.latency * 1000:.1f} ms", str(member.batches),
            )  # fmt: skip
        return table
