"""Ray's object store: one ``ray.put``, and one call of each actor with the reference."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from bench.busy import keep_busy
from bench.states import State, prove, proved, read_all
from bench.systems.base import Answers, Cell, Learner, System

#: For the processes that Ray starts: nothing is reported, and the store's memory is there before it is used.
SETTINGS: Final = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0", "RAY_task_events_report_interval_ms": "0",
    "RAY_preallocate_plasma_memory": "1",
}  # fmt: skip
SPARE_BYTES: Final = 256 << 20  #: of the object store beside the versions in it
BITS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}  #: what NumPy knows in place of, say, bfloat16


class RayLearner(Learner):
    """A driver with a cluster of its own, whose actors are the readers.

    Actors are what Ray's own libraries broadcast weights to. A process that Ray has not started could only be told of
    an object through an actor, which costs a call more, or by a reference that is pickled by hand, which Ray's
    documentation advises against: the object is then never freed.
    """

    def __init__(self, cell: Cell, directory: str, tickets: list[Any]) -> None:
        super().__init__(cell, directory, tickets)
        self._ray: Any = import_module("ray")
        os.environ.update(SETTINGS)
        self._ray.init(
            address="local",
            num_cpus=cell.readers,
            object_store_memory=4 * cell.kind.nbytes + SPARE_BYTES,  # the old version, the new, and some not yet freed
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
            _node_ip_address="127.0.0.1",
            _temp_dir=directory,
        )
        actor = self._ray.remote(RayActor)
        self._actors = [actor.remote(cell, number) for number in range(cell.readers)]
        self._reference: Any = None

    def attach(self) -> None:
        """Wait until every actor has started."""
        self._ray.get([actor.ready.remote() for actor in self._actors])

    def hand_over(self, state: State, answers: Answers) -> None:
        """One object for all. NumPy's arrays are what Ray gives to readers without a copy."""
        arrays = {name: _bits(tensor).numpy() for name, tensor in state.items()}
        self._reference = self._ray.put(arrays)
        self._ray.get([actor.use.remote(self._reference) for actor in self._actors])

    def close(self) -> None:
        """End the cluster, and the actors with it."""
        self._ray.shutdown()


def _bits(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.view(BITS[tensor.dtype.itemsize])


class RayActor:
    """A reader, which Ray runs in a process of its own. It returns when it can use the version it was called with."""

    def __init__(self, cell: Cell, number: int) -> None:
        torch.set_num_threads(1)
        keep_busy(cell, number)
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._cell = cell
        self._names = proved(name for name, _ in cell.kind.shapes())
        self._module = cell.kind.module() if cell.mode == "load" else None
        self._version = 0
        self._held: Mapping[str, Tensor] = {}

    def ready(self) -> None:
        """Say that this process has started."""

    def use(self, arrays: Mapping[str, Any]) -> None:
        """Look at a version, and hold it until the next."""
        dtype = self._cell.kind.dtype
        self._version += 1
        self._held = {name: torch.from_numpy(array).view(dtype) for name, array in arrays.items()}
        if self._module is not None:
            self._module.load_state_dict(dict(self._held))
            self._held = self._module.state_dict()
        prove(self._held, self._names, self._version)
        if self._cell.mode == "read":
            read_all(self._held)


SYSTEM = System(
    name="ray", learner=RayLearner, warm=4, modes=frozenset(("view", "read", "load")), needs=("ray",),
    page="https://docs.ray.io/en/latest/ray-core/patterns/pass-large-arg-by-value.html",
    note="ray.put of NumPy arrays, then a call of each actor with the reference; the actors view the object store, and "
    "answer by returning",
)  # fmt: skip
