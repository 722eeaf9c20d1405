"""What every element of every version must be: it follows from incarnation, topic, version, tensor and index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.support import patterns

#: Layouts that a version may have; far enough apart in size that a change of layout needs a fresh segment.
LAYOUTS: tuple[Mapping[str, tuple[int, ...]], ...] = (
    patterns.SMALL,
    patterns.SHAPES,
    {"blob": (350, 1024), "last": (17,)},
)
_MASK = (1 << 22) - 1


def seed_of(incarnation: int, topic: str) -> int:
    return (incarnation ^ (int(topic.removeprefix("t")) * 7_368_787)) % 1_000_000


def label_of(incarnation: int, topic: str, version: int, layout: int) -> str:
    return f"{incarnation}/{topic}/{version}/{layout}"


def write(tensors: Mapping[str, torch.Tensor], incarnation: int, topic: str, version: int, layout: int) -> None:
    """Fill tensors of a layout with what the version must hold."""
    for name, values in patterns.state(seed_of(incarnation, topic), version, LAYOUTS[layout]).items():
        tensors[name].copy_(values)


def state(incarnation: int, topic: str, version: int, layout: int) -> dict[str, torch.Tensor]:
    return patterns.state(seed_of(incarnation, topic), version, LAYOUTS[layout])


def layout_of(snapshot: Any) -> int:
    """The layout that the label tells, which must be the label of just this version.

    Raises:
        AssertionError: label and version do not belong together.
    """
    layout = int(snapshot.label.rpartition("/")[2])
    expected = label_of(snapshot.incarnation, snapshot.topic, snapshot.version, layout)
    assert snapshot.label == expected, f"version {expected} has the label {snapshot.label}"
    return layout


def check(tensors: Mapping[str, torch.Tensor], incarnation: int, topic: str, version: int, layout: int) -> int:
    """Insist on every element; how many there are.

    Raises:
        AssertionError: one is wrong, missing or too many.
    """
    return patterns.check(tensors, seed_of(incarnation, topic), version, LAYOUTS[layout])
