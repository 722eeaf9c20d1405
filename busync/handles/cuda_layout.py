"""Planning a GPU segment: as ``layout`` does it for the CPU, but what is copied are tensors and not addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from busync.errors import ExportError
from busync.handles import layout
from busync.handles.copying import Copy
from busync.handles.source import Flat
from busync.handles.tensors import MANY_TENSORS, check_kind
from busync.manifest import Manifest


@dataclass(slots=True, eq=False)
class CudaPlan:
    """The layout of one device's memory, and the copies that fill it. Keeps the source's tensors alive."""

    manifest: Manifest
    places: list[tuple[int, int]]  #: of tensors that are copied as they lie: offset in bytes, and number in ``sources``
    copies: list[Copy]  #: the others
    sources: list[torch.Tensor]


def plan_cuda(flat: Flat) -> CudaPlan:
    """Plan how to publish the tensors of ``flat``, which are all on one device. Reads no element, queues nothing.

    Tied and overlapping tensors, strides, expanded and sliced ones come back as from the CPU.

    Raises:
        ExportError: a tensor cannot be published, or all together exceed the largest segment.
    """
    many = len(flat.tensors) > MANY_TENSORS
    views = []
    with torch.no_grad():
        for name, tensor in flat.tensors.items():
            dtype = check_kind(name, tensor)
            if tensor._is_zerotensor():
                raise ExportError(name, "it is a zero tensor without memory", "clone it")
            views.append(layout._measure(name, tensor, dtype, many=many))
        planned = layout._place(views, layout._find_groups(views), flat.parameters)
    dense = {(view.start, view.end - view.start): at for at, view in enumerate(views) if view.dense and view.stored}
    places, copies = [], [*planned.copies]
    for offset, address, nbytes in planned.moves:
        number = dense[address, nbytes]
        view = views[number]
        if view.stored == view.tensor.numel():
            places.append((offset, number))
        else:  # expanded
            copies.append(Copy(offset, view.tensor.detach().as_strided((view.stored,), (1,)), (1,)))
    return CudaPlan(planned.manifest, places, copies, planned.sources)
