"""What it takes to open a GPU segment in another process: torch's tuple as named fields, and back.

``reduce_tensor`` of a flat device buffer gives a function and fifteen arguments. Neither function nor tuple travels.
Of the fifteen, those that are the same for every flat buffer (class, size, stride, dtype and so on) are checked here
and left out; the others become a ``CudaHandle``, whose every field the receiver checks in Python integers before torch
sees a number, because torch's C++ side checks none of them. The device is named by its UUID: an index means another
device to a process that sees other devices.

A handle is good for exactly one opening in one process: see ``cuda_memory``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch.multiprocessing import reductions

from busync.errors import AttachError, BusyncError, DeviceError
from busync.manifest import DEVICE, MAX_SEGMENT_BYTES
from busync.wire import Value

#: The arguments of torch's rebuild function. What has others, or another order, is not used.
PARAMETERS = (
    "tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device",
    "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle",
    "ref_counter_offset", "event_handle", "event_sync_required",
)  # fmt: skip

MEMORY_BYTES = 66  #: a handle of torch: its version, its type, and CUDA's 64 bytes
MEMORY_TYPE = b"c"  #: made by cudaMalloc; "e" are expandable segments, which need rights over the other process
EVENT_BYTES = 64  #: torch reads that many, whatever it is given
COUNTER = re.compile(rb"/torch_[0-9]{1,10}_[0-9]{1,20}_[0-9]{1,20}")  #: the name of a file in /dev/shm
COUNTER_SLOTS = 10_000  #: in one such file; torch writes wherever it is told
CANARY_BYTES = 32
BLOCK_ALIGNMENT = 512  #: torch's allocator gives nothing smaller, and nothing else

_TRAILER_BYTES = 256  # behind the segment's bytes, for the canary
_REMEDY = "publish CPU tensors, which is not affected, or use a torch that busync knows"


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaHandle:
    """One export of one GPU segment, for one reader. Plain fields; see ``encode_handle``."""

    device: str  #: the GPU's UUID
    memory: bytes  #: torch's handle of the allocation that the segment lies in
    nbytes: int  #: of the whole buffer, the canary's trailer included
    offset: int  #: of the buffer within its allocation
    counter: bytes  #: name of the file that counts this export
    slot: int  #: of the count in that file
    event: bytes  #: an event that was recorded when the export was made
    event_sync: bool  #: whether the event has to be waited for
    canary: bytes  #: what lies behind the segment's bytes


def buffer_bytes(nbytes: int) -> int:
    """Bytes of the buffer for a segment of ``nbytes`` bytes: a trailer with the canary comes behind it."""
    return canary_offset(nbytes) + _TRAILER_BYTES


def canary_offset(nbytes: int) -> int:
    """Where the canary of a segment of ``nbytes`` bytes lies."""
    return -(-nbytes // _TRAILER_BYTES) * _TRAILER_BYTES


def first_line(error: BaseException) -> str:
    """What torch says, without what it adds for people who debug it."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@contextmanager
def device_errors(device: str, what: str) -> Iterator[None]:
    """The one place where errors of torch about a device become ours.

    Raises:
        DeviceError: the device has failed.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, BusyncError):
            raise
        reason = f"{what} failed ({first_line(error)})"
        raise DeviceError(device, reason, "look for the first error that the device had") from error


# What torch gives


def layout_problem(rebuild: object) -> str:
    """Why torch's rebuild function cannot be used; empty when it has exactly the arguments that are known here."""
    try:
        found = tuple(inspect.signature(cast(Any, rebuild)).parameters)
    except (TypeError, ValueError):
        return f"torch {torch.__version__} has no function that rebuilds CUDA tensors"
    if found != PARAMETERS:
        extra = [name for name in found if name not in PARAMETERS]
        missing = [name for name in PARAMETERS if name not in found]
        what = f"adds {extra}, lacks {missing}" if extra or missing else "has them in another order"
        return f"rebuild_cuda_tensor of torch {torch.__version__} has an unknown layout of arguments ({what})"
    lacking = [name for name in ("_new_shared_cuda", "_release_ipc_counter_cuda") if not _has(name)]
    return f"torch {torch.__version__} has no {lacking[0]}" if lacking else ""


def _has(name: str) -> bool:
    return callable(getattr(torch.UntypedStorage, name, None))


#: Looked up once. Nothing is raised for it until somebody wants to share memory of a GPU.
REBUILD = getattr(reductions, "rebuild_cuda_tensor", None)
LAYOUT_PROBLEM = layout_problem(REBUILD)


def ensure_layout(device: str, problem: str = LAYOUT_PROBLEM) -> None:
    """Check that the installed torch shares CUDA tensors in the way that is known here.

    Raises:
        DeviceError: it does not.
    """
    if problem:
        raise DeviceError(device, problem, _REMEDY)


def name_fields(reduced: object, device: str, nbytes: int, canary: bytes) -> CudaHandle:
    """Turn what ``reduce_tensor`` gave for a flat buffer of ``nbytes`` bytes into a handle.

    Raises:
        DeviceError: it is not what is known here; nothing was announced.
    """
    function, arguments = reduced if type(reduced) is tuple and len(reduced) == 2 else (None, None)
    if function is not REBUILD or type(arguments) is not tuple or len(arguments) != len(PARAMETERS):
        given = f"{len(arguments)} arguments" if isinstance(arguments, tuple) else f"a {type(arguments).__name__}"
        raise DeviceError(device, f"torch {torch.__version__} describes it by {given} for an unknown function", _REMEDY)
    named = dict(zip(PARAMETERS, arguments, strict=True))
    constant = {
        "tensor_cls": torch.Tensor, "tensor_size": (nbytes,), "tensor_stride": (1,), "tensor_offset": 0,
        "storage_cls": torch.storage.TypedStorage, "dtype": torch.uint8, "requires_grad": False,
    }  # fmt: skip
    for name, value in constant.items():
        if named[name] != value:
            raise DeviceError(device, f"torch says that its {name} is {named[name]!r}, not {value!r}", _REMEDY)
    handle = CudaHandle(
        device=device, memory=named["storage_handle"], nbytes=named["storage_size_bytes"],
        offset=named["storage_offset_bytes"], counter=named["ref_counter_handle"], slot=named["ref_counter_offset"],
        event=named["event_handle"], event_sync=named["event_sync_required"], canary=canary,
    )  # fmt: skip
    reason = _misfit(handle, nbytes)
    if reason:
        raise DeviceError(device, f"torch exports it as one that {reason}", _export_remedy(handle))
    return handle


def torch_arguments(handle: CudaHandle, index: int) -> tuple[Any, ...]:
    """The arguments for torch's rebuild function, in a process that knows the device by ``index``."""
    named: dict[str, Any] = {
        "tensor_cls": torch.Tensor, "tensor_size": torch.Size((handle.nbytes,)), "tensor_stride": (1,),
        "tensor_offset": 0, "storage_cls": torch.storage.TypedStorage, "dtype": torch.uint8,
        "storage_device": index, "storage_handle": handle.memory, "storage_size_bytes": handle.nbytes,
        "storage_offset_bytes": handle.offset, "requires_grad": False, "ref_counter_handle": handle.counter,
        "ref_counter_offset": handle.slot, "event_handle": handle.event, "event_sync_required": handle.event_sync,
    }  # fmt: skip
    return tuple(named[name] for name in PARAMETERS)


# What travels

_TYPES: dict[str, type] = {
    "device": str, "memory": bytes, "nbytes": int, "offset": int, "counter": bytes, "slot": int, "event": bytes,
    "event_sync": bool, "canary": bytes,
}  # fmt: skip
assert list(_TYPES) == [field.name for field in fields(CudaHandle)]


def encode_handle(handle: CudaHandle) -> dict[str, Value]:
    """The handle as plain values by name."""
    return {name: getattr(handle, name) for name in _TYPES}


def decode_handle(segment: int, nbytes: int, values: Mapping[str, object]) -> CudaHandle:
    """The handle of a segment that was announced with ``nbytes`` bytes, from values of a peer.

    Unknown values are ignored, as in every message. What passes lies within limits that torch does not check itself.

    Raises:
        AttachError: a value is missing, of another type, or out of bounds.
    """
    found: dict[str, Any] = {}
    for name, kind in _TYPES.items():
        value = values.get(name)
        if type(value) is not kind:  # a bool is no int here
            raise AttachError(segment, f"its handle's {name} is a {type(value).__name__}, not a {kind.__name__}")
        found[name] = value
    handle = CudaHandle(**found)
    reason = _misfit(handle, buffer_bytes(nbytes)) if 0 < nbytes <= MAX_SEGMENT_BYTES else "has an impossible size"
    if reason:
        raise AttachError(segment, f"its handle {reason}", _export_remedy(handle))
    return handle


def _misfit(handle: CudaHandle, nbytes: int) -> str:
    """Why the handle of a buffer of ``nbytes`` bytes must not reach torch; empty when it may. Types are right."""
    if not all(type(getattr(handle, name)) is kind for name, kind in _TYPES.items()):
        return "has a field of an unknown type"
    if not DEVICE.fullmatch(handle.device):
        return "names no device by its UUID"
    if len(handle.memory) != MEMORY_BYTES or handle.memory[1:2] != MEMORY_TYPE:
        kind = handle.memory[1:2]
        if kind == b"e":
            return "lies in expandable segments"
        return f"has a memory handle of {len(handle.memory)} bytes and type {kind!r}"
    if handle.nbytes != nbytes:
        return f"has {handle.nbytes} bytes where {nbytes} belong"
    if not 0 <= handle.offset <= MAX_SEGMENT_BYTES or handle.offset % BLOCK_ALIGNMENT:
        return f"lies at the impossible offset {handle.offset}"
    if not COUNTER.fullmatch(handle.counter):
        return "names no counter of torch"
    if not 0 <= handle.slot < COUNTER_SLOTS:
        return f"is counted at the impossible place {handle.slot}"
    if len(handle.event) != EVENT_BYTES:
        return f"has an event of {len(handle.event)} bytes"
    if len(handle.canary) != CANARY_BYTES:
        return f"has a canary of {len(handle.canary)} bytes"
    return ""


def _export_remedy(handle: CudaHandle) -> str:
    if type(handle.memory) is bytes and handle.memory[1:2] == b"e":
        return "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False in the publisher"
    return "use the same torch on both sides"
