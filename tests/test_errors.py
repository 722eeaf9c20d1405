"""The errors: their tree, their texts, their copies."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from busync import errors
from busync.errors import BusyncError

CLASSES: dict[str, type[BusyncError]] = {
    name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, BusyncError)
}

SAMPLES: list[BusyncError] = [
    errors.BusyncError("text", "remedy"),
    errors.OptionError("max_held", 1, "a whole number from 2 to 64"),
    errors.UsageError("the snapshot is spent", "ask for the next"),
    errors.ProtocolError("text"),
    errors.DecodeError("door", "trailing bytes"),
    errors.WireVersionError(1, 2),
    errors.ViolationError("subscriber a (pid 3)", "a second Hello"),
    errors.EndpointError("policy", "not a directory", "remove it"),
    errors.EndpointInUse("policy", 12),
    errors.HandleError("text"),
    errors.ExportError("layer.w", "it is sparse", "call to_dense()"),
    errors.AttachError(3, "it is not sealed"),
    errors.FdError("no descriptor is left", "raise the limit"),
    errors.DeviceError("GPU 1", "it has expandable segments", "switch them off", "actor-3", 7),
    errors.AllocationError(100, "50 are there"),
    errors.PoolExhausted("default", 4, 4),
    errors.LoanInUse(["a", "b", "c", "d"]),
    errors.MismatchError(3, ["a is missing", "b", "c", "d", "e", "f"]),
    errors.PinnedError(2, ["version 1: 'w'"]),
    errors.WaitTimeout("version 3", 2.5, ["a", "b"]),
    errors.PublisherLost("policy", "nobody answers"),
    errors.RefusedError("policy", "uid", "your uid is not allowed"),
    errors.ClosedError("publisher"),
    errors.ForkedError("publisher"),
]
EVERY = pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)


def documented_tree() -> dict[str, tuple[str, set[str]]]:
    """Class name to its parent and further bases, read from the module's docstring."""
    assert errors.__doc__ is not None
    tree: dict[str, tuple[str, set[str]]] = {}
    path: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        found = re.match(r"^ {4}([|+\- ]*)([A-Z]\w+)(?: \((\w+)\))? {2,}\S", line)
        if not found:
            continue
        depth = len(found[1])
        while path and path[-1][0] >= depth:
            path.pop()
        tree[found[2]] = (path[-1][1] if path else "Exception", {found[3]} - {None})
        path.append((depth, found[2]))
    return tree


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    actual = {
        name: (cls.__bases__[0].__name__, {b.__name__ for b in cls.__bases__[1:]}) for name, cls in CLASSES.items()
    }
    assert documented_tree() == actual


def test_every_class_has_a_sample() -> None:
    assert [type(error).__name__ for error in SAMPLES] == list(CLASSES)


@EVERY
def test_an_error_survives_pickle_and_copy(error: BusyncError) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert vars(twin) == vars(error)
        assert str(twin) == str(error)


@EVERY
def test_the_text_ends_with_the_remedy(error: BusyncError) -> None:
    assert str(error).startswith(error.text)
    assert str(error).endswith(error.remedy)
    assert "\n" not in str(error)
    assert not str(error).endswith((".", ";", " "))


def test_attributes_come_first() -> None:
    error = errors.WaitTimeout("version 3", 2.5, ["a", "b"])
    assert (error.what, error.timeout, error.missing) == ("version 3", 2.5, ("a", "b"))
    assert str(error) == "version 3 did not happen within 2.5 s; missing: a, b"


def test_long_lists_are_shortened_in_the_text_only() -> None:
    error = errors.MismatchError(3, [f"problem {i}" for i in range(9)])
    assert len(error.problems) == 9
    assert str(error).endswith("problem 4; and 4 more")
    assert str(errors.LoanInUse(["a", "b", "c", "d"])).count("'") == 2 * 3 + 1


@pytest.mark.parametrize(("cls", "builtin"), [(errors.OptionError, ValueError), (errors.WaitTimeout, TimeoutError)])
def test_builtin_handlers_catch_them_too(cls: type[BusyncError], builtin: type[Exception]) -> None:
    assert issubclass(cls, builtin)
