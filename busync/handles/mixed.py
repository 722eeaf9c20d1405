"""Sources whose tensors are on the CPU, on one GPU or several: one layout, and a plan for each memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from busync.handles.cuda_layout import plan_cuda
from busync.handles.cuda_memory import CudaExporter
from busync.handles.layout import Plan, Shapes, flatten_like, place_like, plan
from busync.handles.source import Flat, Source
from busync.manifest import DeviceSpec, GroupSpec, Manifest, TensorSpec, make_manifest

Parts = dict[int | None, Flat]  #: by the index of the device, None for the CPU


def plan_mixed(flat: Flat, cuda: CudaExporter) -> Plan:
    """As ``layout.plan``, for tensors on whatever device. Reads no element, queues nothing.

    Raises:
        ExportError: a tensor cannot be published, or all on one device exceed the largest segment.
        DeviceError: memory of a device cannot be shared from this process.
    """
    parts = _split(flat, cuda)
    host = plan(parts.pop(None, Flat()))
    if not parts:
        return host
    on_device = {cuda.device(index): plan_cuda(part) for index, part in parts.items() if index is not None}
    manifest = _merge(flat, host.manifest, {device: part.manifest for device, part in on_device.items()})
    host.manifest = manifest
    host.devices = {spec.device: on_device[spec.device] for spec in manifest.devices}
    return host


def like_mixed(like: Source | Shapes, cuda: CudaExporter) -> Manifest:
    """As ``layout.like_plan``, but what is on a GPU shall be lent there.

    Raises: as ``layout.like_plan``; DeviceError: memory of a device cannot be shared from this process.
    """
    flat = flatten_like(like)
    parts = _split(flat, cuda)
    host = place_like(parts.pop(None, Flat()))
    if not parts:
        return host
    on_device = {cuda.device(index): place_like(part) for index, part in parts.items() if index is not None}
    return _merge(flat, host, on_device)


def _split(flat: Flat, cuda: CudaExporter) -> Parts:
    """The tensors by device, each time in the source's order."""
    index_of: Callable[[torch.Tensor], int | None] = cuda.backend.index_of
    parts: Parts = {}
    for name, tensor in flat.tensors.items():
        parts.setdefault(index_of(tensor), Flat(parameters=flat.parameters)).tensors[name] = tensor
    return parts


def _merge(flat: Flat, host: Manifest, on_device: Mapping[str, Manifest]) -> Manifest:
    """One manifest of all parts. Its tensors keep the source's order, its groups are numbered by their first use."""
    devices = tuple(DeviceSpec(device, part.nbytes) for device, part in on_device.items() if part.nbytes)
    numbers = {spec.device: number for number, spec in enumerate(devices, 1)}
    placed = {name: (0, 0, spec, host) for name, spec in host.by_name.items()}
    for at, (device, part) in enumerate(on_device.items(), 1):
        placed |= {name: (at, numbers.get(device, 0), spec, part) for name, spec in part.by_name.items()}
    groups: list[GroupSpec] = []
    known: dict[tuple[int, int], int] = {}
    tensors: list[TensorSpec] = []
    for name in flat.tensors:
        at, memory, spec, part = placed[name]
        group = known.get((at, spec.group))
        if group is None:
            group = known[at, spec.group] = len(groups)
            old = part.groups[spec.group]
            groups.append(GroupSpec(old.offset_bytes, old.nbytes, memory))
        tensors.append(
            TensorSpec(
                spec.name, spec.dtype, spec.size, spec.stride, group, spec.offset, spec.requires_grad, spec.parameter
            )
        )
    return make_manifest(host.nbytes, tuple(groups), tuple(tensors), devices)
