"""``Publisher.status()``: what there is, who holds it, and why, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from busync.ids import SessionId
from busync.protocol.ledger import Ledger
from busync.protocol.topics import Session, Topic


def describe(
    topics: Mapping[str, Topic], sessions: Mapping[SessionId, Session], counters: Mapping[str, int]
) -> dict[str, Any]:
    """The whole of a publisher. Every byte is charged to a holder while the holder's session lives."""
    return {
        "topics": {name: _describe_topic(topic, sessions) for name, topic in sorted(topics.items())},
        "subscribers": [_describe_session(session) for session in sessions.values()],
        "counters": dict(counters),
    }


def _describe_topic(topic: Topic, sessions: Mapping[SessionId, Session]) -> dict[str, Any]:
    entries = topic.ledger.entries
    return {
        "version": topic.version,
        "versions": [
            {
                "version": e.version or None,
                "state": str(e.state),
                "bytes": e.nbytes,
                "devices": dict(e.devices),
                "holders": sorted(sessions[lease.session].name for lease in e.leases.values()),
            }
            for e in entries
        ],
        "segments": topic.ledger.pooled,
        "bytes": sum(topic.ledger.free.values()) + sum(e.nbytes for e in entries),
        "devices": dict(_on_devices(topic.ledger)),
    }


def _on_devices(ledger: Ledger) -> Counter[str]:
    """Bytes by GPU, of everything that is in the books."""
    total: Counter[str] = Counter()
    free = (ledger.devices.get(segment, ()) for segment in ledger.free)
    for devices in (*free, *(e.devices for e in ledger.entries)):
        for device, nbytes in devices:
            total[device] += nbytes
    return total


def _describe_session(session: Session) -> dict[str, Any]:
    topic = session.topic
    if topic is None or not session.attached:
        state = "joining"
    elif session.id in topic.ledger.overdue():
        state = "overdue"
    else:
        state = "waiting" if session.want is not None else "holding" if session.leases else "idle"
    return {
        "name": session.name,
        "pid": session.pid,
        "uid": session.uid,
        "topic": topic.name if topic else None,
        "version": session.acked or None,
        "lag": topic.version - session.acked if topic else 0,
        "leases": sorted(lease.entry.version for lease in session.leases.values()),
        "skipped": session.skipped,
        "state": state,
        "reason": session.reason,
    }
