"""What the field reports share: long forms, programs of their own, and roles for children."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from busync import blocking
from tests.limits.kit import segment_bytes

LONG = os.environ.get("BUSYNC_LONG") == "1"
ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


def scaled(short: T, long: T) -> T:
    """``long`` if long forms are asked for."""
    return long if LONG else short


def program(code: str, *, new_session: bool = False) -> subprocess.Popen[str]:
    """A Python program that is no relative of the test by anything but its parent."""
    return subprocess.Popen(
        [sys.executable, "-c", code], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=new_session, env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )  # fmt: skip


def end_of(process: subprocess.Popen[str], timeout: float = 20.0) -> tuple[int, str, str]:
    """Exit status (negative: a signal), stdout and stderr of a program, which is killed if it takes too long."""
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return process.returncode, out, err


@contextmanager
def bus(
    readers: int = 1, *, max_segments: int = 4, max_held: int = 2, lease_timeout: float = 10.0
) -> Iterator[tuple[blocking.Publisher, list[blocking.Subscriber]]]:
    """A publisher and subscribers named "reader-0" and so on, all in this process."""
    with ExitStack() as stack:
        pub = blocking.Publisher("p", max_segments=max_segments, max_held=max_held, lease_timeout=lease_timeout)
        stack.enter_context(pub)
        yield pub, [stack.enter_context(blocking.Subscriber("p", name=f"reader-{i}")) for i in range(readers)]


def leases(pub: blocking.Publisher, name: str = "reader-0") -> list[int]:
    """The versions that a subscriber holds, as the publisher knows it."""
    return next(list(s["leases"]) for s in pub.status()["subscribers"] if s["name"] == name)


def traces(*pids: int) -> list[str]:
    """Named shared memory that these processes made, and helper processes of torch that they started."""
    marks = ("busync", *(f"torch_{pid}_" for pid in pids))
    found = [name for name in os.listdir("/dev/shm") if any(mark in name for mark in marks)]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            if name.startswith("torch_shm") and int(rest.split()[1]) in pids:
                found.append(name)
    return found


def shared_bytes() -> int:
    """Bytes of the segments that this process maps or has open."""
    return segment_bytes([os.getpid()])


def prctl(option: int, value: int) -> None:
    """The system call, for this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def raised(kind: type[BaseException], call: Callable[[], object]) -> BaseException:
    """What ``call`` raised, without the traceback that would keep its frames.

    Raises:
        AssertionError: it raised nothing.
    """
    try:
        call()
    except kind as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    raise AssertionError(f"no {kind.__name__}")
