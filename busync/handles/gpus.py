"""The GPUs of this process: one exporter and one importer, for all who publish and subscribe here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch

from busync.errors import DeviceError, OptionError
from busync.forks import fork_lock
from busync.handles.cuda import device_errors
from busync.handles.cuda_backend import CudaEvent
from busync.handles.cuda_import import CudaImporter
from busync.handles.cuda_memory import CudaExporter

_exporter: CudaExporter | None = None
_importer: CudaImporter | None = None
_pid = 0


def exporter() -> CudaExporter:
    """What this process exports. A forked child has one of its own."""
    return _both()[0]


def importer() -> CudaImporter:
    """What this process has opened. A forked child has one of its own."""
    return _both()[1]


def marks() -> dict[int, CudaEvent]:
    """This moment in the calling thread's work on every device that this process uses, by index.

    Raises:
        DeviceError: a device has failed.
    """
    with device_errors("cuda", "what was queued before"):
        return exporter().backend.marks()


def wait(queued: Mapping[int, CudaEvent]) -> None:
    """Wait until what was queued before ``marks`` is done.

    Raises:
        DeviceError: a device has failed.
    """
    for index, event in queued.items():
        with device_errors(f"cuda:{index}", "what was queued before"):
            event.synchronize()


def releasing() -> bool:
    """Whether versions on GPUs have ended in this process whose leases are about to end."""
    return _importer is not None and _pid == os.getpid() and _importer.releasing


def relays(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether some of these tensors are memory that another process has published."""
    return _importer is not None and importer().received([tensor.data_ptr() for tensor in tensors])


def device_of(index: int) -> str:
    """The UUID of the device that a reader uses.

    Raises:
        DeviceError: this process does not see it.
    """
    backend = exporter().backend
    seen = {number: uuid for uuid, number in backend.devices().items()} if not backend.problem() else {}
    if index not in seen:
        there = ", ".join(f"cuda:{number}" for number in sorted(seen)) or "none"
        reason = backend.problem() or f"this process does not see it; it sees {there}"
        raise DeviceError(f"cuda:{index}", reason, "name another device, or none")
    return seen[index]


def check_device(device: object) -> int | None:
    """The index of a device that an option names: a torch device or its name, a number, or None.

    Raises:
        OptionError: it names no CUDA device.
    """
    if device is None:
        return None
    named: torch.device | None = None
    with suppress(RuntimeError):  # torch knows no such name
        if isinstance(device, (str, torch.device)):
            named = torch.device(device)
        elif type(device) is int and device >= 0:
            named = torch.device("cuda", device)
    if named is None or named.type != "cuda" or named.index is None:
        raise OptionError("device", device, 'a CUDA device with its number, for instance "cuda:0"')
    return int(named.index)


def finish(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until everything is done that this process has queued on the devices of ``tensors``.

    Raises:
        DeviceError: a device has failed.
    """
    backend = exporter().backend
    for index in {backend.index_of(tensor) for tensor in tensors} - {None}:
        assert index is not None
        with device_errors(f"cuda:{index}", "what was queued"):
            backend.synchronize(index)


def _both() -> tuple[CudaExporter, CudaImporter]:
    global _exporter, _importer, _pid
    with fork_lock:  # or a child might find them half made
        if _exporter is None or _importer is None or _pid != os.getpid():
            _exporter, _pid = CudaExporter(), os.getpid()
            _importer = CudaImporter(_exporter)
        return _exporter, _importer
