"""What a publish is given, as flat names: tensors, and plain values beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import torch
from torch import nn

from busync.errors import ExportError
from busync.manifest import MAX_NAME_BYTES, MAX_TENSORS
from busync.wire import MAX_VALUES_BYTES, VALUE_TYPES, Value

Source = nn.Module | Mapping[str, object] | Iterable[object]

_MAX_DEPTH = 64  # of containers within containers; far below Python's own limit on recursion
_SOURCES = "a module, a mapping, a list or tuple, or an iterable of (name, tensor)"


@dataclass(slots=True)
class Flat:
    """A source by flat dotted names, in the source's order. The tensors are the source's own, not copies."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)  #: names of tensors that are parameters
    values: dict[str, Value] = field(default_factory=dict)


def flatten(source: Source, values: Mapping[str, Value] | None = None) -> Flat:
    """Flatten a source to dotted names, without changing or keeping it.

    A module stands for its state dict (parameters and persistent buffers), also inside a container. Keys of mappings
    and positions in lists and tuples become components of the names. A generator, or a list, of (name, tensor) pairs
    may be the source itself. Tensors and plain values are leaves; a container without any leaf vanishes. ``values``
    join the plain values of the source.

    Raises:
        ExportError: the source or a leaf is of a kind that cannot be published; a name is not a string, occurs twice,
            is empty, cannot be printed or exceeds 1024 bytes of UTF-8; a container holds itself or is nested more than
            64 deep; a whole number exceeds 64 bits; the values exceed 1 MiB together.
    """
    if isinstance(source, torch.Tensor):
        raise ExportError("source", "a bare tensor has no name", 'pass a mapping, for instance {"weight": tensor}')
    children = _children(source)
    if children is None or _is_pairs(source):
        children = _pairs(source)
    flat = Flat()
    _collect(flat, "", children, [id(source)])
    if values is not None:
        _collect(flat, "", values.items(), [id(values)])
    _check_values(flat.values)
    return flat


def _children(node: object) -> Iterable[tuple[object, object]] | None:
    """The keys and contents of a container, or None for anything else."""
    if isinstance(node, nn.Module):
        return node.state_dict(keep_vars=True).items()
    if isinstance(node, Mapping):
        return node.items()
    if isinstance(node, (list, tuple)):
        return ((str(index), item) for index, item in enumerate(node))
    return None


def _is_pairs(source: object) -> bool:
    return (
        isinstance(source, (list, tuple))
        and len(source) > 0
        and all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in source)
    )


def _pairs(source: object) -> Iterator[tuple[object, object]]:
    if not isinstance(source, Iterable) or isinstance(source, (str, bytes, bytearray, memoryview)):
        raise ExportError("source", f"it is a {type(source).__name__}", f"pass {_SOURCES}")
    for item in source:
        if not isinstance(item, tuple) or len(item) != 2:
            raise ExportError("source", f"it yields a {type(item).__name__} instead of a pair", f"pass {_SOURCES}")
        yield item


def _collect(flat: Flat, prefix: str, children: Iterable[tuple[object, object]], path: list[int]) -> None:
    """Add the leaves below ``children``. ``path`` holds the identities of the containers on the way here."""
    for key, node in children:
        if not isinstance(key, str) or not key:
            raise ExportError(f"{prefix}{key}", f"the key {key!r} is not a string with content", "use text as keys")
        name = prefix + key  # not by a format: a class derived from str may print something else
        if isinstance(node, torch.Tensor):
            _check_name(flat, name)
            flat.tensors[name] = node
            if isinstance(node, nn.Parameter):
                flat.parameters.add(name)
        elif type(node) in VALUE_TYPES:
            _check_name(flat, name)
            flat.values[name] = node  # type: ignore[assignment]  # its exact type was looked up
        else:
            inner = _children(node)
            if inner is None:
                raise ExportError(
                    name, f"a {type(node).__name__} is neither a tensor nor a plain value",
                    "publish tensors, bool, int, float, str, bytes or None",
                )  # fmt: skip
            if id(node) in path:
                raise ExportError(name, "the container holds itself")
            if len(path) == _MAX_DEPTH:
                raise ExportError(name, f"containers are nested more than {_MAX_DEPTH} deep")
            _collect(flat, f"{name}.", inner, [*path, id(node)])


def _check_name(flat: Flat, name: str) -> None:
    if name in flat.tensors or name in flat.values:
        raise ExportError(name, "two entries have this name", "rename one of them")
    if not name.isprintable():  # also refuses surrogates, which have no UTF-8
        raise ExportError(name, "the name has characters that cannot be printed")
    if len(name) > MAX_NAME_BYTES // 4 and len(name.encode()) > MAX_NAME_BYTES:
        raise ExportError(name, f"the name exceeds {MAX_NAME_BYTES} bytes")
    if len(flat.tensors) >= MAX_TENSORS:
        raise ExportError(name, f"there are more than {MAX_TENSORS} tensors")


def _check_values(values: dict[str, Value]) -> None:
    """Check that the values can be sent, all in one message."""
    total = 0
    for name, value in values.items():
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            raise ExportError(name, "the number exceeds 64 bits", "publish it as text")
        try:
            total += len(msgspec.msgpack.encode((name, value)))
        except UnicodeEncodeError as error:
            raise ExportError(name, "the text has no UTF-8") from error
        if total > MAX_VALUES_BYTES:
            reason = f"with it the values exceed {MAX_VALUES_BYTES} bytes together"
            raise ExportError(name, reason, "publish large ones as tensors of uint8")
