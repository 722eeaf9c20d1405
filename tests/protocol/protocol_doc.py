"""Generates the tables of docs/PROTOCOL.md from the code: ``python -m tests.protocol.protocol_doc`` rewrites them.

Everything between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` is generated; the rest is written by hand.
"""

from __future__ import annotations

import inspect
import re
import typing
from pathlib import Path

import msgspec
from msgspec import inspect as shape

from busync import manifest, wire
from busync.protocol import publisher
from busync.protocol.guards import GUARDS
from busync.protocol.ledger import TABLE

DOCUMENT = Path(__file__).parents[2] / "docs" / "PROTOCOL.md"
COMMENT = re.compile(r"^    (\w+): [^#]*?(?:#: (.*))?$")
COMMENT_ABOVE = re.compile(r"^    #: (.*)$")


def bounds(low: int | None, high: int | None, unit: str) -> str:
    """A range of lengths, as far as it is limited."""
    if low == high:
        return f"{low} {unit}"
    return f"{low or 0} to {high} {unit}" if high is not None else unit


def power(number: int | None) -> str:
    """A limit, readable."""
    if number is None:
        return "any"
    for exponent in (20, 46, 63, 64):
        if number in (1 << exponent, (1 << exponent) - 1):
            return f"2^{exponent}" if number == 1 << exponent else f"2^{exponent} - 1"
    return str(number)


def describe(kind: shape.Type) -> str:
    """A type with its limits, in words."""
    match kind:
        case shape.IntType(ge=low, le=high, lt=below):
            return f"int, {power(low)} to {power(high if below is None else below - 1)}"
        case shape.BoolType():
            return "bool"
        case shape.FloatType(ge=low):
            return "float" if low is None else f"float, at least {low}"
        case shape.StrType(min_length=low, max_length=high):
            return f"str, {bounds(low, high, 'characters')}" if high is not None else "str"
        case shape.BytesType(min_length=low, max_length=high):
            return f"bytes, {bounds(low, high, 'bytes')}"
        case shape.LiteralType(values=values):
            return "one of " + ", ".join(f'"{value}"' for value in values)
        case shape.VarTupleType(item_type=item, max_length=high):
            return f"array of at most {high}: {describe(item)}"
        case shape.DictType(key_type=key):
            return f"map of {describe(key)} to a plain value"
        case shape.StructType(cls=cls):
            return cls.__name__
    raise TypeError(f"no words for {kind}")


def comments(cls: type[msgspec.Struct]) -> dict[str, str]:
    """The ``#:`` comment of each field: beside it, or on the line above."""
    found: dict[str, str] = {}
    above = ""
    for line in inspect.getsource(cls).splitlines():
        if field := COMMENT.match(line):
            found[field[1]] = field[2] or above
        above = match[1] if (match := COMMENT_ABOVE.match(line)) else ""
    return found


def fields(cls: type[msgspec.Struct]) -> list[str]:
    """A table of a struct's fields."""
    info = shape.type_info(cls)
    assert isinstance(info, shape.StructType)
    if not info.fields:
        return ["No fields."]
    notes = comments(cls)
    lines = ["| field | type and limits | meaning |", "| --- | --- | --- |"]
    for field in info.fields:
        default = "" if field.required else f" (default {field.default})"
        lines.append(f"| `{field.name}` | {describe(field.type)}{default} | {notes[field.name].replace('``', '`')} |")
    return lines


def messages() -> list[str]:
    """Every message, by channel and direction."""
    lines: list[str] = []
    for title, union in (
        ("Door, subscriber to publisher", wire.DoorUp),
        ("Door, publisher to subscriber", wire.DoorDown),
        ("Bus, subscriber to publisher", wire.BusUp),
        ("Bus, publisher to subscriber", wire.BusDown),
    ):
        lines += [f"### {title}", ""]
        for cls in typing.get_args(union) or (union,):
            doc = inspect.getdoc(cls) or ""
            lines += [f"**{cls.__name__}** (`type`: `{cls.__name__.lower()}`). {doc.replace('``', '`')}", ""]
            lines += [*fields(cls), ""]
    lines += ["### Parts of a manifest", "", "Both travel as arrays, in the order of their fields.", ""]
    for part in (manifest.GroupSpec, manifest.TensorSpec):
        lines += [f"**{part.__name__}**. {inspect.getdoc(part)}", "", *fields(part), ""]
    return lines[:-1]


def limits() -> list[str]:
    """Limits that no field shows."""
    rows = (
        ("WIRE_VERSION", wire.WIRE_VERSION, "exchanged in Hello and Welcome"),
        ("MAX_PACKET_BYTES", wire.MAX_PACKET_BYTES, "one packet on the door"),
        ("MAX_MESSAGE_BYTES", wire.MAX_MESSAGE_BYTES, "one message on the bus"),
        ("MAX_VALUES_BYTES", wire.MAX_VALUES_BYTES, "the plain values of one version, encoded"),
        ("PART_TENSORS", wire.PART_TENSORS, "tensors in one ManifestPart"),
        ("MAX_TENSORS", manifest.MAX_TENSORS, "tensors in one manifest"),
        ("MAX_NDIM", manifest.MAX_NDIM, "dimensions of a tensor"),
        ("ALIGNMENT", manifest.ALIGNMENT, "bytes; every group starts at a multiple of it"),
        ("MAX_TOPICS", publisher.MAX_TOPICS, "topics on one endpoint"),
        ("GREETING_TIMEOUT", f"{publisher.GREETING_TIMEOUT:g} s", "from the connection to Hello, and again to Join"),
    )
    return ["| limit | value | of |", "| --- | --- | --- |", *(f"| {n} | {v} | {of} |" for n, v, of in rows)]


def states() -> list[str]:
    """The ledger's table."""
    lines = ["| state | event | if | becomes | meaning |", "| --- | --- | --- | --- | --- |"]
    for row in TABLE:
        guards = ", ".join(f"`{name}`" for name in row.guards) or "always"
        lines.append(f"| {row.state} | {row.event} | {guards} | {row.to} | {row.meaning} |")
    return lines


def guards() -> list[str]:
    """Every guard and what it says."""
    lines = ["| guard | holds when |", "| --- | --- |"]
    return lines + [f"| `{name}` | {inspect.getdoc(guard)} |" for name, guard in GUARDS.items()]


SECTIONS = {"limits": limits, "messages": messages, "states": states, "guards": guards}


def generated(text: str) -> str:
    """The document with its generated parts made anew."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        assert text.count(begin) == text.count(end) == 1, f"the markers of {name} are not there"
        head, rest = text.split(begin)
        text = head + begin + "\n".join(make()) + "\n" + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(generated(DOCUMENT.read_text()))
