"""What a process has open, to be compared before and after a test."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

#: Descriptors that are not counted: with which other threads look, and what CUDA, real or emulated, opens as it likes.
PASSED_OVER = ("/proc/", "/dev/nvidia", "/memfd:cudaemu", "/dev/shm/torch_")
PATIENCE = 3.0  #: seconds that leftovers get to disappear


@dataclass(frozen=True, slots=True)
class Resources:
    """What one process has at one moment."""

    fds: Counter[str]
    threads: Counter[str]
    children: Counter[str]
    mappings: Counter[str]

    def beyond(self, before: Resources) -> str:
        """What is here and was not there before; empty if nothing is."""
        extra = {
            "descriptors": self.fds - before.fds,
            "threads": self.threads - before.threads,
            "child processes": self.children - before.children,
            "mappings": self.mappings - before.mappings,
        }
        return "; ".join(f"{kind}: {dict(more)}" for kind, more in extra.items() if more)


def resources() -> Resources:
    """Look. Takes 1 to 2 ms in a process that has torch loaded."""
    fds: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the one that lists them
        if not link.startswith(PASSED_OVER):
            fds[link] += 1
    threads: Counter[str] = Counter(f"{t.name} ({t.ident})" for t in threading.enumerate())
    children: Counter[str] = Counter()
    for task in os.listdir("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
            children.update(Path(f"/proc/self/task/{task}/children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended
        if name.startswith("ZMQbg"):  # libzmq's own; torch's pools may come when they like
            threads[f"{name} ({task})"] += 1
    mappings: Counter[str] = Counter()
    with open("/proc/self/maps", "rb") as maps:
        for line in maps.read().split(b"\n"):
            if b"memfd:busync" in line:
                fields = line.split()
                mappings[f"{fields[1].decode()} {fields[5].decode()} inode {fields[4].decode()}"] += 1
    return Resources(fds, threads, children, mappings)


def leftovers(before: Resources) -> str:
    """What is left beyond ``before``, after some patience and a garbage collection; empty if nothing is."""
    extra = resources().beyond(before)
    stop_at = time.monotonic() + PATIENCE
    while extra and time.monotonic() < stop_at:
        gc.collect()
        time.sleep(0.01)
        extra = resources().beyond(before)
    return extra


def files_left(directory: Path) -> list[str]:
    """Files of endpoints that should be gone. Directories and locks stay for good."""
    return [os.path.join(where, name) for where, _, names in os.walk(directory) for name in names if name != "lock"]
