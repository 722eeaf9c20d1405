"""Loans: memory of the next version, written in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import busync
from tests.support import patterns
from tests.support.roles import soon

pytestmark = [pytest.mark.asyncio, pytest.mark.devices]


def _fill(loan: busync.Loan, version: int) -> None:
    for name, tensor in patterns.state(1, version).items():
        loan.tensors[name].copy_(tensor)


async def test_published_without_a_copy() -> None:
    model = patterns.Module()
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        for version in range(1, 6):
            async with pub.loan(like=model) as loan:
                _fill(loan, version)
                report = await loan.publish(label="lent", values={"step": version})
            assert report.version == version
            snapshot = await sub.next(timeout=5)
            patterns.check(snapshot.tensors, 1, version)
            assert (snapshot.label, snapshot.values) == ("lent", {"step": version})
            del snapshot
        assert pub.status()["topics"]["default"]["segments"] <= 4


async def test_by_dtype_and_size() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        async with pub.loan(like={"a": ("float32", (2, 3)), "b": (torch.int8, (5,)), "c": (torch.bool, ())}) as loan:
            loan.tensors["a"].fill_(1)  # on the CPU: the mapping names no device
            loan.tensors["b"].fill_(2)
            loan.tensors["c"].fill_(True)
            await loan.publish()
        tensors = (await sub.next(timeout=5)).tensors
        assert torch.equal(tensors["a"], torch.ones(2, 3))
        assert tensors["b"].tolist() == [2] * 5
        assert tensors["c"].item() is True


KEPT: dict[str, Callable[[torch.Tensor], object]] = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor[3:5].t(),
    "storage": lambda tensor: tensor.untyped_storage(),
    "numpy": lambda tensor: tensor.numpy() if tensor.is_cpu else tensor.detach(),  # no array without a copy there
    "closure": lambda tensor: lambda: tensor,
}


@pytest.mark.parametrize("keep", KEPT)
async def test_in_use(keep: str) -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        async with pub.loan(like=patterns.Module()) as loan:
            _fill(loan, 1)
            tensor = loan.tensors["body.weight"]
            kept = [KEPT[keep](tensor)]
            del tensor
            for _ in range(2):
                with pytest.raises(busync.LoanInUse) as caught:
                    await loan.publish()
                assert caught.value.names == ("body.weight",)
                del caught
            assert sub.version == 0
            kept.clear()
            assert (await loan.publish()).version == 1
        patterns.check((await sub.next(timeout=5)).tensors, 1, 1)


async def test_a_cycle_is_no_use() -> None:
    async with busync.Publisher("p") as pub, pub.loan(like=patterns.Module()) as loan:
        _fill(loan, 1)
        knot: list[object] = [loan.tensors["conv"]]
        knot.append(knot)
        del knot
        assert (await loan.publish()).version == 1


async def test_given_back_unused() -> None:
    async with busync.Publisher("p", max_segments=2) as pub:
        for _ in range(5):
            async with pub.loan(like=patterns.Module()) as loan:
                _fill(loan, 1)
        with pytest.raises(busync.UsageError, match="over"):
            loan.tensors  # noqa: B018
        with pytest.raises(busync.UsageError, match="over"):
            await loan.publish()
        assert pub.status()["topics"]["default"]["segments"] <= 1


async def test_given_back_while_referenced_its_memory_is_never_used_again() -> None:
    async with busync.Publisher("p", max_segments=2) as pub, busync.Subscriber("p") as sub:
        async with pub.loan(like=patterns.Module()) as loan:
            mine = loan.tensors["body.weight"]
        for version in range(1, 6):
            await pub.publish(patterns.state(1, version))
            snapshot = await sub.next(timeout=5)
            patterns.fill(mine, -1)
            patterns.check(snapshot.tensors, 1, version)
            del snapshot
        assert bool((mine.cpu() == -1).all())
    assert bool((mine.cpu() == -1).all())


async def test_after_loan_in_use_it_can_be_given_back() -> None:
    async with busync.Publisher("p", max_segments=2) as pub:
        async with pub.loan(like=patterns.Module()) as loan:
            mine = loan.tensors["conv"]
            with pytest.raises(busync.LoanInUse):
                await loan.publish()
        assert pub.status()["topics"]["default"]["segments"] == 0
        patterns.fill(mine, 3)


async def test_loans_that_hold_every_segment() -> None:
    async with busync.Publisher("p", max_segments=2) as pub:
        async with pub.loan(like=patterns.Module()) as one, pub.loan(like=patterns.Module()) as two:
            with pytest.raises(busync.PoolExhausted):
                await pub.publish(patterns.state(1, 1))
            with pytest.raises(busync.PoolExhausted):
                async with pub.loan(like=patterns.Module()):
                    pass
            _fill(two, 1)
            assert (await two.publish()).version == 1
            _fill(one, 2)
            assert (await one.publish()).version == 2
        assert (await pub.publish(patterns.state(1, 3))).version == 3


async def test_wait_and_twice() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        async with pub.loan(like=patterns.Module()) as loan:
            with pytest.raises(busync.UsageError, match="entered already"):
                await loan.__aenter__()
            _fill(loan, 1)
            with pytest.raises(busync.OptionError):
                await loan.publish(values={"w": torch.ones(3)})  # type: ignore[dict-item]
            report = await loan.publish(wait="all", timeout=0.05)
            assert report.pending == ("a",)
            with pytest.raises(busync.UsageError, match="over"):
                await loan.publish()
        assert (await sub.next(timeout=5)).version == 1
        await soon(lambda: pub.status()["subscribers"][0]["leases"] == [])
