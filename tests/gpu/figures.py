"""What the handles cost on this device: one exporter here, one importer in another process."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from busync.handles import Flat
from busync.handles.cuda import decode_handle, encode_handle
from busync.handles.cuda_backend import TorchCuda
from busync.handles.cuda_import import CudaImporter, ReceivedSegment
from busync.handles.cuda_layout import plan_cuda
from busync.handles.cuda_memory import CudaExporter
from busync.handles.cuda_reader import Reader

NBYTES = 1 << 30
TENSORS = 300


def _serve(pipe: Connection[Any, Any]) -> None:
    importer = CudaImporter(CudaExporter(TorchCuda()))
    torch.empty(1, device="cuda")
    pipe.send(os.getpid())
    sent, nbytes = pipe.recv()
    begun = time.perf_counter()
    received = ReceivedSegment(importer, 1, decode_handle(1, nbytes, sent), nbytes)
    received.open()
    pipe.send(time.perf_counter() - begun)
    pipe.recv()
    received.close()


def measure(nbytes: int = 0) -> dict[str, float]:
    """Times in microseconds, rates in GB/s."""
    exporter = CudaExporter(TorchCuda())
    free = torch.cuda.mem_get_info()[0]
    nbytes = nbytes or min(NBYTES, free // 8)
    count = nbytes // TENSORS // 2
    weights = {f"w{i}": torch.empty(count, dtype=torch.bfloat16, device="cuda") for i in range(TENSORS)}
    manifest = plan_cuda(Flat(weights)).manifest
    segment = exporter.create(exporter.device(0), manifest.nbytes)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        after = [exporter.backend.mark(0)]
        segment.write(plan_cuda(Flat(weights)), after).synchronize()
        times.append(time.perf_counter() - begun)
    flat, other = segment.flat, torch.empty(manifest.nbytes, dtype=torch.uint8, device="cuda")
    limits = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        other.copy_(flat)
        torch.cuda.synchronize()
        limits.append(time.perf_counter() - begun)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    reader = Reader.of(pipe.recv())
    begun = time.perf_counter()
    handle = segment.export(reader)
    exported = time.perf_counter() - begun
    pipe.send((encode_handle(handle), manifest.nbytes))
    opened = pipe.recv()
    pipe.send(None)
    process.join(30)
    return {
        "bytes": manifest.nbytes,
        "tensors": TENSORS,
        "copy_into_segment_us": round(min(times) * 1e6, 1),
        "one_copy_limit_us": round(min(limits) * 1e6, 1),
        "copy_into_segment_gb_s": round(manifest.nbytes / min(times) / 1e9, 1),
        "export_us": round(exported * 1e6, 1),
        "import_with_canary_us": round(opened * 1e6, 1),
    }
