"""Every exception that busync raises.

    BusyncError                      root; never raised itself
    +- OptionError (ValueError)      an argument or option has a value that is not allowed
    +- UsageError                    the call is not allowed in this state (a spent snapshot, a finished loan)
    +- ProtocolError                 root of what a peer did wrong; never raised itself
    |  +- DecodeError                bytes that are not a valid message
    |  +- WireVersionError           the peer speaks another revision of the protocol
    |  +- ViolationError             a valid message that is not allowed now
    +- EndpointError                 the endpoint's directory or name cannot be used
    |  +- EndpointInUse              a living publisher holds it
    +- HandleError                   root of what goes wrong between torch, memory and descriptors
    |  +- ExportError                a tensor or value of the source cannot be published
    |  +- AttachError                a segment that came from the publisher cannot be used
    |  +- FdError                    descriptors are exhausted or did not arrive
    |  +- DeviceError                memory of a GPU cannot be shared
    +- AllocationError               no memory could be reserved for a version
    +- PoolExhausted                 every segment is in use, and waiting cannot help or is not wanted
    +- LoanInUse                     a loan was published while one of its tensors was still referenced
    +- MismatchError                 a version does not fit the module it should be loaded into
    +- PinnedError                   this subscriber already holds as many versions as it may
    +- WaitTimeout (TimeoutError)    something awaited did not happen in time
    +- PublisherLost                 there is no publisher, or it has gone
    +- RefusedError                  the publisher refused this subscriber
    +- ClosedError                   this object was closed
       +- ForkedError                it belongs to the parent of this forked process

Attributes come first; the text is made from them and ends with a remedy where one is known.
"""

from __future__ import annotations

from collections.abc import Sequence


class BusyncError(Exception):
    """Root of all busync errors.

    Attributes: ``text`` (what happened, where and why) and ``remedy`` (what to do about it, may be empty).
    """

    text: str
    remedy: str

    def __init__(self, text: str, remedy: str = "") -> None:
        # Exception.__init__ is left out on purpose: BaseException.__new__ has stored the constructor's own
        # arguments in ``args``, so that every subclass can be pickled and copied.
        self.text = text
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


class OptionError(BusyncError, ValueError):
    """An option or argument has a value that is not allowed."""

    def __init__(self, option: str, value: object, allowed: str) -> None:
        self.option = option
        self.value = value
        self.allowed = allowed
        shown = repr(value)
        shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
        super().__init__(f"{option}={shown} is not allowed", f"use {allowed}")


class UsageError(BusyncError):
    """The call is not allowed in the present state of the object."""


class ProtocolError(BusyncError):
    """Root of errors that a peer caused."""


class DecodeError(ProtocolError):
    """Bytes from a peer are not a valid message."""

    def __init__(self, channel: str, reason: str) -> None:
        self.channel = channel
        self.reason = reason
        super().__init__(f"bytes on the {channel} are not a valid message: {reason}")


class WireVersionError(ProtocolError):
    """The peer speaks another revision of the protocol."""

    def __init__(self, ours: int, theirs: int) -> None:
        self.ours = ours
        self.theirs = theirs
        super().__init__(
            f"this side speaks wire version {ours}, the peer {theirs}", "install the same busync on both sides"
        )


class ViolationError(ProtocolError):
    """A peer sent a valid message that is not allowed in this state."""

    def __init__(self, peer: str, reason: str) -> None:
        self.peer = peer
        self.reason = reason
        super().__init__(f"{peer} broke the protocol: {reason}")


class EndpointError(BusyncError):
    """The endpoint cannot be used."""

    def __init__(self, endpoint: str, reason: str, remedy: str = "") -> None:
        self.endpoint = endpoint
        self.reason = reason
        super().__init__(f"endpoint {endpoint}: {reason}", remedy)


class EndpointInUse(EndpointError):
    """A living publisher holds the endpoint."""

    def __init__(self, endpoint: str, pid: int) -> None:
        self.pid = pid
        super().__init__(endpoint, f"in use by pid {pid}", "choose another name, or stop that publisher")


class HandleError(BusyncError):
    """Root of errors between torch, memory and descriptors."""


class ExportError(HandleError):
    """A tensor or value of the source cannot be published; nothing was announced."""

    def __init__(self, name: str, reason: str, remedy: str = "") -> None:
        self.name = name
        self.reason = reason
        super().__init__(f"{name!r} cannot be published: {reason}", remedy)


class AttachError(HandleError):
    """A segment from the publisher cannot be used."""

    def __init__(self, segment: int, reason: str, remedy: str = "") -> None:
        self.segment = segment
        self.reason = reason
        super().__init__(f"segment {segment} cannot be attached: {reason}", remedy)


class FdError(HandleError):
    """Descriptors are exhausted, or did not arrive."""


class DeviceError(HandleError):
    """Memory of a GPU cannot be shared; what is on the CPU can still be published.

    Attributes: ``device`` (a GPU's UUID, or what there is instead), ``reason``, and, where one is concerned, ``peer``
    and ``version``.
    """

    def __init__(self, device: str, reason: str, remedy: str = "", peer: str = "", version: int = 0) -> None:
        self.device = device
        self.reason = reason
        self.peer = peer
        self.version = version
        whom = (f" with {peer}" if peer else "") + (f" for version {version}" if version else "")
        super().__init__(f"memory of {device} cannot be shared{whom}: {reason}", remedy)


class AllocationError(BusyncError):
    """No memory could be reserved; nothing was announced and nothing is kept."""

    def __init__(self, wanted_bytes: int, reason: str, remedy: str = "") -> None:
        self.wanted_bytes = wanted_bytes
        self.reason = reason
        super().__init__(f"{wanted_bytes} bytes of shared memory cannot be reserved: {reason}", remedy)


class PoolExhausted(BusyncError):
    """Every segment is in use: by the publisher's own loans, or ``when_full`` is "skip" and a loan was asked for."""

    def __init__(self, topic: str, max_segments: int, loans: int) -> None:
        self.topic = topic
        self.max_segments = max_segments
        self.loans = loans
        super().__init__(
            f"topic {topic!r} has {max_segments} segments, all in use, {loans} of them on loan",
            "publish or close a loan first, let go of versions in the readers, or raise max_segments",
        )


class LoanInUse(BusyncError):
    """A loan cannot be published while the caller still refers to one of its tensors."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        shown = ", ".join(map(repr, self.names[:3])) + (" and more" if len(self.names) > 3 else "")
        super().__init__(
            f"the loan's tensors are still referenced ({shown}); a later write would reach readers",
            "drop every reference to them, views included, before publishing",
        )


class MismatchError(BusyncError):
    """A version does not fit the target; nothing was changed. ``problems`` lists every misfit."""

    def __init__(self, version: int, problems: Sequence[str]) -> None:
        self.version = version
        self.problems = tuple(problems)
        shown = "; ".join(self.problems[:5]) + (f"; and {len(self.problems) - 5} more" if len(problems) > 5 else "")
        super().__init__(f"version {version} does not fit: {shown}")


class PinnedError(BusyncError):
    """This subscriber holds as many versions as it may, so it cannot be given a newer one."""

    def __init__(self, max_held: int, holders: Sequence[str]) -> None:
        self.max_held = max_held
        self.holders = tuple(holders)
        super().__init__(
            f"{max_held} versions are still held here ({'; '.join(self.holders)})",
            "drop tensors and snapshots of old versions, use load_into, or raise the publisher's max_held",
        )


class WaitTimeout(BusyncError, TimeoutError):
    """Something awaited did not happen in time. ``missing`` says who or what."""

    def __init__(self, what: str, timeout: float, missing: Sequence[str] = ()) -> None:
        self.what = what
        self.timeout = timeout
        self.missing = tuple(missing)
        tail = f"; missing: {', '.join(self.missing)}" if self.missing else ""
        super().__init__(f"{what} did not happen within {timeout:g} s{tail}")
        self.args = (what, timeout, self.missing)  # TimeoutError is an OSError, whose __new__ leaves them out


class PublisherLost(BusyncError):
    """There is no publisher at the endpoint, or it has gone."""

    def __init__(self, endpoint: str, reason: str) -> None:
        self.endpoint = endpoint
        self.reason = reason
        super().__init__(f"no publisher at {endpoint}: {reason}", "start one, or check the endpoint's name")


class RefusedError(BusyncError):
    """The publisher refused this subscriber."""

    def __init__(self, endpoint: str, code: str, reason: str) -> None:
        self.endpoint = endpoint
        self.code = code
        self.reason = reason
        super().__init__(f"the publisher at {endpoint} refused this subscriber ({code}): {reason}")


class ClosedError(BusyncError):
    """This object was closed."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"this {what} is closed")


class ForkedError(ClosedError):
    """The object belongs to the parent of this forked process."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.text = f"this {what} belongs to the parent process and cannot be used after a fork"
        self.remedy = "open a new one in the child"
