"""The public face: what ``busync`` exports is there, and nothing else is."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

import busync
from busync import errors


def test_all_is_what_can_be_seen() -> None:
    values = {name: getattr(busync, name) for name in dir(busync) if not name.startswith("_")}
    public = {name for name, value in values.items() if not isinstance(value, ModuleType)} | {"blocking"}
    assert public - {"annotations", "TYPE_CHECKING", "import_module"} == set(busync.__all__)


def test_all_is_sorted_and_unique() -> None:
    assert list(busync.__all__) == sorted(set(busync.__all__))


@pytest.mark.parametrize("name", busync.__all__)
def test_every_name_resolves_and_says_what_it_is(name: str) -> None:
    value = getattr(busync, name)
    assert inspect.getdoc(value), f"busync.{name} has no docstring"


def test_every_error_is_exported() -> None:
    classes = {n for n, v in vars(errors).items() if inspect.isclass(v) and issubclass(v, errors.BusyncError)}
    assert classes <= set(busync.__all__)


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        busync.nothing  # noqa: B018


def test_the_version_is_a_version() -> None:
    assert all(part.isdigit() for part in busync.__version__.split("."))
