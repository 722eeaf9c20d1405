"""What is closed is freed at once, without the garbage collector, which may come late or never."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import busync

pytestmark = pytest.mark.asyncio


async def test_a_closed_subscriber_and_its_connection() -> None:
    async with busync.Publisher("p") as pub:
        await pub.publish({"w": torch.ones(20_000)})  # which is mapped, and not copied
        gc.collect()
        gc.disable()
        try:
            sub = busync.Subscriber("p")
            async with sub:
                tensor = (await sub.next(timeout=10)).tensors["w"]
                session = weakref.ref(sub._session)
                door = weakref.ref(sub._session.door)  # type: ignore[union-attr]
            closed = weakref.ref(sub)
            del sub
            assert closed() is None
            assert session() is None
            assert door() is not None  # it is what the tensor's finalizer was bound to
            assert tensor.sum() == 20_000
            del tensor
            assert door() is None
        finally:
            gc.enable()
