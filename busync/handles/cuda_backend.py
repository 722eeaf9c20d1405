"""The one place where torch is told to do something with a GPU.

``CudaBackend`` is what the rest of ``handles`` asks for; ``TorchCuda`` does it with torch. Tests put a device of their
own behind the same interface. Nothing here decides anything.
"""

from __future__ import annotations

import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch.multiprocessing.reductions import reduce_tensor

from busync.errors import AllocationError
from busync.handles.cuda import LAYOUT_PROBLEM, REBUILD

_COUNTERS = Path("/dev/shm")  # noqa: S108  # where torch keeps the files of its counters
_COUNTERS_START = 64  # bytes of the header that torch puts before the first counter of a file
_COUNTER = struct.Struct("=Q")


class CudaEvent(Protocol):
    """A moment in the work of a stream."""

    def synchronize(self) -> None:
        """Block until the work before it is done."""


class CudaStream(Protocol):
    """Work of one device, in order."""

    def wait(self, event: CudaEvent) -> None:
        """What is queued from now on begins after ``event``, which may be of another stream or device."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between tensors of one size and dtype; ``source`` may be on another device or the CPU."""

    def mark(self) -> CudaEvent:
        """The moment after everything that is queued."""


class Spanned(Protocol):
    """An object with the CUDA array interface: bytes at an address. Tensors made of it keep it alive."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface."""


class CudaBackend(Protocol):
    """What handles need of the device. ``index`` is the device's number in this process."""

    def problem(self) -> str:
        """Why memory of a GPU cannot be shared here at all; empty when it may be possible."""

    def devices(self) -> dict[str, int]:
        """The devices that this process sees: their UUIDs and indices."""

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """The index of the device that a tensor lies on; None if it is not on one of these."""

    def total_bytes(self, index: int) -> int:
        """The device's memory."""

    def allocate(self, index: int, nbytes: int) -> torch.Tensor:
        """A flat buffer of bytes, of undefined content.

        Raises:
            AllocationError: the device has not that much to spare.
        """

    def allocations(self, index: int) -> int:
        """How often the caching allocator has given out memory in this process."""

    def allocator(self) -> str:
        """The name of the allocator in use."""

    def reduce(self, flat: torch.Tensor, stream: CudaStream) -> object:
        """Export a buffer once more: what torch's ``reduce_tensor`` gives, its event recorded on ``stream``."""

    def rebuild(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        """Open an export: torch's ``rebuild_cuda_tensor``."""

    def count(self, counter: bytes, slot: int) -> int | None:
        """How many openings an export still waits for or has, None when there is no such counter any more."""

    def release(self, counter: bytes, slot: int) -> None:
        """Count an export down, on behalf of who will not do it."""

    def collect(self) -> None:
        """Free what was dropped here, and that nobody else has open any more."""

    def view(self, span: Spanned, index: int) -> torch.Tensor:
        """A flat tensor of bytes that keeps ``span`` alive as long as its storage lives."""

    def read(self, tensor: torch.Tensor) -> bytes:
        """The bytes of a flat tensor, after what is queued on this thread's current stream."""

    def write(self, tensor: torch.Tensor, data: bytes) -> None:
        """Write the bytes of a flat tensor. Done when this returns."""

    def stream(self, index: int) -> CudaStream:
        """A new stream that waits for no other."""

    def mark(self, index: int) -> CudaEvent:
        """This moment on the calling thread's current stream."""

    def marks(self) -> dict[int, CudaEvent]:
        """``mark`` for every device that this process uses: nothing is begun on one that it does not."""

    def synchronize(self, index: int) -> None:
        """Block until everything is done that this process has queued on the device, on whatever stream."""


class TorchCuda:
    """The real thing."""

    def problem(self) -> str:  # noqa: D102  # see CudaBackend, here and below
        if not torch.cuda.is_available():
            return "torch finds no CUDA device here"
        if find_spec("numpy") is None:
            return "torch needs NumPy for the CUDA array interface, and it is not installed"
        return LAYOUT_PROBLEM

    def devices(self) -> dict[str, int]:  # noqa: D102
        count = torch.cuda.device_count()
        return {str(torch.cuda.get_device_properties(i).uuid).removeprefix("GPU-").lower(): i for i in range(count)}

    def index_of(self, tensor: torch.Tensor) -> int | None:  # noqa: D102
        return tensor.device.index if tensor.is_cuda else None

    def total_bytes(self, index: int) -> int:  # noqa: D102
        return int(torch.cuda.get_device_properties(index).total_memory)

    def allocate(self, index: int, nbytes: int) -> torch.Tensor:  # noqa: D102
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=_device(index), requires_grad=False)
        except torch.OutOfMemoryError as error:
            reason = f"cuda:{index} has not that much to spare"
            raise AllocationError(nbytes, reason, "publish less, or free memory of the device") from error

    def allocations(self, index: int) -> int:  # noqa: D102
        return int(torch.cuda.memory_stats(index).get("allocation.all.allocated", 0))

    def allocator(self) -> str:  # noqa: D102
        return torch.cuda.get_allocator_backend()

    def reduce(self, flat: torch.Tensor, stream: CudaStream) -> object:  # noqa: D102
        with torch.cuda.stream(cast(_Stream, stream).stream):
            return cast(Any, reduce_tensor)(flat)

    def rebuild(self, arguments: tuple[Any, ...]) -> torch.Tensor:  # noqa: D102
        assert REBUILD is not None, "checked by problem()"
        return cast(torch.Tensor, REBUILD(*arguments))

    def count(self, counter: bytes, slot: int) -> int | None:  # noqa: D102
        try:
            with (_COUNTERS / counter.decode().lstrip("/")).open("rb", buffering=0) as file:
                file.seek(_COUNTERS_START + _COUNTER.size * slot)
                data = file.read(_COUNTER.size)
        except FileNotFoundError:
            return None
        return int(_COUNTER.unpack(data)[0]) if len(data) == _COUNTER.size else None

    def release(self, counter: bytes, slot: int) -> None:  # noqa: D102
        torch.UntypedStorage._release_ipc_counter_cuda(counter, slot)

    def collect(self) -> None:  # noqa: D102
        cast(Any, torch.cuda.ipc_collect)()

    def view(self, span: Spanned, index: int) -> torch.Tensor:  # noqa: D102
        return torch.as_tensor(span, device=_device(index))

    def read(self, tensor: torch.Tensor) -> bytes:  # noqa: D102
        return bytes(tensor.cpu().tolist())

    def write(self, tensor: torch.Tensor, data: bytes) -> None:  # noqa: D102
        tensor.copy_(torch.tensor(list(data), dtype=torch.uint8))
        torch.cuda.current_stream(tensor.device).synchronize()

    def stream(self, index: int) -> CudaStream:  # noqa: D102
        return _Stream(cast(Any, torch.cuda.Stream)(_device(index)))

    def mark(self, index: int) -> CudaEvent:  # noqa: D102
        return _record(torch.cuda.current_stream(_device(index)))

    def marks(self) -> dict[int, CudaEvent]:  # noqa: D102
        if not cast(Any, torch.cuda).is_initialized():
            return {}
        used = cast(Any, torch._C)._cuda_hasPrimaryContext
        return {index: self.mark(index) for index in range(torch.cuda.device_count()) if used(index)}

    def synchronize(self, index: int) -> None:  # noqa: D102
        torch.cuda.synchronize(_device(index))


class _Stream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def wait(self, event: CudaEvent) -> None:
        self.stream.wait_event(cast(torch.cuda.Event, event))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream), torch.no_grad():
            target.copy_(source, non_blocking=True)

    def mark(self) -> CudaEvent:
        return _record(self.stream)


def _record(stream: torch.cuda.Stream) -> CudaEvent:
    event = cast(Any, torch.cuda.Event)()
    event.record(stream)
    return cast(CudaEvent, event)


def _device(index: int) -> torch.device:
    return torch.device("cuda", index)
