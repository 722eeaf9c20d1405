from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref

import pytest

from busync import forks
from busync.errors import ForkedError
from tests.forking import check_in_child


class Recorder(forks.ForkAware):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def before_fork(self) -> None:
        self.calls.append("before")

    def after_fork_in_child(self) -> None:
        self.calls.append("child")


class Broken(forks.ForkAware):
    def before_fork(self) -> None:
        raise RuntimeError("before")

    def after_fork_in_child(self) -> None:
        raise KeyboardInterrupt


class Silent(forks.ForkAware):
    pass


def test_hooks_run_around_a_fork() -> None:
    recorder, silent = Recorder(), Silent()
    forks.register(recorder)
    forks.register(recorder)  # twice is once
    forks.register(silent)

    def check() -> None:
        assert recorder.calls == ["before", "child"]

    check_in_child(check)
    assert recorder.calls == ["before"]


def test_unregistered_hooks_do_not_run() -> None:
    recorder = Recorder()
    forks.register(recorder)
    forks.unregister(recorder)
    forks.unregister(recorder)
    check_in_child(lambda: None)
    assert recorder.calls == []


def test_is_referred_to_weakly() -> None:
    recorder = Recorder()
    forks.register(recorder)
    gone = weakref.ref(recorder)
    del recorder
    gc.collect()
    assert gone() is None
    check_in_child(lambda: None)


def test_a_broken_hook_breaks_neither_the_fork_nor_other_hooks(caplog: pytest.LogCaptureFixture) -> None:
    broken, recorders = Broken(), [Recorder() for _ in range(5)]
    forks.register(broken)
    for recorder in recorders:
        forks.register(recorder)

    def check() -> None:
        assert all(recorder.calls == ["before", "child"] for recorder in recorders)

    with caplog.at_level(logging.ERROR, "busync.forks"):
        check_in_child(check)
    forks.unregister(broken)
    assert [record.message.split(" of ")[0] for record in caplog.records] == ["before_fork"]


def test_a_fork_waits_for_the_lock_and_leaves_it_free() -> None:
    forks.register(keep := Silent())
    taken, half_done = threading.Event(), [False]

    def work() -> None:
        with forks.fork_lock:
            half_done[0] = True
            taken.set()
            time.sleep(0.05)
            half_done[0] = False

    thread = threading.Thread(target=work)
    thread.start()
    taken.wait()

    def check() -> None:
        assert not half_done[0]
        free = []

        def try_lock() -> None:
            free.append(forks.fork_lock.acquire(timeout=1))

        other = threading.Thread(target=try_lock)
        other.start()
        other.join()
        assert free == [True]

    check_in_child(check)
    thread.join()
    assert forks.fork_lock.acquire(blocking=False)
    forks.fork_lock.release()
    forks.unregister(keep)


def test_a_fork_under_the_lock() -> None:
    forks.register(keep := Silent())
    with forks.fork_lock:
        check_in_child(lambda: None)
    forks.unregister(keep)


def test_ensure_same_process() -> None:
    pid = os.getpid()
    forks.ensure_same_process(pid, "board")

    def check() -> None:
        with pytest.raises(ForkedError, match="board belongs to the parent"):
            forks.ensure_same_process(pid, "board")

    check_in_child(check)


def test_immortal() -> None:
    value = Silent()
    living = weakref.ref(value)
    forks.immortal(value)
    del value
    gc.collect()
    assert living() is not None
