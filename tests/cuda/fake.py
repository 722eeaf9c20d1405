"""A GPU of bytes, with torch's bookkeeping of shared memory: what torch counts, when it frees, when it copies.

One ``FakeGpu`` is the machine: devices, allocations, counters. Each ``FakeProcess`` is a process on it, a backend for
``handles``. As in torch:

- an export is one count, and every closing of an opening takes one away, of 64 bits, without a sign;
- an opening that finds the memory open already waits for nothing and takes its count away at once;
- memory that was dropped is kept while any count of it is above zero, and given out again as soon as none is;
- the index of a device is taken as it is;
- copies happen late: when somebody waits for them.

``trouble`` is what would have been a silent fault on a real machine.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from busync.errors import AllocationError
from busync.handles.cuda import PARAMETERS, REBUILD
from busync.handles.cuda_backend import CudaEvent, CudaStream, Spanned

WRAP = 1 << 64
MAX_EVENTS = 1000
TOTAL_BYTES = 1 << 30


@dataclass(eq=False)
class Block:
    """One allocation."""

    device: str
    owner: FakeProcess
    memory: bytearray
    handle: bytes
    counts: list[tuple[bytes, int]] = field(default_factory=list)  #: of its exports
    open_in: list[FakeProcess] = field(default_factory=list)
    dropped: bool = False

    @property
    def address(self) -> int:
        return torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()


class FakeEvent:
    def __init__(self, stream: FakeStream, position: int) -> None:
        self.stream, self.position = stream, position

    def synchronize(self) -> None:
        self.stream.run(self.position)


class FakeStream:
    """Work that is done when somebody waits for it."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []
        self._done = 0
        self._lock = threading.RLock()

    def queue(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def wait(self, event: CudaEvent) -> None:
        self.queue(event.synchronize)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.queue(lambda: target.copy_(source))

    def mark(self) -> FakeEvent:
        return FakeEvent(self, len(self._work))

    def run(self, until: int | None = None) -> None:
        with self._lock:
            until = len(self._work) if until is None else until
            while self._done < until:
                work = self._work[self._done]
                self._work[self._done] = bool  # so that it keeps nothing alive
                self._done += 1
                work()


class FakeGpu:
    """The machine."""

    def __init__(self, devices: int = 2) -> None:
        self.devices = [f"{n:08x}-0000-4000-8000-00000000000{n}" for n in range(1, devices + 1)]
        self.counters: dict[tuple[bytes, int], int] = {}
        self.blocks: dict[bytes, Block] = {}
        self.trouble: list[str] = []
        self.opened_on: list[tuple[str, str]] = []  #: what an opening belongs to, and where it was opened
        self.numbers = itertools.count(1)

    def process(self, visible: list[int] | None = None) -> FakeProcess:
        order = range(len(self.devices)) if visible is None else visible
        return FakeProcess(self, [self.devices[i] for i in order])

    def down(self, key: tuple[bytes, int]) -> None:
        """Torch's ``-= 1``."""
        if key in self.counters:
            self.counters[key] = (self.counters[key] - 1) % WRAP
            if self.counters[key] == WRAP - 1:
                self.trouble.append(f"the count {key[1]} of {key[0].decode()} went below zero")


class FakeProcess:
    """A process of the machine, as CudaBackend."""

    def __init__(self, gpu: FakeGpu, visible: list[str]) -> None:
        self.gpu = gpu
        self.visible = visible
        self.number = next(gpu.numbers)
        self.dead = False
        self.blocks: dict[int, Block] = {}  #: given out, by address
        self.free: list[Block] = []
        self.limbo: list[Block] = []
        self.streams: list[FakeStream] = []
        self.current = FakeStream()
        self.allocated = 0  #: bytes
        self.given_out = 0
        self.slots = itertools.count()
        self.events = 0
        self.syncs = 0
        self.cache: dict[tuple[bytes, int], weakref.ref[memoryview]] = {}
        self.why = ""
        self.memory_type = b"c"
        self.caching = True
        self.share: Callable[[], None] = lambda: None

    # Its life

    def kill(self) -> None:
        """It ends without a word. What it had open is closed, and nothing is counted."""
        self.dead = True
        for block in self.gpu.blocks.values():
            block.open_in = [process for process in block.open_in if process is not self]

    # CudaBackend

    def problem(self) -> str:
        return self.why

    def devices(self) -> dict[str, int]:
        return {uuid: index for index, uuid in enumerate(self.visible)}

    def index_of(self, tensor: torch.Tensor) -> int | None:
        for block in self.gpu.blocks.values():
            if 0 <= tensor.data_ptr() - block.address < len(block.memory):
                return self.visible.index(block.device)
        return None

    def total_bytes(self, index: int) -> int:
        return TOTAL_BYTES

    def allocate(self, index: int, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        size, device = -(-nbytes // 512) * 512, self.visible[index]
        if self.allocated + size > TOTAL_BYTES:
            raise AllocationError(nbytes, "the fake device is full")
        block = next((b for b in self.free if len(b.memory) == size and b.device == device), None)
        if block is None:
            handle = b"\x00" + self.memory_type + next(self.gpu.numbers).to_bytes(64, "little")
            block = Block(device, self, bytearray(size), handle)
            self.gpu.blocks[handle] = block
        else:
            self.free.remove(block)
        block.dropped = False
        view = memoryview(block.memory)[:nbytes]
        flat = torch.frombuffer(view, dtype=torch.uint8)
        self.blocks[flat.data_ptr()] = block
        self.allocated += size
        self.given_out += self.caching
        weakref.finalize(view, self._dropped, block, flat.data_ptr()).atexit = False
        return flat

    def _dropped(self, block: Block, address: int) -> None:
        if not self.dead:
            del self.blocks[address]
            block.dropped = True
            self.limbo.append(block)
            self.collect()

    def collect(self) -> None:
        for block in list(self.limbo):
            if all(self.gpu.counters[key] == 0 for key in block.counts):
                self.limbo.remove(block)
                if block.open_in:
                    self.gpu.trouble.append(f"memory was freed that {len(block.open_in)} processes had open")
                for key in block.counts:
                    del self.gpu.counters[key]
                self.events -= len(block.counts)
                block.counts.clear()
                block.memory[:] = b"\xdd" * len(block.memory)
                self.allocated -= len(block.memory)
                self.free.append(block)

    def allocations(self, index: int) -> int:
        return self.given_out

    def allocator(self) -> str:
        return "native"

    def reduce(self, flat: torch.Tensor, stream: CudaStream) -> object:
        self.share()
        block = self.blocks[flat.data_ptr()]
        key = (f"/torch_{self.number}_1_0".encode(), next(self.slots))
        self.gpu.counters[key] = 1
        block.counts.append(key)
        self.events += 1
        return REBUILD, (
            torch.Tensor, flat.size(), flat.stride(), 0, torch.storage.TypedStorage, torch.uint8,
            self.visible.index(block.device), block.handle, flat.numel(), 0, False, key[0], key[1], bytes(64),
            self.events <= MAX_EVENTS,
        )  # fmt: skip

    def rebuild(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        named = dict(zip(PARAMETERS, arguments, strict=True))
        if named["storage_device"] >= len(self.visible):
            raise RuntimeError("invalid device ordinal")
        block = self.gpu.blocks.get(named["storage_handle"])
        if block is None or block.owner.dead:
            raise RuntimeError("invalid resource handle")
        if block.owner is self:
            raise RuntimeError("invalid device context")
        key = (named["ref_counter_handle"], named["ref_counter_offset"])
        place = (block.handle, named["storage_offset_bytes"])
        known = self.cache.get(place)
        view = known() if known is not None else None
        if view is not None:
            self.gpu.down(key)
            return torch.frombuffer(view, dtype=torch.uint8)
        self.gpu.opened_on.append((block.device, self.visible[named["storage_device"]]))
        view = memoryview(block.memory)[: named["storage_size_bytes"]]
        self.cache[place] = weakref.ref(view)
        block.open_in.append(self)
        weakref.finalize(view, self._closed, block, key).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _closed(self, block: Block, key: tuple[bytes, int]) -> None:
        if not self.dead:
            block.open_in.remove(self)
            self.gpu.down(key)

    def count(self, counter: bytes, slot: int) -> int | None:
        return self.gpu.counters.get((counter, slot))

    def release(self, counter: bytes, slot: int) -> None:
        self.gpu.down((counter, slot))

    def view(self, span: Spanned, index: int) -> torch.Tensor:
        interface = span.__cuda_array_interface__
        (nbytes,), (address, _) = interface["shape"], interface["data"]
        memory = memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")
        weakref.finalize(memory, _let_go, span).atexit = False  # alive until then
        return torch.frombuffer(memory, dtype=torch.uint8)

    def read(self, tensor: torch.Tensor) -> bytes:
        self.current.run()
        return bytes(tensor.tolist())

    def write(self, tensor: torch.Tensor, data: bytes) -> None:
        tensor.copy_(torch.tensor(list(data), dtype=torch.uint8))

    def stream(self, index: int) -> CudaStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def mark(self, index: int) -> CudaEvent:
        return self.current.mark()

    def marks(self) -> dict[int, CudaEvent]:
        return {index: self.mark(index) for index in range(len(self.visible))}

    def synchronize(self, index: int) -> None:
        self.syncs += 1
        for stream in (self.current, *self.streams):
            stream.run()


def _let_go(span: object) -> None:
    return
