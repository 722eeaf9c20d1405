"""Between torch and memory: everything that knows what a tensor is.

    source    what a publish is given -> flat names, tensors, plain values
    tensors   which tensors can be published; dtypes and their names
    layout    tensors -> manifest, and the plan to copy them into a segment
    planner   the same for one source after another, of which most are alike
    copying   the plan's copies as jobs for worker threads
    memory    segments: made, sealed, checked, mapped
    private   copy-on-write mappings for callers' tensors, kept for the next version where nothing was written
    pagemap   which pages were written to: the kernel's answer
    unmapper  a thread that looks at large ones, and unmaps them
    build     manifest and mapped memory -> tensors; loans
    load      a version -> the modules of a reader
    digest    SHA-256 over the content of a version
    mixed     the same for tensors on the CPU and on GPUs together
    cuda*     segments on a GPU: what travels, the device, the publisher's side, the reader's (docs/GPU.md)
    gpus      this process's part in those

Nothing here knows about messages, sockets or leases.
"""

from busync.handles import gpus
from busync.handles.build import LoanBuffer, Memory, MixedBuilder, TensorBuilder, Tensors, live_names
from busync.handles.copying import Job
from busync.handles.cuda import decode_handle, encode_handle
from busync.handles.cuda_backend import CudaEvent
from busync.handles.cuda_import import ReceivedSegment
from busync.handles.cuda_memory import CudaSegment
from busync.handles.cuda_reader import Reader
from busync.handles.digest import content_digest
from busync.handles.layout import Plan, like_plan, plan
from busync.handles.load import LoadPlan, NameMap, plan_load
from busync.handles.memory import (
    COPY_BYTES,
    Segment,
    check_segment,
    create_segment,
    map_private,
    map_readonly,
    open_segment,
)
from busync.handles.mixed import like_mixed
from busync.handles.planner import Planner
from busync.handles.private import PrivateMappings
from busync.handles.source import Flat, Source, flatten
from busync.handles.unmapper import unmapping

__all__ = [
    "COPY_BYTES",
    "CudaEvent",
    "CudaSegment",
    "Flat",
    "Job",
    "LoadPlan",
    "LoanBuffer",
    "Memory",
    "MixedBuilder",
    "NameMap",
    "Plan",
    "Planner",
    "PrivateMappings",
    "Reader",
    "ReceivedSegment",
    "Segment",
    "Source",
    "TensorBuilder",
    "Tensors",
    "check_segment",
    "content_digest",
    "create_segment",
    "decode_handle",
    "encode_handle",
    "flatten",
    "gpus",
    "like_mixed",
    "like_plan",
    "live_names",
    "map_private",
    "map_readonly",
    "open_segment",
    "plan",
    "plan_load",
    "unmapping",
]
