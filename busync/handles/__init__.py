"""Between torch and memory: everything that knows what a tensor is.

    source    what a publish is given -> flat names, tensors, plain values
    tensors   which tensors can be published; dtypes and their names
    layout    tensors -> manifest, and the plan to copy them into a segment
    planner   the same for one source after another, of which most are alike
    copying   the plan's copies as jobs for worker threads
    memory    segments: made, sealed, checked, mapped
    unmapper  a thread that unmaps large ones
    build     manifest and mapped memory -> tensors; loans
    load      a version -> the modules of a reader
    digest    SHA-256 over the content of a version
    cuda*     segments on a GPU: what travels, the device, the publisher's side, the reader's (docs/GPU.md)

Nothing here knows about messages, sockets or leases.
"""

from busync.handles.build import LoanBuffer, Memory, TensorBuilder, Tensors, live_names
from busync.handles.copying import Job
from busync.handles.digest import content_digest
from busync.handles.layout import Plan, like_plan, plan
from busync.handles.load import LoadPlan, NameMap, plan_load
from busync.handles.memory import (
    COPY_BYTES,
    PrivateCopy,
    Segment,
    check_segment,
    copy_private,
    create_segment,
    map_private,
    map_readonly,
    open_segment,
)
from busync.handles.planner import Planner
from busync.handles.source import Flat, Source, flatten
from busync.handles.unmapper import expect_large, unmapping

__all__ = [
    "COPY_BYTES",
    "Flat",
    "Job",
    "LoadPlan",
    "LoanBuffer",
    "Memory",
    "NameMap",
    "Plan",
    "Planner",
    "PrivateCopy",
    "Segment",
    "Source",
    "TensorBuilder",
    "Tensors",
    "check_segment",
    "content_digest",
    "copy_private",
    "create_segment",
    "expect_large",
    "flatten",
    "like_plan",
    "live_names",
    "map_private",
    "map_readonly",
    "open_segment",
    "plan",
    "plan_load",
    "unmapping",
]
