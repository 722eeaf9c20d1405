"""One publisher and its readers on a fake GPU, with the production handles; and the same with one thing wrong."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from busync.errors import BusyncError
from busync.handles import Flat
from busync.handles.cuda import CudaHandle, decode_handle, encode_handle
from busync.handles.cuda_build import CudaTensorBuilder
from busync.handles.cuda_import import CudaImporter, Import, ReceivedSegment, _Use
from busync.handles.cuda_layout import CudaPlan, plan_cuda
from busync.handles.cuda_memory import CudaExporter, CudaSegment
from busync.handles.cuda_reader import Reader
from busync.manifest import Manifest
from tests.cuda.fake import FakeGpu, FakeProcess

LIKE = {"w": torch.zeros(8, 4), "b": torch.zeros(5, dtype=torch.float16), "none": torch.zeros(0, 3)}
MANIFEST = plan_cuda(Flat(LIKE)).manifest
NBYTES = 4096


def state(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, version) for name, tensor in LIKE.items()}


def plan(tensors: dict[str, torch.Tensor]) -> CudaPlan:
    return plan_cuda(Flat(tensors))


def shows(tensors: dict[str, torch.Tensor], version: int) -> bool:
    return all(bool((tensor == version).all()) for tensor in tensors.values())


@dataclass(frozen=True)
class FakeReader(Reader):
    process: FakeProcess | None = None

    @property
    def gone(self) -> bool:
        assert self.process is not None
        return self.process.dead


class ReaderSide:
    """A reader's process with one session."""

    def __init__(self, process: FakeProcess, importer: type[CudaImporter] = CudaImporter) -> None:
        self.process = process
        self.exporter = CudaExporter(process)
        self.importer = importer(self.exporter)
        self.reader = FakeReader(process.number, 1, f"actor-{process.number}", process=process)
        self.segments: dict[int, ReceivedSegment] = {}
        self.released: list[int] = []

    def receive(self, number: int, handle: CudaHandle, nbytes: int = NBYTES, on: str | None = None) -> ReceivedSegment:
        decoded = decode_handle(number, nbytes, encode_handle(handle))
        self.segments[number] = ReceivedSegment(self.importer, number, decoded, nbytes, on)
        return self.segments[number]

    def map(self, number: int, version: int, manifest: Manifest = MANIFEST) -> CudaTensorBuilder:
        return self.segments[number].map(manifest, lambda: self.released.append(version))

    def tensors(self, number: int, version: int) -> dict[str, torch.Tensor]:
        builder = self.map(number, version)
        made = {spec.name: builder.build(spec) for spec in MANIFEST.tensors}
        builder.drop()
        return made

    def settle(self, version: int = 0) -> None:
        """Wait until a version is released, or all."""
        settle(lambda: version in self.released if version else self.importer._uses == 0)

    def settle_count(self, count: int) -> None:
        """Wait until so many versions are released."""
        settle(lambda: len(self.released) >= count)

    def close(self) -> None:
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()


class PublisherSide:
    def __init__(self, process: FakeProcess, exporter: type[CudaExporter] = CudaExporter) -> None:
        self.process = process
        self.exporter = exporter(process)
        self.device = process.visible[0]

    def segment(self, nbytes: int = NBYTES) -> CudaSegment:
        return self.exporter.create(self.device, nbytes)

    def write(self, segment: CudaSegment, version: int) -> None:
        moment = segment.write(plan(state(version)), [self.process.mark(0)])
        moment.synchronize()


def settle(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait until another thread has brought ``condition`` about."""
    stop_at = time.monotonic() + seconds
    while not condition():
        gc.collect()
        assert time.monotonic() < stop_at, "it did not happen"
        time.sleep(0.001)


def broadcast(gpu: FakeGpu, publisher: PublisherSide, readers: list[ReaderSide], *, rounds: int = 3) -> None:
    """Two segments in turn, every reader in place, everything given back at the end. Fails if anything is wrong."""
    segments = {number: publisher.segment() for number in (1, 2)}
    held: dict[ReaderSide, dict[str, torch.Tensor]] = {}
    for version in range(1, rounds + 1):
        number = 1 + version % 2
        for reader in readers:  # a segment is written again when every reader has released what it held in it
            assert version <= 2 or version - 2 in reader.released, f"{version - 2} was not released"
        publisher.write(segments[number], version)
        for reader in readers:
            assert version == 1 or shows(held[reader], version - 1), "a version changed under its reader"
            if number not in reader.segments:
                try:
                    reader.receive(number, segments[number].export(reader.reader))
                    reader.segments[number].open()
                except BusyncError as error:
                    raise AssertionError(f"a reader could not open its segment: {error}") from error
            tensors = reader.tensors(number, version)
            assert shows(tensors, version), "a reader sees something else than was published"
            before = held.pop(reader, None)
            held[reader] = tensors
            if before is not None:
                assert version - 1 not in reader.released, "released while its tensors were there"
                del before
                reader.settle(version - 1)
    device = publisher.device
    assert all(where == opened == device for where, opened in gpu.opened_on), (
        f"opened on another device {gpu.opened_on}"
    )
    held.clear()
    del tensors
    for reader in readers:
        reader.close()
        reader.settle()
        assert len(reader.released) == rounds, "a version was not released"
    for segment in segments.values():
        segment.drop()
    gc.collect()
    publisher.exporter.reap()
    assert gpu.trouble == [], gpu.trouble
    assert publisher.exporter.outstanding() == [], "exports never ended"
    assert publisher.process.allocated == 0, f"{publisher.process.allocated} bytes were never given back"
    assert publisher.process.events == 0, "events are left"


# The same with one thing wrong


class OneExportForAll(CudaExporter):
    """Exports a segment once, and sends that to every reader."""

    def _make(self, device: str, index: int, nbytes: int) -> CudaSegment:
        segment = super()._make(device, index, nbytes)
        first: list[CudaHandle] = []
        export = segment.export

        def shared(reader: Reader) -> CudaHandle:
            if not first:
                first.append(export(reader))
            return first[0]

        segment.export = shared  # type: ignore[method-assign]
        return segment


class ReleasesWithTheSnapshot(CudaImporter):
    """Says Release when the snapshot goes, though tensors are left."""

    def use(self, opened: Import, on_release: Callable[[], object]) -> _Use:
        use = super().use(opened, lambda: None)
        on_release()
        return use


class ReleasesBeforeTheStreams(CudaImporter):
    """Does not wait for what was queued."""

    def __init__(self, exporter: CudaExporter) -> None:
        super().__init__(exporter)
        self.backend = _Impatient(self.backend)  # type: ignore[assignment]


class _Impatient:
    def __init__(self, backend: object) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def synchronize(self, index: int) -> None:
        return


class OpensByIndex(CudaImporter):
    """Takes the publisher's index for its own."""

    def _open(self, segment: int, handle: CudaHandle, nbytes: int, on: str) -> Import:
        everywhere = {uuid: index for index, uuid in enumerate(self.backend.gpu.devices)}  # type: ignore[attr-defined]
        devices, self.backend.devices = self.backend.devices, lambda: everywhere  # type: ignore[method-assign]
        try:
            return super()._open(segment, handle, nbytes, on)
        finally:
            self.backend.devices = devices  # type: ignore[method-assign]


class OpensAgain(CudaImporter):
    """Opens the same export for every version."""

    def open(self, segment: int, handle: CudaHandle, nbytes: int, on: str) -> Import:
        self._imports.clear()
        self.backend.cache.clear()  # type: ignore[attr-defined]
        return super().open(segment, handle, nbytes, on)


class ReapsTheLiving(CudaExporter):
    """Takes every reader for dead whose export still counts."""

    def reap(self) -> list[object]:  # type: ignore[override]
        for export in self.outstanding():
            self.backend.release(export.handle.counter, export.handle.slot)
        return list(super().reap())
