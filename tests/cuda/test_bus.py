"""Publisher and subscriber on the fake GPU: the whole of busync, with only the device replaced.

Both are in one process here, and use the GPU as two processes would, unless a test says otherwise.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import nn

import busync
from busync.errors import AttachError, DeviceError, LoanInUse, OptionError
from busync.handles import gpus
from busync.handles.cuda_import import CudaImporter
from busync.handles.cuda_memory import WORN_EXPORTS, CudaExporter
from tests.cuda.fake import FakeGpu, FakeProcess, FakeStream
from tests.support.mutants import Mutant

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("runtime_dir")]

State = dict[str, torch.Tensor]
IMPORT, MEMORY = "busync/handles/cuda_import.py", "busync/handles/cuda_memory.py"
PUBLISHING, SERVER, SESSION = "busync/publishing.py", "busync/server.py", "busync/session.py"
HOLDS, LINKS = "busync/holds.py", "busync/links.py"
MUTANTS = {
    "test_a_version_is_on_the_cpu_and_on_two_gpus": Mutant(
        "busync/handles/mixed.py", "GroupSpec(old.offset_bytes, old.nbytes, memory)",
        "GroupSpec(old.offset_bytes, old.nbytes, min(memory, 1))", "a tensor is read on another device",
    ),
    "test_a_segment_is_not_written_while_a_tensor_of_it_lives": Mutant(
        HOLDS, "memory.map(self.manifest, partial(_let_go, self))", "memory.map(self.manifest, int)",
        "a lease ends with its snapshot, and not with its tensors",
    ),
    "test_a_release_waits_for_what_the_reader_has_queued": Mutant(
        IMPORT, "                self.backend.synchronize(self._ended[0][0].index)\n", "",
        "Release is said while the device still reads",
    ),
    "test_a_publish_waits_for_what_the_caller_has_queued": (
        Mutant(
            PUBLISHING, "before = [event for index, event in queued.items() if index == on_device.index]",
            "before: list[CudaEvent] = []", "weights are copied before the learner has computed them",
        ),
        Mutant(
            MEMORY, "self.write(plan, after).synchronize()", "self.write(plan, after)",
            "a version is announced while it is being copied",
        ),
    ),
    "test_a_loan_is_written_on_the_gpu": Mutant(
        PUBLISHING, "partial(segment.wait, list(queued.values()))", "partial(segment.wait, [])",
        "a loan is announced before the learner has written it",
    ),
    "test_a_reader_on_another_device_gets_a_copy_there": Mutant(
        HOLDS, "if memory.foreign:", "if False:", "a reader uses a device that it was told not to use",
    ),
    "test_all_or_nothing_when_one_device_is_full": Mutant(
        "busync/pool.py", "        except BaseException:\n            made.drop()\n            raise\n        finally",
        "        finally", "memory of one device is lost when another one is full",
    ),
    "test_a_reader_that_opens_nothing_costs_nothing_after_its_session": (
        Mutant(
            IMPORT, "                self._importer.give_back(self.handle)\n", "                pass\n",
            "an export that was never opened is never given back",
        ),
        Mutant(
            SESSION, "hears of the end\n            segment.close()\n", "hears of the end\n            pass\n",
            "the end of a session ends no export",
        ),
    ),
    "test_a_segment_that_was_exported_very_often_is_replaced": Mutant(
        LINKS, "if any(memory.worn for memory in segment.devices.values()):", "if False:",
        "events of a buffer pile up until torch stops the publisher",
    ),
    "test_a_relay_copies_and_says_so": Mutant(
        IMPORT, "if not opened.own]", "if opened.own]", "nobody learns that memory of another publisher was passed on",
    ),
}  # fmt: skip


class Machine:
    """A fake GPU with a publisher's process and a reader's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, visible: list[int] | None = None) -> None:
        self.gpu = FakeGpu()
        self.publisher = self.gpu.process()
        self.reader = self.gpu.process(visible)
        self.exporter = CudaExporter(self.publisher)
        self.importer = CudaImporter(CudaExporter(self.reader))
        monkeypatch.setattr(gpus, "exporter", lambda: self.exporter)
        monkeypatch.setattr(gpus, "importer", lambda: self.importer)
        monkeypatch.setattr(gpus, "releasing", lambda: self.importer.releasing)

    def put(self, tensor: torch.Tensor, index: int = 0, process: FakeProcess | None = None) -> torch.Tensor:
        """A tensor like this one on a device."""
        flat = (process or self.publisher).allocate(index, tensor.numel() * tensor.itemsize)
        there = flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        return there.copy_(tensor)

    def finished(self) -> None:
        """Nothing is left of what was published, and nothing went wrong that a real device would not show."""
        gc.collect()
        self.exporter.reap()
        assert self.gpu.trouble == []
        assert self.exporter.outstanding() == []
        assert (self.publisher.allocated, self.reader.allocated) == (0, 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(monkeypatch)
    yield made
    made.finished()


def weights(version: int) -> State:
    count = torch.arange(600).reshape(20, 30)
    return {
        "w": (count + version).to(torch.float32),
        "turned": (count * version).t(),
        "half": (count[:2] + version).to(torch.bfloat16),
        "flags": count[3] % (version + 1) == 0,
    }


def on_gpu(machine: Machine, state: State, index: int = 0) -> State:
    return {name: machine.put(tensor, index) for name, tensor in state.items()}


def same(found: Mapping[str, torch.Tensor], expected: State) -> bool:
    assert list(found) == list(expected)
    pairs = [(found[name], tensor) for name, tensor in expected.items()]
    return all(torch.equal(one, other) and one.stride() == other.stride() for one, other in pairs)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            gc.collect()
            await asyncio.sleep(0.002)


async def test_every_version_is_used_in_place_and_nothing_is_left(machine: Machine) -> None:
    source = on_gpu(machine, weights(0))
    async with busync.Publisher("p", max_segments=2) as pub, busync.Subscriber("p") as sub:
        for version in range(1, 12):
            for name, tensor in weights(version).items():
                source[name].copy_(tensor)
            report = await pub.publish(source, wait="none")
            assert report.version == version
            snapshot = await sub.next(timeout=5)
            assert same(snapshot.tensors, weights(version))
            assert machine.reader.index_of(snapshot.tensors["w"]) == 0
            assert machine.publisher.events <= 2, "one export per segment and session"
            del snapshot
        assert len(machine.gpu.opened_on) <= 2
    source.clear()


async def test_a_version_is_on_the_cpu_and_on_two_gpus(machine: Machine) -> None:
    host, first, second = weights(1), weights(2), weights(3)
    source: dict[str, object] = {}
    for name in host:
        source |= {f"c.{name}": host[name]}
        source |= {f"a.{name}": machine.put(first[name], 0), f"b.{name}": machine.put(second[name], 1)}
    source["tied"] = source["b.w"]
    source["none"] = torch.zeros(0, 3)
    async with busync.Publisher("p") as pub, busync.Subscriber("p", digests=True) as sub:
        await pub.publish(source, values={"step": 4})
        snapshot = await sub.next(timeout=5)
        tensors = snapshot.tensors
        assert list(tensors) == list(source)
        for name, tensor in source.items():
            assert isinstance(tensor, torch.Tensor)
            assert torch.equal(tensors[name], tensor)
            where = 1 if name.startswith("b.") or name == "tied" else 0 if name.startswith("a.") else None
            assert machine.reader.index_of(tensors[name]) == where
        assert tensors["tied"].data_ptr() == tensors["b.w"].data_ptr()
        assert snapshot.values == {"step": 4}
        assert snapshot.nbytes >= 3 * sum(tensor.numel() * tensor.itemsize for tensor in host.values())
        assert await snapshot.digest() == busync.content_digest(dict(tensors))
        del snapshot, tensors, tensor
    source.clear()


@pytest.mark.parametrize("place", [None, 0, 1])
async def test_it_is_loaded_into_a_module_wherever_that_is(machine: Machine, place: int | None) -> None:
    model = nn.Linear(8, 8)
    source = on_gpu(machine, {name: tensor.detach() for name, tensor in model.state_dict().items()})
    for tensor in source.values():
        tensor.fill_(7.0)
    if place is not None:
        for parameter in model.parameters():
            parameter.data = machine.put(parameter.data, place, machine.reader)
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="a") as sub:
        await pub.publish(source)
        await (await sub.next(timeout=5)).load_into(model)
        assert all(bool((parameter == 7.0).all()) for parameter in model.parameters())
        await pub.wait(1, "released", timeout=5)
    source.clear()
    del model, tensor
    if place is not None:
        del parameter


async def test_a_segment_is_not_written_while_a_tensor_of_it_lives(machine: Machine) -> None:
    source = on_gpu(machine, weights(1))
    async with busync.Publisher("p", max_segments=2, lease_timeout=30) as pub, busync.Subscriber("p") as sub:
        await pub.publish(source)
        kept = (await sub.next(timeout=5)).tensors["w"][2:4]
        source["w"].fill_(-1)
        await pub.publish(source)
        third = asyncio.create_task(pub.publish(source))
        await asyncio.sleep(0.05)
        assert not third.done(), "the only other segment is read"
        assert torch.equal(kept, weights(1)["w"][2:4])
        del kept
        assert (await third).version == 3
    source.clear()


async def test_a_release_waits_for_what_the_reader_has_queued(machine: Machine) -> None:
    source = on_gpu(machine, weights(1))
    result = torch.zeros(20, 30)
    async with busync.Publisher("p", max_segments=2, lease_timeout=30) as pub, busync.Subscriber("p") as sub:
        await pub.publish(source)
        tensors = (await sub.next(timeout=5)).tensors
        address, shape = tensors["w"].data_ptr(), tensors["w"].shape
        view = torch.frombuffer(_bytes_at(address, 2400), dtype=torch.float32).reshape(shape)
        machine.reader.current.queue(lambda: result.copy_(view))  # a kernel that reads later
        del tensors
        source["w"].fill_(-1)
        for _ in range(2):
            await pub.publish(source)
        assert torch.equal(result, weights(1)["w"])
    source.clear()


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


async def test_a_publish_waits_for_what_the_caller_has_queued(machine: Machine) -> None:
    source = on_gpu(machine, weights(1))
    machine.publisher.current.queue(lambda: source["w"].fill_(5.0))
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(source)
        assert bool(((await sub.next(timeout=5)).tensors["w"] == 5.0).all())
    source.clear()


async def test_a_loan_is_written_on_the_gpu(machine: Machine) -> None:
    like = on_gpu(machine, weights(0)) | {"host": torch.zeros(3)}
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        async with pub.loan(like=like) as loan:
            for name, tensor in weights(3).items():
                loan.tensors[name].copy_(tensor)
                assert machine.publisher.index_of(loan.tensors[name]) == 0
            kept = loan.tensors["w"]
            loan.tensors["host"].fill_(1.0)
            with pytest.raises(LoanInUse, match="'w'"):
                await loan.publish()
            del kept
            late = loan.tensors["half"].data_ptr()
            machine.publisher.current.queue(lambda: torch.frombuffer(_bytes_at(late, 2), dtype=torch.int16).fill_(0))
            await loan.publish()
        snapshot = await sub.next(timeout=5)
        expected = weights(3) | {"host": torch.ones(3)}
        expected["half"][0, 0] = 0.0
        assert same(snapshot.tensors, expected)
        del snapshot
    like.clear()


async def test_a_loan_that_is_given_back_is_used_again(machine: Machine) -> None:
    like = on_gpu(machine, weights(0))
    async with busync.Publisher("p", max_segments=2) as pub:
        for _ in range(5):
            async with pub.loan(like=like):
                pass
            gc.collect()
        assert machine.publisher.given_out == len(like) + 5 + 1, "a fresh segment each time, and the probe"
    like.clear()


async def test_a_subscriber_in_the_publishers_process_gets_the_original_memory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = CudaImporter(machine.exporter)
    monkeypatch.setattr(gpus, "importer", lambda: here)
    monkeypatch.setattr(gpus, "releasing", lambda: here.releasing)
    source = on_gpu(machine, weights(1))
    async with busync.Publisher("p", max_segments=2) as pub, busync.Subscriber("p") as sub:
        for version in range(1, 6):
            await pub.publish(source)
            snapshot = await sub.next(timeout=5)
            assert snapshot.version == version
            assert same(snapshot.tensors, weights(1))
            del snapshot
        assert machine.gpu.opened_on == []
    source.clear()


async def test_a_reader_on_another_device_gets_a_copy_there(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, visible=[1])
    monkeypatch.setattr(gpus, "device_of", lambda _: machine.gpu.devices[1])
    source = on_gpu(machine, weights(1))
    async with busync.Publisher("p", max_segments=2, lease_timeout=30) as pub, busync.Subscriber("p", device=5) as sub:
        await pub.publish(source)
        snapshot = await sub.next(timeout=5)
        tensors = snapshot.tensors
        assert same(tensors, weights(1))
        assert machine.reader.index_of(tensors["w"]) == 0
        kept = tensors["w"]
        assert machine.gpu.opened_on == [(machine.gpu.devices[0], machine.gpu.devices[1])]
        del snapshot, tensors
        source["w"].fill_(-1)
        for _ in range(3):  # a copy holds no lease
            await pub.publish(source)
        assert torch.equal(kept, weights(1)["w"])
        del kept
    source.clear()
    machine.finished()


async def test_who_does_not_see_the_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, visible=[1])
    source = on_gpu(machine, weights(1))
    async with busync.Publisher("p") as pub, busync.Subscriber("p", name="blind") as sub:
        await pub.publish(source)
        snapshot = await sub.next(timeout=5)
        with pytest.raises(AttachError, match=machine.gpu.devices[0]):
            snapshot.tensors  # noqa: B018
        report = await pub.publish(source, wait="none")
        with pytest.raises(busync.WaitTimeout, match="blind"):
            await pub.wait(1, "acked", timeout=0.2)
        state = pub.status()["subscribers"][0]
        assert machine.gpu.devices[0] in state["reason"]
        assert report.version == 2
        del snapshot
    source.clear()
    machine.finished()


async def test_who_cannot_open_it_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, visible=[1])
    source = on_gpu(machine, weights(1))
    async with busync.Publisher("p", max_segments=2, lease_timeout=30) as pub, busync.Subscriber("p") as sub:
        for version in range(1, 6):
            await pub.publish(source)
            snapshot = await sub.next(timeout=5)
            assert snapshot.version == version
            with pytest.raises(AttachError):
                snapshot.tensors  # noqa: B018
            del snapshot
    source.clear()
    machine.finished()


async def test_two_threads_open_a_segment_once(machine: Machine) -> None:
    source = on_gpu(machine, weights(1))
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(source)
        asked = [await sub.next(timeout=5), await sub.latest(timeout=5)]
        rebuild, begun, go_on = machine.reader.rebuild, threading.Event(), threading.Event()

        def slowly(arguments: tuple[object, ...]) -> torch.Tensor:
            begun.set()
            go_on.wait(5)
            return rebuild(arguments)

        machine.reader.rebuild = slowly  # type: ignore[method-assign]
        one = asyncio.create_task(asyncio.to_thread(lambda: same(asked[0].tensors, weights(1))))
        await asyncio.to_thread(begun.wait, 5)
        two = asyncio.create_task(asyncio.to_thread(lambda: same(asked[1].tensors, weights(1))))
        go_on.set()
        assert await one
        assert await two
        assert pub.status()["counters"].get("nacks", 0) == 0
        asked.clear()
    source.clear()


async def test_memory_that_cannot_be_read_is_counted_down_once(machine: Machine) -> None:
    source = on_gpu(machine, weights(1))

    def fail(_: torch.Tensor) -> bytes:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand much more")

    machine.reader.read = fail  # type: ignore[method-assign, assignment]
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(source)
        snapshot = await sub.next(timeout=5)
        for _ in range(2):
            with pytest.raises(AttachError, match=r"cannot read it .CUDA error: an illegal memory access"):
                snapshot.tensors  # noqa: B018
        del snapshot
    source.clear()


async def test_ctrl_c_inside_an_opening_counts_nothing_down_twice(machine: Machine) -> None:
    source = on_gpu(machine, weights(1))

    def strike(_: torch.Tensor) -> bytes:
        raise KeyboardInterrupt

    read, machine.reader.read = machine.reader.read, strike  # type: ignore[method-assign, assignment]
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(source)
        snapshot = await sub.next(timeout=5)
        with pytest.raises(KeyboardInterrupt):
            snapshot.tensors  # noqa: B018
        gc.collect()
        machine.reader.read = read  # type: ignore[method-assign]
        with pytest.raises(AttachError, match="interrupted"):
            snapshot.tensors  # noqa: B018
        del snapshot
    source.clear()


async def test_a_layout_may_lie_otherwise_in_its_source(machine: Machine) -> None:
    """Two sources have one layout, and another of their tensors has gaps: what is copied as it lies is another one."""
    room = machine.put(torch.zeros(4, 8))
    dense = machine.put(torch.zeros(4, 4))
    async with busync.Publisher("p", max_segments=2) as pub, busync.Subscriber("p") as sub:
        for version in range(1, 9):
            dense.fill_(float(version))
            room.fill_(float(version))
            gaps = room[:, :4]
            pair = (dense, gaps) if version % 4 < 2 else (gaps, dense)
            source = {"x": pair[0], "y": pair[1]} if version % 3 else {"x": dense, "y": dense.clone()}
            await pub.publish(source)
            tensors = (await sub.next(timeout=5)).tensors
            assert bool((tensors["x"] == version).all())
            assert bool((tensors["y"] == version).all() or version % 3 == 0)
            del tensors, source, pair, gaps
    del room, dense


async def test_a_copy_from_another_device_waits_for_what_reads_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, visible=[1])
    monkeypatch.setattr(gpus, "device_of", lambda _: machine.gpu.devices[1])
    source = on_gpu(machine, weights(1))
    async with busync.Publisher("p") as pub, busync.Subscriber("p", device=0) as sub:
        await pub.publish(source)
        snapshot = await sub.next(timeout=5)
        read: list[bool] = []
        machine.reader.current.queue(lambda: read.append(True))
        copy = FakeStream.copy

        def late(stream: FakeStream, target: torch.Tensor, source: torch.Tensor) -> None:
            stream.queue(lambda: read.append(False) if not read else None)
            copy(stream, target, source)

        monkeypatch.setattr(FakeStream, "copy", late)
        assert same(snapshot.tensors, weights(1))
        assert read == [True], "it was copied over what a kernel had still to read"
        del snapshot
    source.clear()
    monkeypatch.undo()
    machine.finished()


async def test_a_load_waits_for_what_the_caller_has_queued(machine: Machine) -> None:
    model = nn.Linear(8, 8).requires_grad_(False)
    seen: list[float] = []
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish({name: torch.full_like(tensor, 7.0) for name, tensor in model.state_dict().items()})
        snapshot = await sub.next(timeout=5)
        before = float(model.weight[0, 0])
        machine.publisher.current.queue(lambda: seen.append(float(model.weight[0, 0])))  # a kernel that reads later
        await snapshot.load_into(model)
        assert seen == [before]
        assert bool((model.weight == 7.0).all())


async def test_a_gpu_that_fails_is_named(machine: Machine) -> None:
    source = on_gpu(machine, weights(1))
    model = nn.Linear(2, 2)
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish({name: machine.put(tensor) for name, tensor in model.state_dict().items()})
        snapshot = await sub.next(timeout=5)

        def fail(_: int) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered\nand much more")

        synchronize, machine.reader.synchronize = machine.reader.synchronize, fail  # type: ignore[method-assign, assignment]
        with pytest.raises(DeviceError, match=r"failed .CUDA error: device-side assert triggered."):
            await snapshot.load_into(model)
        machine.reader.synchronize = synchronize  # type: ignore[method-assign]
        await until(lambda: "device-side assert" in pub.status()["subscribers"][0]["reason"])
        del snapshot
    source.clear()


async def test_a_gpu_whose_memory_cannot_be_shared_is_refused_and_the_cpu_works_on(machine: Machine) -> None:
    machine.publisher.caching = False
    source = on_gpu(machine, weights(1))
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        with pytest.raises(DeviceError, match="caching allocator"):
            await pub.publish(source)
        await pub.publish(weights(1))
        snapshot = await sub.next(timeout=5)
        assert snapshot.version == 1
        assert same(snapshot.tensors, weights(1))
        del snapshot
    source.clear()


async def test_all_or_nothing_when_one_device_is_full(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.cuda.fake.TOTAL_BYTES", 1 << 16)
    source: dict[str, object] = {"host": torch.ones(3), "a": machine.put(torch.ones(4), 0)}
    filler = machine.publisher.allocate(1, (1 << 16) - 16384)
    source["b"] = machine.put(torch.ones(2048), 1)
    async with busync.Publisher("p") as pub:
        before = machine.publisher.allocated
        with pytest.raises(busync.AllocationError) as caught:
            await pub.publish(source)
        assert machine.publisher.allocated == before, "whoever keeps the error keeps no memory"
        del caught
        del filler
        assert (await pub.publish(source)).version == 1
    source.clear()


async def test_a_reader_that_opens_nothing_costs_nothing_after_its_session(machine: Machine) -> None:
    source = on_gpu(machine, weights(1))
    async with busync.Publisher("p") as pub:
        for _ in range(3):
            async with busync.Subscriber("p") as sub:
                await pub.publish(source)
                await sub.next(timeout=5)
        await until(lambda: machine.exporter.outstanding() == [])
    source.clear()


@pytest.mark.blocks_loop
async def test_an_export_that_its_reader_never_looked_at_costs_nothing_after_its_session(machine: Machine) -> None:
    """It arrived, and the reader's process lives on: nobody else will ever count it down."""
    source = on_gpu(machine, weights(1))
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        asking = asyncio.create_task(sub.next(timeout=5))
        await until(lambda: pub._server.core.sessions and sub._waiters)  # type: ignore[union-attr]
        await asyncio.sleep(0.05)
        blocked = pub._publish(source, "default", "", None, "none", 5.0)
        blocked.block()  # this loop stands still while the version is sent
        assert pub.status()["exports"] == 1
        assert sub._session is not None
        sub._session.close()  # as it ends when its connection breaks
        await until(lambda: machine.exporter.outstanding() == [])
        asking.cancel()
        del blocked
    source.clear()


async def test_a_segment_that_was_exported_very_often_is_replaced(machine: Machine) -> None:
    source = on_gpu(machine, weights(1))
    async with busync.Publisher("p", max_segments=2) as pub:
        await pub.publish(source)
        (segment,) = pub._server.pool._segments.values()  # type: ignore[union-attr]
        (memory,) = segment.devices.values()
        memory.exports = WORN_EXPORTS - 1
        async with busync.Subscriber("p") as sub:
            assert same((await sub.next(timeout=5)).tensors, weights(1))
            await pub.publish(source)
            assert same((await sub.next(timeout=5)).tensors, weights(1))
            await pub.publish(source)
            assert memory.dropped
            assert same((await sub.next(timeout=5)).tensors, weights(1))
    source.clear()


async def test_a_relay_copies_and_says_so(machine: Machine) -> None:
    source = on_gpu(machine, weights(1))
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub, busync.Publisher("q") as relay:
        await pub.publish(source)
        snapshot = await sub.next(timeout=5)
        with pytest.MonkeyPatch.context() as patch:
            process = CudaExporter(machine.reader)
            patch.setattr(gpus, "exporter", lambda: process)
            patch.setattr(gpus, "_importer", machine.importer)
            await relay.publish(snapshot.tensors)
            assert relay.status()["counters"]["relayed"] == 1
            del snapshot
            await relay.close()
    source.clear()


async def test_status_says_what_is_on_which_device(machine: Machine) -> None:
    source: dict[str, object] = {**on_gpu(machine, weights(1), 1), "host": torch.ones(3)}
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish(source)
        snapshot = await sub.next(timeout=5)
        assert len(snapshot.tensors) == 5
        status = pub.status()
        device = machine.gpu.devices[1]
        (version,) = status["topics"]["default"]["versions"]
        assert version["devices"].keys() == {device}
        assert status["topics"]["default"]["devices"] == version["devices"]
        assert status["exports"] == 1
        del snapshot
    source.clear()


@pytest.mark.parametrize("device", ["cpu", "cuda:-1", -1, 1.5, "gpu", True])
async def test_an_option_that_names_no_device(device: object) -> None:
    with pytest.raises(OptionError, match="device"):
        busync.Subscriber("p", device=device)  # type: ignore[arg-type]
