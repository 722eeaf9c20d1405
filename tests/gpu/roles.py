"""What the processes of the GPU tests do: one exports, others import. Copies only: the emulator has no kernels.

Each class has variants with one thing wrong, for the tests of the tests.
"""

from __future__ import annotations

import gc
import os
import time
from functools import cache
from typing import Any

import torch

import busync
from busync.handles import Flat
from busync.handles.cuda import CudaHandle, decode_handle, encode_handle
from busync.handles.cuda_backend import TorchCuda
from busync.handles.cuda_import import CudaImporter, Import, ReceivedSegment, _Use
from busync.handles.cuda_layout import plan_cuda
from busync.handles.cuda_memory import CudaExporter, CudaSegment
from busync.handles.cuda_reader import Reader
from busync.manifest import Manifest
from tests.support.gpu import emulator_stat
from tests.support.roles import Role

Sent = dict[str, Any]  #: a handle on its way
NBYTES = 1 << 20


def source(version: int) -> dict[str, torch.Tensor]:
    """A state in which every element tells its version, its tensor and its place, as far as its dtype can."""
    count = torch.arange(64 * 48).reshape(64, 48)
    long = count * 1000 + version
    return {
        "long": long,
        "tied": long,
        "part": long[2:4],
        "turned": (count % 31 * 8 + version % 8).to(torch.float32).t(),
        "half": (count[:3] % 97 + version % 128).to(torch.bfloat16),
        "eight": (count[0] % 8 + version % 8).to(torch.float8_e4m3fn),
        "bools": (count[1] + version) % 3 == 0,
        "complex": torch.complex(count[2].to(torch.float32), torch.full((48,), float(version))),
        "scalar": torch.tensor(version, dtype=torch.int32),
        "none": torch.zeros(0, 5),
    }


@cache
def manifest() -> Manifest:
    return plan_cuda(Flat(source(0))).manifest


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Element by element, and in shape, strides and dtype."""
    if (left.shape, left.stride(), left.dtype) != (right.shape, right.stride(), right.dtype):
        return False
    if left.numel() == 0:
        return True
    left, right = (tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in (left, right))
    return torch.equal(left, right)


class GpuRole(Role):
    WATCHED = False

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        os.environ.update(environment or {})
        super().__init__()

    def stop(self) -> None:
        gc.collect()

    def left(self) -> str:
        return ""  # torch keeps descriptors of the device; what counts is asked for by name

    def allocated(self, index: int = 0) -> int:
        gc.collect()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        return torch.cuda.memory_allocated(index)

    def stats(self) -> dict[str, int]:
        """What must not grow."""
        gc.collect()
        names = ("allocs", "imports", "ipc_events", "imported_events")
        descriptors = len(os.listdir("/proc/self/fd"))
        reserved = torch.cuda.memory_reserved()
        return {**{name: emulator_stat(name) for name in names}, "fds": descriptors, "reserved": reserved}


class Exporter(GpuRole):
    """A publisher's side."""

    make = CudaExporter

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        super().__init__(environment)
        self.exporter = self.make(TorchCuda())
        self.segments: dict[int, CudaSegment] = {}
        self.importer = CudaImporter(self.exporter)
        self.others: list[torch.Tensor] = []

    def create(self, number: int, nbytes: int = NBYTES, index: int = 0) -> None:
        self.segments[number] = self.exporter.create(self.exporter.device(index), nbytes)

    def write(self, number: int, version: int) -> None:
        segment = self.segments[number]
        weights = {name: tensor.to(f"cuda:{segment.index}") for name, tensor in source(version).items()}
        weights |= {"tied": weights["long"], "part": weights["long"][2:4]}
        after = [self.exporter.backend.mark(segment.index)]
        segment.write(plan_cuda(Flat(weights)), after).synchronize()

    def export(self, number: int, pid: int, name: str) -> Sent:
        return encode_handle(self.segments[number].export(Reader.of(pid, name)))

    def drop(self, number: int) -> None:
        self.segments.pop(number).drop()

    def reap(self) -> list[str]:
        gc.collect()
        return [export.reader.name for export in self.exporter.reap()]

    def outstanding(self) -> list[str]:
        self.exporter.reap()
        return [export.reader.name for export in self.exporter.outstanding()]

    def count(self, sent: Sent) -> int | None:
        return self.exporter.backend.count(sent["counter"], sent["slot"])

    def occupy(self, nbytes: int, value: int) -> None:
        """Allocate as the learner would, and fill it."""
        made = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        made.copy_(torch.full((nbytes,), value, dtype=torch.uint8))
        torch.cuda.synchronize()
        self.others.append(made)

    def subscribe_here(self, number: int, version: int) -> tuple[bool, bool]:
        """A subscriber in this very process: whether it sees the version, and in the publisher's own memory."""
        segment = self.segments[number]
        handle = segment.export(Reader.of(os.getpid(), "here"))
        received = ReceivedSegment(self.importer, number, handle, segment.nbytes)
        ended: list[int] = []
        builder = received.map(manifest(), lambda: ended.append(version))
        right = all(same(builder.build(spec).cpu(), source(version)[spec.name]) for spec in manifest().tensors)
        first = min(builder.build(spec).data_ptr() for spec in manifest().tensors if 0 not in spec.size)
        own = first == segment.flat.data_ptr()
        builder.drop()
        received.close()
        del builder
        wait_for(lambda: ended == [version])
        return right, own


class Importer(GpuRole):
    """A reader's side."""

    make = CudaImporter

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        super().__init__(environment)
        self.importer = self.make(CudaExporter(TorchCuda()))
        self.received: dict[object, ReceivedSegment] = {}
        self.held: dict[int, dict[str, torch.Tensor]] = {}
        self.ended: list[int] = []

    def receive(self, number: object, sent: Sent, nbytes: int = NBYTES, *, on_own: bool = False) -> None:
        on = next(iter(TorchCuda().devices())) if on_own else None
        self.received[number] = ReceivedSegment(self.importer, 1, decode_handle(1, nbytes, sent), nbytes, on)

    def open(self, number: object) -> None:
        self.received[number].open()

    def take(self, number: object, version: int) -> None:
        """Hold a version in place."""
        builder = self.received[number].map(manifest(), lambda: self.ended.append(version))
        self.held[version] = {spec.name: builder.build(spec) for spec in manifest().tensors}
        builder.drop()

    def load(self, number: object, version: int) -> list[str]:
        """Copy a version into tensors of its own, on device 0 of this process; those that came out wrong."""
        with self.received[number].load(manifest()) as builder:
            targets = {}
            for name, tensor in source(0).items():
                targets[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
                targets[name].copy_(builder.build(next(spec for spec in manifest().tensors if spec.name == name)))
        return [name for name, tensor in source(version).items() if not same(targets[name].cpu(), tensor)]

    def wrong(self, version: int) -> list[str]:
        """The tensors of a held version that are not as published."""
        held, published = self.held[version], source(version)
        wrong = [name for name in published if not same(held[name].cpu(), published[name])]
        tied = held["tied"].data_ptr() == held["long"].data_ptr() == held["part"].data_ptr() - 2 * 48 * 8
        return wrong if tied else [*wrong, "tied"]

    def device(self, version: int) -> str:
        """The UUID of the device that a held version says it is on."""
        index = self.held[version]["long"].device.index
        return next(uuid for uuid, number in TorchCuda().devices().items() if number == index)

    def keep_a_view(self, version: int) -> None:
        self.held[version] = {"long": self.held[version]["long"][3:5].t()}

    def let_go(self, version: int) -> None:
        before = self.ended.count(version)  # it may have been held, and let go of, before
        del self.held[version]
        wait_for(lambda: self.ended.count(version) > before)

    def released(self) -> list[int]:
        return self.ended

    def close(self) -> None:
        """End the session; what is held stays."""
        for received in self.received.values():
            received.close()
        self.received.clear()

    def drop_in_a_child(self) -> int:
        """A child drops everything that it inherited. Its exit status."""
        pid = os.fork()
        if not pid:
            self.held.clear()
            self.received.clear()
            gc.collect()
            os._exit(0)
        return os.waitpid(pid, 0)[1]


class Bus(GpuRole):
    """A publisher or a subscriber, as users have them."""

    def serve(self, path: str) -> None:
        self.bus: Any = busync.blocking.Publisher(path).__enter__()

    def follow(self, path: str) -> None:
        self.bus = busync.blocking.Subscriber(path, connect_timeout=10).__enter__()

    def publish(self, value: float) -> None:
        self.bus.publish({"w": torch.full((1000,), value).to("cuda")})

    def value(self) -> float:
        """The first value of the next version, which is let go of."""
        return float(self.bus.next(timeout=10).tensors["w"].cpu()[0])

    def end(self) -> None:
        self.bus.close()

    def settle(self) -> None:
        """Wait until every export has ended."""
        wait_for(lambda: self.bus.status()["exports"] == 0)


def wait_for(condition: Any) -> None:
    stop_at = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < stop_at, "it did not happen"
        time.sleep(0.001)


# With one thing wrong


class OneExportForAll(Exporter):
    """Sends one export to every reader."""

    def export(self, number: int, pid: int, name: str) -> Sent:
        sent = self.__dict__.setdefault("sent", {})
        if number not in sent:
            sent[number] = super().export(number, pid, name)
        return dict(sent[number])


class TakesTheLivingForDead(Exporter):
    """Counts down for every reader, before its mapping is gone."""

    def reap(self) -> list[str]:
        for export in self.exporter.outstanding():
            self.exporter.backend.release(export.handle.counter, export.handle.slot)
        return super().reap()


class _EarlyImporter(CudaImporter):
    def use(self, opened: Import, on_release: Any) -> _Use:
        on_release()
        return super().use(opened, bool)


class ReleasesAtOnce(Importer):
    """Says Release while its tensors are there."""

    make = _EarlyImporter


class _IndexImporter(CudaImporter):
    def _open(self, segment: int, handle: CudaHandle, nbytes: int, on: str) -> Import:
        self.backend.devices = lambda: {handle.device: int(handle.device[-1]) - 1}  # type: ignore[method-assign]
        return super()._open(segment, handle, nbytes, on)


class OpensByIndex(Importer):
    """Takes the index that the device has in the publisher. (The emulator's UUIDs end with it, plus 1.)"""

    make = _IndexImporter
