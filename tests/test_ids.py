"""Numbers and names."""

from __future__ import annotations

import pytest

from busync.errors import OptionError
from busync.ids import MAX_LABEL_BYTES, check_label, new_incarnation, new_token


def test_incarnations_differ_and_fit_the_wire() -> None:
    numbers = {new_incarnation() for _ in range(200)}
    assert len(numbers) == 200
    assert all(0 < number < 1 << 63 for number in numbers)


def test_tokens_differ_and_never_start_with_zero() -> None:
    tokens = {new_token() for _ in range(2000)}
    assert len(tokens) == 2000
    assert all(len(token) == 16 and token[0] for token in tokens)


@pytest.mark.parametrize("value", ["a", "policy/encoder", "größe 1", "x" * MAX_LABEL_BYTES, "é" * 100])
def test_good_labels(value: str) -> None:
    assert check_label("topic", value) == value


@pytest.mark.parametrize("value", ["", "a\nb", "\0", "\x1b[1m", "\ud800", "x" * 201, "é" * 101, b"a", None, 3])
def test_bad_labels(value: object) -> None:
    with pytest.raises(OptionError, match=r"topic=.* is not allowed; use 1 to 200 bytes"):
        check_label("topic", value)


def test_an_empty_label_where_it_is_allowed() -> None:
    assert check_label("label", "", empty=True) == ""
