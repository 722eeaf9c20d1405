"""Versions that are large enough to be unmapped on a thread."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import busync
from busync.handles.unmapper import LARGE_BYTES


@pytest.mark.parametrize("flavour", ["blocking", "asyncio"])
def test_a_large_version_that_is_being_unmapped_is_waited_for(flavour: str) -> None:
    """It was let go of in time: that a thread has to unmap it first is no reason for PinnedError."""
    state = {"w": torch.zeros(LARGE_BYTES // 4)}
    with busync.blocking.Publisher("p", max_segments=3) as pub:

        def check(snapshot: Any, version: int) -> torch.Tensor:
            assert snapshot.version == version
            tensor: torch.Tensor = snapshot.tensors["w"]
            assert int(tensor.sum().item()) == version * tensor.numel()
            return tensor

        def plain() -> None:
            with busync.blocking.Subscriber("p") as sub:
                held: list[torch.Tensor] = []
                for version in range(1, 9):
                    state["w"].fill_(version)
                    pub.publish(state)
                    del held[:-1]
                    held.append(check(sub.next(5), version))

        async def cooperative() -> None:
            async with busync.Subscriber("p") as sub:
                held: list[torch.Tensor] = []
                for version in range(1, 9):
                    state["w"].fill_(version)
                    pub.publish(state)
                    del held[:-1]
                    held.append(check(await sub.next(5), version))

        plain() if flavour == "blocking" else asyncio.run(cooperative())
