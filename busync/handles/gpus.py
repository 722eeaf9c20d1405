"""The GPUs of this process: one exporter and one importer, for all who publish and subscribe here."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import torch

from busync.errors import OptionError
from busync.forks import fork_lock
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
    """This moment in the calling thread's work on every device that this process uses, by index."""
    return exporter().backend.marks()


def releasing() -> bool:
    """Whether versions on GPUs have ended here whose leases are about to end."""
    return _importer is not None and _importer.releasing


def relays(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether some of these tensors are memory that another process has published."""
    return _importer is not None and importer().received([tensor.data_ptr() for tensor in tensors])


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
    if named is None or named.type != "cuda":
        raise OptionError("device", device, 'a CUDA device, for instance "cuda:0"')
    return int(named.index or 0)


def finish(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until everything is done that this process has queued on the devices of ``tensors``."""
    backend = exporter().backend
    for index in {backend.index_of(tensor) for tensor in tensors} - {None}:
        assert index is not None
        backend.synchronize(index)


def _both() -> tuple[CudaExporter, CudaImporter]:
    global _exporter, _importer, _pid
    with fork_lock:  # or a child might find them half made
        if _exporter is None or _importer is None or _pid != os.getpid():
            _exporter, _pid = CudaExporter(), os.getpid()
            _importer = CudaImporter(_exporter)
        return _exporter, _importer
