"""The numbers and names that identify things on the bus."""

from __future__ import annotations

import secrets
from typing import NewType

from busync.errors import OptionError

#: One publish on a topic: starts at 1 and grows by 1 with each publish, per topic and incarnation. 0 is "none yet".
Version = NewType("Version", int)
#: One run of a publisher: 63 random bits, never 0.
Incarnation = NewType("Incarnation", int)
#: One connection of one subscriber, as the publisher counts them.
SessionId = NewType("SessionId", int)
#: One right to read one version, as the publisher counts them.
LeaseId = NewType("LeaseId", int)
#: One shared allocation of one incarnation. Grows by 1, never used again.
SegmentId = NewType("SegmentId", int)

DEFAULT_TOPIC = "default"
MAX_LABEL_BYTES = 200


def new_incarnation() -> Incarnation:
    """A fresh incarnation number."""
    return Incarnation(secrets.randbits(63) or 1)


def new_token() -> bytes:
    """A fresh session token: 16 random bytes. The first is never 0, which ZeroMQ keeps for itself."""
    return bytes([secrets.randbelow(255) + 1]) + secrets.token_bytes(15)


def check_label(what: str, value: object, *, empty: bool = False) -> str:
    """Return ``value`` if it is usable as a topic, a subscriber name or a version label.

    Raises:
        OptionError: it is not a string, is empty (unless allowed), has more than 200 bytes of UTF-8, or cannot be
            printed.
    """
    allowed = f"{'0' if empty else '1'} to {MAX_LABEL_BYTES} bytes of printable UTF-8"
    if not isinstance(value, str) or not (value or empty):
        raise OptionError(what, value, allowed)
    if not value.isprintable() or len(value.encode()) > MAX_LABEL_BYTES:  # surrogates, without UTF-8, do not print
        raise OptionError(what, value, allowed)
    return value
