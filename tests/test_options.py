"""Options are checked when they are made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from busync.errors import OptionError
from busync.options import PublisherOptions, SubscriberOptions, check_seconds

NAN = float("nan")
INFINITE = float("inf")


def test_defaults_and_limits_are_allowed() -> None:
    PublisherOptions()
    PublisherOptions(max_segments=2, max_held=2, copy_threads=1, lease_timeout=0, allow_uids=frozenset({0, 1000}))
    PublisherOptions(max_segments=1024, max_held=64, copy_threads=64, lease_timeout=1e6, when_full="skip")
    SubscriberOptions()
    SubscriberOptions(topic="t", name="n", connect_timeout=0, prefetch=True)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_segments", 1), ("max_segments", 1025), ("max_segments", 4.0), ("max_segments", True),
        ("max_segments", "4"), ("max_held", 1), ("max_held", 65), ("when_full", "drop"), ("when_full", None),
        ("lease_timeout", -1), ("lease_timeout", NAN), ("lease_timeout", INFINITE), ("lease_timeout", "1"),
        ("lease_timeout", True), ("lease_timeout", None), ("allow_uids", frozenset({-1})),
        ("allow_uids", frozenset({"root"})), ("copy_threads", 0), ("copy_threads", 65),
    ],
)  # fmt: skip
def test_a_wrong_publisher_option_is_named(option: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        PublisherOptions(**{option: value})
    assert caught.value.option == option
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("topic", ""), ("topic", "a\tb"), ("topic", 3), ("name", "x" * 201), ("name", None),
        ("connect_timeout", -0.1), ("connect_timeout", NAN), ("prefetch", 1), ("prefetch", None),
    ],
)  # fmt: skip
def test_a_wrong_subscriber_option_is_named(option: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        SubscriberOptions(**{option: value})
    assert caught.value.option == option


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PublisherOptions().max_held = 3  # type: ignore[misc]


def test_seconds_are_floats() -> None:
    assert check_seconds("timeout", 3) == 3.0
    assert type(check_seconds("timeout", 3)) is float
