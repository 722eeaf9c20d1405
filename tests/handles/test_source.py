from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from busync.errors import ExportError
from busync.handles import Flat, flatten
from busync.wire import MAX_VALUES_BYTES

T = torch.zeros(2)


def shape(flat: Flat) -> tuple[list[str], dict[str, Any]]:
    return list(flat.tensors), flat.values


def test_a_module_gives_parameters_and_persistent_buffers() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    flat = flatten(module)
    assert list(flat.tensors) == list(module.state_dict())
    assert flat.tensors["0.weight"] is module[0].weight
    assert flat.parameters == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert flat.values == {}


def test_extra_state_is_a_plain_value_or_refused() -> None:
    class Extra(nn.Module):
        state: object = 3

        def get_extra_state(self) -> object:
            return self.state

    module = Extra()
    assert flatten(module).values == {"_extra_state": 3}
    module.state = object()
    with pytest.raises(ExportError, match="_extra_state"):
        flatten(module)


def test_containers_become_components() -> None:
    source = {
        "a": {"b.c": T, "d": [T, (T, 5)]},
        "e": OrderedDict(f=None, g=True),
        "net": nn.Linear(1, 1, bias=False),
        "s": "text", "x": b"bytes", "y": 1.5,
    }  # fmt: skip
    flat = flatten(source)
    assert shape(flat) == (
        ["a.b.c", "a.d.0", "a.d.1.0", "net.weight"],
        {"a.d.1.1": 5, "e.f": None, "e.g": True, "s": "text", "x": b"bytes", "y": 1.5},
    )
    assert flat.parameters == {"net.weight"}


@pytest.mark.parametrize(
    "source",
    [
        [("w", T), ("b", T)],
        (("w", T), ("b", T)),
        iter([("w", T), ("b", T)]),
        {"w": T, "b": T}.items(),
        {"w": T, "b": T},
    ],
)
def test_pairs_are_a_source(source: Any) -> None:
    assert list(flatten(source).tensors) == ["w", "b"]


def test_named_parameters_are_a_source() -> None:
    assert flatten(nn.Linear(1, 1).named_parameters()).parameters == {"weight", "bias"}


def test_a_list_of_tensors_is_a_source() -> None:
    assert list(flatten([T, T]).tensors) == ["0", "1"]


@pytest.mark.parametrize("source", [{}, [], (), iter(()), {"a": {}, "b": [], "c": ()}, nn.ReLU()])
def test_containers_without_leaves_vanish(source: Any) -> None:
    assert flatten(source) == Flat()


def test_the_source_is_not_changed() -> None:
    source: dict[str, Any] = {"a": {"b": T}, "c": [1, 2]}
    before = copy.copy(source)
    flatten(source)
    assert source == before
    assert source["a"]["b"] is T


def test_a_shared_container_is_not_a_loop() -> None:
    shared = {"w": T}
    assert list(flatten({"a": shared, "b": shared}).tensors) == ["a.w", "b.w"]


LOOP: dict[str, Any] = {}
LOOP["a"] = {"b": [LOOP]}
DEEP: dict[str, Any] = {"w": T}
for _ in range(70):
    DEEP = {"d": DEEP}


@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [
        (T, "source", "bare tensor"),
        (nn.Parameter(T), "source", "bare tensor"),
        (5, "source", "int"),
        ("text", "source", "str"),
        (b"bytes", "source", "bytes"),
        (None, "source", "NoneType"),
        (iter([T]), "source", "instead of a pair"),
        (iter(["ab"]), "source", "instead of a pair"),
        ({1: T}, "1", "not a string"),
        ({"a": {None: T}}, "a.None", "not a string"),
        ({"": T}, "", "not a string with content"),
        ({"a": {"": T}}, "a.", "not a string with content"),
        (iter([(1, T)]), "1", "not a string"),
        ({"a.b": T, "a": {"b": T}}, "a.b", "two entries"),
        ({"a.b": T, "a": {"b": 1}}, "a.b", "two entries"),
        (iter([("w", T), ("w", T)]), "w", "two entries"),
        ({"a\0": T}, "a\0", "printed"),
        ({"a\ud800": T}, "a\ud800", "printed"),
        ({"a\n": 1}, "a\n", "printed"),
        ({"x" * 1025: T}, "x" * 1025, "exceeds"),
        ({"ü" * 513: T}, "ü" * 513, "exceeds"),
        ({"a": {"x" * 1023: T}}, "a." + "x" * 1023, "exceeds"),
        ({"a": object()}, "a", "object"),
        ({"a": {1, 2}}, "a", "set"),
        ({"a": 1j}, "a", "complex"),
        ({"a": iter([("w", T)])}, "a", "neither"),
        ({"a": bytearray(1)}, "a", "bytearray"),
        ({"a": 1 << 64}, "a", "64 bits"),
        ({"a": -(1 << 63) - 1}, "a", "64 bits"),
        ({"a": "\ud800"}, "a", "UTF-8"),
        ({"a": "x" * (MAX_VALUES_BYTES // 2), "b": b"x" * (MAX_VALUES_BYTES // 2)}, "b", "together"),
        (LOOP, "a.b.0", "holds itself"),
        (DEEP, ".".join("d" * 64), "nested more than"),
    ],
)  # fmt: skip
def test_what_cannot_be_published_is_named(source: Any, name: str, reason: str) -> None:
    with pytest.raises(ExportError, match=reason) as caught:
        flatten(source)
    assert caught.value.name == name


@pytest.mark.parametrize("source", [{"x" * 1024: T}, {"ü" * 512: T}, {"a": (1 << 64) - 1}, {"a": -(1 << 63)}])
def test_limits_are_inclusive(source: Any) -> None:
    flatten(source)
