"""What can be published, and how it arrives: publisher and subscriber in one process, on both kinds of loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import busync
from busync.handles.tensors import TORCH_DTYPES
from tests.support import patterns
from tests.support.roles import soon

pytestmark = pytest.mark.asyncio
devices = pytest.mark.devices


async def _through(source: Any, **named: Any) -> tuple[busync.Snapshot, busync.PublishReport]:
    """What a source looks like at the other end. The snapshot outlives its session."""
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        report = await pub.publish(source, **named)
        snapshot = await sub.next(timeout=5)
        snapshot.tensors  # noqa: B018  # mapped while the session lives
    return snapshot, report


@devices
async def test_in_place(runtime_dir: object) -> None:
    source = patterns.state(1, 1)
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        report = await pub.publish(source, label="first")
        assert (report.version, report.waited) == (1, 0.0)
        for tensor in source.values():
            patterns.fill(tensor, -1)
        snapshot = await sub.next(timeout=5)
        assert (snapshot.version, snapshot.label, snapshot.topic) == (1, "first", "default")
        assert snapshot.incarnation == pub.incarnation
        assert patterns.check(snapshot.tensors, 1, 1) > 60_000
        assert all(type(t) is torch.Tensor and not t.requires_grad for t in snapshot.tensors.values())


async def test_an_edit_in_place_stays_here() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as one, busync.Subscriber("p") as two:
        await pub.publish(patterns.state(1, 1))
        mine, theirs = await one.next(timeout=5), await two.next(timeout=5)
        for tensor in mine.tensors.values():
            tensor.fill_(-1)
        patterns.check(theirs.tensors, 1, 1)
        again = await two.latest(timeout=5)
        patterns.check(again.tensors, 1, 1)


@devices
async def test_assigned_to_a_model_the_old_version_goes_by_itself() -> None:
    model = patterns.Module()
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        for version in range(1, 8):
            await pub.publish(patterns.state(3, version))
            snapshot = await sub.next(timeout=5)
            model.load_state_dict(dict(snapshot.tensors), assign=True)
            del snapshot
            patterns.check(model.state_dict(), 3, version)
            await soon(lambda: len(pub.status()["subscribers"][0]["leases"]) == 1)
        assert pub.status()["topics"]["default"]["segments"] <= 3
    patterns.check(model.state_dict(), 3, 7)  # also without a session


@devices
@pytest.mark.parametrize("shapes", [patterns.SMALL, patterns.SHAPES], ids=["inline", "off the loop"])
async def test_load_into(shapes: dict[str, tuple[int, ...]]) -> None:
    one, two = patterns.Module(shapes), patterns.Module(shapes)
    parameters = [id(p) for p in one.parameters()]
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        await pub.publish(patterns.state(1, 1, shapes))
        snapshot = await sub.next(timeout=5)
        await snapshot.load_into(one, two)
        for module in (one, two):
            patterns.check(module.state_dict(), 1, 1, shapes)
        assert [id(p) for p in one.parameters()] == parameters
        assert all(p.requires_grad for p in one.parameters())
        with pytest.raises(busync.UsageError, match="released"):
            snapshot.tensors  # noqa: B018
        await soon(lambda: pub.status()["subscribers"][0]["version"] == 1)
        assert pub.status()["subscribers"][0]["leases"] == []


@devices
async def test_a_load_inside_a_block_keeps_the_snapshot() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(patterns.state(1, 1))
        async with await sub.next(timeout=5) as snapshot:
            await snapshot.load_into(patterns.Module())
            patterns.check(snapshot.tensors, 1, 1)
        with pytest.raises(busync.UsageError):
            snapshot.tensors  # noqa: B018


@devices
async def test_a_load_after_tensors_keeps_the_snapshot() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(patterns.state(1, 1))
        snapshot = await sub.next(timeout=5)
        tensors = snapshot.tensors
        await snapshot.load_into(patterns.Module())
        assert snapshot.tensors is tensors
        patterns.check(tensors, 1, 1)


@devices
async def test_load_with_other_names() -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor = patterns.Module(patterns.SMALL)

    policy = Policy()
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(patterns.state(1, 1, patterns.SMALL))
        await (await sub.next(timeout=5)).load_into(policy, map=lambda name: f"actor.{name}")
    patterns.check(policy.actor.state_dict(), 1, 1, patterns.SMALL)


async def test_nested_containers_and_plain_values() -> None:
    source = {
        "actor": {"layers": [{"w": torch.ones(3)}, {"w": torch.full((2, 2), 2.0)}]},
        "critic": OrderedDict(v=torch.zeros(())),
        "step": 17, "rate": 0.25, "name": "run-3", "done": False, "nothing": None, "blob": b"\x00\xff",
    }  # fmt: skip
    snapshot, _ = await _through(source)
    assert list(snapshot.tensors) == ["actor.layers.0.w", "actor.layers.1.w", "critic.v"]
    assert torch.equal(snapshot.tensors["actor.layers.1.w"], torch.full((2, 2), 2.0))
    assert snapshot.values == {
        "step": 17, "rate": 0.25, "name": "run-3", "done": False, "nothing": None, "blob": b"\x00\xff",
    }  # fmt: skip


async def test_values_of_any_size_travel_with_versions_that_know_their_layout() -> None:
    """Small ones by the door, large ones by the bus, which are not kept in one order."""
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        for version, nbytes in enumerate((10, 10, 40_000, 10, 900_000, 40_000, 10), 1):
            await pub.publish({"w": torch.full((3,), float(version))}, values={"blob": b"x" * nbytes})
            snapshot = await sub.next(timeout=5)
            assert (snapshot.version, len(snapshot.values["blob"])) == (version, nbytes)
            assert snapshot.tensors["w"].tolist() == [version] * 3


@devices
async def test_plain_values_beside_a_module() -> None:
    """They join those of the source; what cannot travel is refused and burns no version."""
    module = torch.nn.Linear(1, 1)
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(module, values={"step": 3, "rate": 0.1})
        snapshot = await sub.next(timeout=5)
        assert snapshot.values == {"step": 3, "rate": 0.1}
        await snapshot.load_into(torch.nn.Linear(1, 1))
        await pub.publish({"w": torch.zeros(1), "step": 4}, values={"rate": 0.2})
        assert (await sub.next(timeout=5)).values == {"step": 4, "rate": 0.2}
        with pytest.raises(busync.OptionError, match="weight"):
            await pub.publish(module, values={"weight": torch.ones(1)})  # type: ignore[dict-item]
        with pytest.raises(busync.ExportError, match="weight"):
            await pub.publish(module, values={"weight": 1})
        with pytest.raises(busync.ExportError, match="large"):
            await pub.publish(module, values={"large": bytes(2**21)})
        assert (await pub.publish(module)).version == 3


@devices
async def test_pairs() -> None:
    snapshot, _ = await _through((name, tensor) for name, tensor in patterns.state(1, 1).items())
    patterns.check(snapshot.tensors, 1, 1)


async def test_only_values() -> None:
    snapshot, _ = await _through({"step": 5})
    assert len(snapshot.tensors) == 0
    assert snapshot.nbytes == 0
    assert snapshot.values == {"step": 5}


@devices
async def test_only_empty_tensors() -> None:
    snapshot, _ = await _through({"a": torch.empty(0), "b": torch.empty(3, 0, dtype=torch.int8)})
    assert snapshot.tensors["a"].shape == (0,)
    assert (snapshot.tensors["b"].shape, snapshot.tensors["b"].dtype) == ((3, 0), torch.int8)


@devices
@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=TORCH_DTYPES)
async def test_every_dtype(dtype: torch.dtype) -> None:
    raw = torch.arange(48, dtype=torch.uint8).mul_(5)
    if dtype is torch.bool:
        raw.remainder_(2)
    source = raw.view(dtype).reshape(3, -1)
    snapshot, _ = await _through({"t": source, "turned": source.t(), "one": source.reshape(-1)[0]})
    for name, size in (("t", source.shape), ("turned", source.t().shape), ("one", ())):
        assert (snapshot.tensors[name].dtype, snapshot.tensors[name].shape) == (dtype, size)
    for found in (snapshot.tensors["t"], snapshot.tensors["turned"].t()):
        assert torch.equal(found.view(-1).view(torch.uint8), raw)
    assert torch.equal(snapshot.tensors["one"].view(1).view(torch.uint8), raw[: dtype.itemsize])


async def test_tied_sliced_and_strange_tensors() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    complex_ = torch.tensor([1 + 2j, 3 - 4j])
    image = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    source = {
        "whole": whole, "tied": whole, "window": whole[1:3, 2:4],
        "slice": torch.arange(100.0)[::10], "expanded": torch.tensor([1.0]).expand(1000), "image": image,
        "conj": complex_.conj(), "neg": complex_.conj().imag,
        "grad": (torch.ones(3, requires_grad=True) * 2),
    }  # fmt: skip
    snapshot, _ = await _through(source)
    for name, wanted in source.items():
        assert torch.equal(snapshot.tensors[name], wanted.detach()), name
    assert snapshot.tensors["whole"].data_ptr() == snapshot.tensors["tied"].data_ptr()
    snapshot.tensors["whole"][1, 2] = -5
    assert snapshot.tensors["window"][0, 0] == -5
    assert snapshot.tensors["image"].stride() == image.stride()
    assert snapshot.nbytes < 2000


async def test_a_module_with_buffers() -> None:
    norm = nn.BatchNorm2d(2)
    assert norm.running_mean is not None
    norm.running_mean.fill_(3)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), norm)
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(model)
        snapshot = await sub.next(timeout=5)
        assert list(snapshot.tensors) == list(model.state_dict())
        flags = {spec.name: (spec.parameter, spec.requires_grad) for spec in snapshot.manifest.tensors}
        assert flags["0.weight"] == (True, True)
        assert flags["1.running_mean"] == (False, False)
        other = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        await snapshot.load_into(other)
        for name, tensor in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor), name


async def test_what_cannot_be_published_is_refused_by_name_and_burns_no_version() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        for bad in (torch.eye(3).to_sparse(), torch.empty(3, device="meta"), object()):
            with pytest.raises(busync.ExportError, match=r"'deep\.bad'"):
                await pub.publish({"good": torch.ones(3), "deep": {"bad": bad}})
        assert sub.version == 0
        assert (await pub.publish({"good": torch.ones(3)})).version == 1
        assert (await sub.next(timeout=5)).version == 1


@devices
async def test_the_layout_may_change_with_every_version() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        for version in range(1, 12):
            shapes = {f"t{i}": (version * 100, i + 1) for i in range(version % 4 + 1)}
            await pub.publish(patterns.state(1, version, shapes))
            snapshot = await sub.next(timeout=5)
            patterns.check(snapshot.tensors, 1, version, shapes)
            del snapshot


@devices
async def test_many_small_tensors() -> None:
    shapes: dict[str, tuple[int, ...]] = {f"layer.{i}": (3,) for i in range(3000)}
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        for version in (1, 2):
            await pub.publish(patterns.state(1, version, shapes))
            snapshot = await sub.next(timeout=10)
            await asyncio.to_thread(patterns.check, snapshot.tensors, 1, version, shapes)
            del snapshot


@devices
async def test_digests() -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p", digests=True) as sub:
        for version in (1, 2):
            await pub.publish(patterns.state(1, version))
            snapshot = await sub.next(timeout=5)
            assert await snapshot.digest(5) == busync.content_digest(snapshot.tensors)
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(patterns.state(1, 1))
        with pytest.raises(busync.UsageError, match="digests=True"):
            await (await sub.next(timeout=5)).digest()


@devices
async def test_released_from_a_cycle_and_from_another_thread() -> None:
    class Knot:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.self = tensor, self

    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        for version in range(1, 7):
            await pub.publish(patterns.state(1, version))
            snapshot = await sub.next(timeout=5)
            if version % 2:
                Knot(snapshot.tensors["conv"])
                del snapshot
                gc.collect()
            else:
                box = [snapshot.tensors["conv"][0]]
                del snapshot
                thread = threading.Thread(target=box.clear)
                thread.start()
                thread.join()
            await soon(lambda: pub.status()["subscribers"][0]["leases"] == [])
        assert pub.status()["topics"]["default"]["segments"] <= 2
