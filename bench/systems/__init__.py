"""One module per system. Each says how its own documentation uses it, and no more."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from bench.systems.base import System

#: Name to module. The first two are not rivals: they are what the machine allows.
MODULES: Final = {
    "limit": "limit", "floor": "floor", "busync": "busync_",
    "queues": "queues", "queues-reuse": "queues_reuse", "zmq": "zmq_bytes", "files": "files", "gloo": "gloo",
    "torchrl": "torchrl_", "ray": "ray_", "staging": "staging",
}  # fmt: skip


def find(name: str) -> System:
    """The system of that name."""
    system: System = import_module(f"bench.systems.{MODULES[name]}").SYSTEM
    return system
