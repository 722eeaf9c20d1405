"""Waiting for acknowledgements and releases, and what the report says when the wait is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from busync.ids import SessionId, Version
from busync.protocol.effects import WaitDone
from busync.protocol.topics import Session, Topic

WaitFor = Literal["acked", "released"]


@dataclass(slots=True, eq=False)
class Wait:
    """One wait for a version of a topic.

    It is over when ``need`` sessions have reported, or, if ``need`` is None, when nobody is pending. A session that
    ends or says Nack is no longer pending.
    """

    id: int
    topic: Topic
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


class Waits:
    """Every wait of a publisher. ``answer`` is called with the report of each that is over, in the order they end."""

    def __init__(self, answer: Callable[[WaitDone], None]) -> None:
        self._waits: dict[int, Wait] = {}
        self._answer = answer

    def add(self, wait: Wait) -> None:
        """Begin a wait; it may be over at once."""
        self._waits[wait.id] = wait
        for session_id in [s for s in wait.pending if s not in wait.topic.sessions]:
            wait.lose(session_id)
        for session in wait.topic.sessions.values():
            if wait.what == "acked" and session.acked < wait.version <= session.failed:
                wait.fail(session.id, session.reason)
        self._look(wait, wait.topic.sessions.values())

    def cancel(self, wait_id: int) -> None:
        """Nobody waits any more."""
        self._waits.pop(wait_id, None)

    def deadline(self) -> float | None:
        """When the first of them ends at the latest."""
        return min([wait.deadline_at for wait in self._waits.values()], default=None)

    def expire(self, now: float) -> None:
        """End the waits whose time is up."""
        for wait in [wait for wait in self._waits.values() if wait.deadline_at <= now]:
            self._end(wait)

    def progress(self, session: Session) -> None:
        """A session has acknowledged, or let go of, a version."""
        if self._waits:
            for wait in self._of(session.topic):
                self._look(wait, (session,))

    def fail(self, session: Session, version: int, reason: str) -> None:
        """A session cannot use ``version``."""
        for wait in self._of(session.topic):
            if wait.what == "acked" and wait.version <= version:
                wait.fail(session.id, reason)
                self._look(wait, ())

    def lose(self, session: Session) -> None:
        """A session has ended."""
        for wait in self._of(session.topic):
            wait.lose(session.id)
            self._look(wait, ())

    def _of(self, topic: Topic | None) -> list[Wait]:
        return [wait for wait in self._waits.values() if wait.topic is topic]

    def _look(self, wait: Wait, sessions: Iterable[Session]) -> None:
        holding: set[SessionId] = set()
        if wait.what == "released":
            entry = wait.topic.ledger.find(wait.version)
            holding = {lease.session for lease in entry.leases.values()} if entry else set()
        for session in sessions:
            done = session.acked >= wait.version if wait.what == "acked" else session.id not in holding
            if done and (wait.need is not None or session.id in wait.pending):
                wait.report(session.id, session.name)
        if wait.over:
            self._end(wait)

    def _end(self, wait: Wait) -> None:
        del self._waits[wait.id]
        self._answer(wait.done())
