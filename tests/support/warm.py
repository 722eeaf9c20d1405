"""What torch and busync do once per process, done before a loop is watched."""

from __future__ import annotations

import gc

import torch
import uvloop

from busync.handles import LoanBuffer, TensorBuilder, content_digest, flatten, plan, plan_load


def warm_up() -> None:
    """Use every part of torch that a publisher and a subscriber use."""
    torch.set_num_threads(1)  # forked children of tests would wait for OpenMP threads that they do not have
    model = torch.nn.Linear(3, 4)
    planned = plan(flatten(model))
    memory = bytearray(planned.manifest.nbytes)
    for job in planned.jobs(memoryview(memory), 1):
        job()
    built = {spec.name: TensorBuilder(memory, planned.manifest).build(spec) for spec in planned.manifest.tensors}
    content_digest(built)
    plan_load(1, planned.manifest, [torch.nn.Linear(3, 4)]).run(TensorBuilder(memory, planned.manifest))
    uvloop.new_event_loop().close()  # libuv keeps a pipe for signals for good
    loan = LoanBuffer(TensorBuilder(memory, planned.manifest))
    loan.drop()
    loan.in_use()
    torch.equal(torch.arange(10, dtype=torch.int64).to(torch.float32).mul_(2), torch.zeros(10))
    gc.collect()
    gc.freeze()  # a collection looks at some 200,000 objects of torch otherwise, and holds every loop for 100 ms
