"""Interpreters that end with everything left open end soon, with 0, and say nothing but what is due."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PREPARE = """
import asyncio, os, sys, threading, time, torch, busync
from busync import blocking
state = {"w": torch.ones(100_000)}
def both():
    global pub, sub, snapshot, tensors
    pub = blocking.Publisher("p"); pub.__enter__()
    sub = blocking.Subscriber("p"); sub.__enter__()
    pub.publish(state); snapshot = sub.next(5); tensors = dict(snapshot.tensors)
async def async_both():
    global pub, sub, snapshot, tensors
    pub = busync.Publisher("p"); await pub.__aenter__()
    sub = busync.Subscriber("p"); await sub.__aenter__()
    await pub.publish(state); snapshot = await sub.next(5); tensors = dict(snapshot.tensors)
    await snapshot.load_into(torch.nn.Linear(1, 1), strict=False)
def ready():
    print("ready", flush=True)
"""

ENDINGS = {
    "at the end": "both(); ready()",
    "by sys.exit": "both(); ready(); sys.exit()",
    "inside functions": "def f():\n    both()\n    ready()\nf()",
    "asyncio": "asyncio.run(async_both()); ready()",
    "uvloop": "import uvloop; uvloop.run(async_both()); ready()",
    "a loop that was never closed": "loop = asyncio.new_event_loop(); loop.run_until_complete(async_both()); ready()",
    "a loan": "both(); loan = pub.loan(like=state); loan.__enter__(); w = loan.tensors['w']; ready()",
    "cycles": (
        "both(); knot = [tensors, sub, pub, snapshot]; knot.append(knot); del pub, sub, snapshot, tensors; ready()"
    ),
    "a thread that waits": (
        "both(); threading.Thread(target=lambda: sub.next(None), daemon=True).start(); time.sleep(0.2); ready()"
    ),
    "a publish that waits": (
        "both()\ndef p():\n    try: pub.publish(state, wait='all', timeout=60)\n    except busync.ClosedError: pass\n"
        "threading.Thread(target=p, daemon=True).start(); time.sleep(0.2); ready()"
    ),
    "kept mappings": (
        "both(); del snapshot, tensors\nstate['w'] = torch.ones(10_000_000)\n"
        "for _ in range(3):\n    pub.publish(state); sub.next(5).tensors['w'].sum()\n"
        "pub.publish(state); snapshot = sub.next(5); w = snapshot.tensors['w']; ready()"
    ),
    "a publisher alone": "pub = blocking.Publisher('p'); pub.__enter__(); ready()",
    "after a fork": (
        "both()\npid = os.fork()\nif pid == 0: sys.exit()\n_, status = os.waitpid(pid, 0)\nassert status == 0, status\n"
        "pub.publish(state); assert sub.next(5).version == 2; ready()"
    ),
}
#: Python's own complaints about loops and tasks of the script that it never closed.
NOT_OURS = (
    "unclosed event loop", "never closed", "Task was destroyed", "task: <Task", "sys:1:", "Enable tracemalloc",
    "warnings.warn",
)  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_everything_left_open(ending: str, runtime_dir: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PREPARE + ending], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            first = process.stdout.readline()
            begun = time.monotonic()
            said = process.stderr.read() if not first else ""
            code = process.wait(20)
            took = time.monotonic() - begun
            said += process.stderr.read()
        finally:
            process.kill()
    assert first == "ready\n", said
    assert code == 0, said
    assert took < 2
    assert "Traceback" not in said, said
    assert "Exception ignored" not in said, said
    assert [line for line in said.splitlines() if not any(mark in line for mark in NOT_OURS)] == []
    assert sorted(os.listdir(runtime_dir / "p")) == ["lock"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals(number: signal.Signals, runtime_dir: Path) -> None:
    """Ctrl-C reaches a waiting subscriber and a waiting publish; nothing of the endpoint stays."""
    script = """
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
try:
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        pub.publish(state); ready()
        snapshot = sub.next(5)
        sub.next(30)
except KeyboardInterrupt:
    sys.exit(130)
"""
    with subprocess.Popen(
        [sys.executable, "-c", PREPARE + script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.2)
            begun = time.monotonic()
            process.send_signal(number)
            code = process.wait(20)
            took = time.monotonic() - begun
            said = process.stderr.read()
        finally:
            process.kill()
    assert (code, said) == (128 + number, "")
    assert took < 2
    assert sorted(os.listdir(runtime_dir / "p")) == ["lock"]
