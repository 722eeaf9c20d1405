"""What is closed is freed at once, without the garbage collector, which may come late or never."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import busync
from tests.support import patterns
from tests.support.roles import soon

pytestmark = [pytest.mark.asyncio, pytest.mark.devices]


async def test_a_closed_subscriber_and_its_connection(device: str) -> None:
    async with busync.Publisher("p") as pub:
        await pub.publish({"w": patterns.put(torch.ones(20_000))})  # which is mapped, and not copied
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
            assert tensor.cpu().sum() == 20_000
            del tensor
            if device == "cuda":  # whose tensors end on a thread, once the device is done with them
                await soon(lambda: door() is None)
            assert door() is None
        finally:
            gc.enable()
