"""Waiting for acknowledgements and releases, and what the report says when the wait is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from busync.ids import SessionId, Version
from busync.protocol.effects import WaitDone

WaitFor = Literal["acked", "released"]


@dataclass(slots=True, eq=False)
class Wait:
    """One wait for a version of a topic.

    It is over when ``need`` sessions have reported, or, if ``need`` is None, when nobody is pending. A session that
    ends or says Nack is no longer pending.
    """

    id: int
    topic: str
    version: Version
    what: WaitFor
    need: int | None  #: None: everybody in ``pending`` at the start; a number: later joiners count too
    pending: dict[SessionId, str]
    deadline_at: float
    acked: dict[SessionId, str] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)  #: name and reason

    @property
    def over(self) -> bool:
        """Whether there is nothing left to wait for."""
        return not self.pending if self.need is None else len(self.acked) >= self.need

    def report(self, session: SessionId, name: str) -> None:
        """The session did what is waited for."""
        if self.pending.pop(session, None) is not None or self.need is not None:
            self.acked[session] = name

    def lose(self, session: SessionId) -> None:
        """The session ended."""
        name = self.pending.pop(session, None)
        if name is not None:
            self.gone.append(name)

    def fail(self, session: SessionId, reason: str) -> None:
        """The session said that it cannot use the version."""
        name = self.pending.pop(session, None)
        if name is not None:
            self.failed.append((name, reason))

    def done(self) -> WaitDone:
        """The report."""
        return WaitDone(
            self.id, tuple(self.acked.values()), tuple(self.pending.values()), tuple(self.gone), tuple(self.failed)
        )
