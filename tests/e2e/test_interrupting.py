"""Ctrl-C at any moment of a call in plain code: the call has ended when the exception arrives, and nothing is lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, NoReturn

import pytest
import torch

import busync
from busync import blocking
from busync.calls import Call, start_job
from busync.errors import ClosedError
from tests.support import patterns


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interruption_while_a_call_is_handed_over(loop: asyncio.AbstractEventLoop, moment: str) -> None:
    """The other side must not go on with it, unseen, over memory that the caller takes for its own again."""
    steps: list[str] = []

    async def work() -> None:
        steps.append("began")
        try:
            await asyncio.sleep(30)
        finally:
            steps.append("ended")

    interrupted = False

    def hand_over(call: Call[Any]) -> None:
        nonlocal interrupted
        if moment == "after":
            loop.call_soon_threadsafe(call.start)
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Call(loop, work(), "test", hand_over).block()
    assert steps in ([], ["began", "ended"])


def interrupt() -> NoReturn:
    """What Ctrl-C comes to in plain code, whatever was done about it."""
    raise KeyboardInterrupt


def strike(moment: int, call: Callable[[], object], blow: Callable[[], object] = interrupt) -> bool:
    """Make a call that Ctrl-C strikes at its n-th instruction; False if it has fewer."""
    left = moment

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        nonlocal left
        if frame.f_code.co_name == "_remove":  # of a weak set: Python drops what is raised in there
            return trace
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                blow()  # which ends the tracing if it raises
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return left <= 0


def test_an_interruption_at_every_instruction_of_waiting(loop: asyncio.AbstractEventLoop) -> None:
    """It must not leave a lock taken that the other side needs to bring the result."""
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(0.001)
        finally:
            ended.append(True)

    def hand_over(call: Call[Any]) -> None:
        loop.call_soon_threadsafe(call.start)

    struck = 0
    for moment in itertools.count(1):
        call = Call(loop, work(), "test", hand_over)
        if not strike(moment, call.block):
            break
        call.refuse()  # struck before it was handed over
        struck = moment
        assert asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "alive"), loop).result(5) == "alive"
    assert struck > 50
    assert ended


def test_an_interruption_of_what_must_be_done_anyway(loop: asyncio.AbstractEventLoop) -> None:
    """A loan is given back, though Ctrl-C strikes before the call has begun."""
    done = []

    async def give_back() -> None:
        done.append(True)

    interrupted = False

    def hand_over(call: Call[None]) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(call.start)

    with pytest.raises(KeyboardInterrupt):
        Call(loop, give_back(), "test", hand_over).block(cancel=False)
    assert done == [True]


def test_a_publish_that_nobody_waits_for_does_not_begin() -> None:
    with blocking.Publisher("p") as pub:
        call = pub._publish(patterns.state(1, 1), "default", "", {}, "none", 1.0)  # and here Ctrl-C strikes
        assert pub.status()["topics"] == {}
        call.refuse()
        assert pub.publish(patterns.state(1, 1)).version == 1


def test_work_that_comes_as_the_interpreter_ends_is_refused(loop: asyncio.AbstractEventLoop) -> None:
    workers = ThreadPoolExecutor(1)
    workers.shutdown()

    async def start() -> None:
        start_job(loop, workers, print)

    with pytest.raises(ClosedError):
        asyncio.run_coroutine_threadsafe(start(), loop).result(5)


def test_copies_that_have_begun_are_waited_for_when_the_next_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one would still write while its segment is used for the next version."""
    done = []
    with blocking.Publisher("p") as pub:
        assert pub._server is not None
        workers = pub._server.workers
        genuine = workers.submit

        def submit(job: Callable[..., Any], *args: Any) -> Any:
            if len(started) == 2:  # the segment is made, and the first copy runs
                raise RuntimeError("cannot schedule new futures after interpreter shutdown")
            started.append(job)

            def slow() -> Any:
                time.sleep(0.1)
                result = job(*args)
                done.append(True)
                return result

            return genuine(slow)

        pub.publish(patterns.state(1, 1))
        started: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(workers, "submit", submit)
            with pytest.raises(ClosedError):
                pub.publish({"w": torch.zeros(3_000_000), "v": torch.zeros(3_000_000)})
            assert len(done) == len(started)
        assert pub.publish(patterns.state(1, 2)).version == 2


def test_an_interruption_as_a_task_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop may have a task that asyncio has not entered into its list of all tasks."""
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:

        def interrupted(runner: asyncio.Runner, coroutine: Any) -> NoReturn:
            asyncio.tasks._all_tasks.discard(runner.get_loop().create_task(coroutine))  # type: ignore[attr-defined]
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(asyncio.Runner, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sub._run(sub._inner.next(1))
        pub.publish(patterns.state(1, 1))
        assert sub.next(5).version == 1


def test_an_interruption_between_lock_and_call_does_not_lock_the_subscriber() -> None:
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        pub.publish(patterns.state(1, 1))
        sub._inside.acquire()  # and here Ctrl-C strikes
        assert sub.next(5).version == 1
        sub._inside.release()


def test_an_interrupted_subscriber_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio.Runner forgets an interruption that strikes as it begins, and hands out the bare cancellation."""
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        pub.publish(patterns.state(1, 1))

        def cancelled(runner: asyncio.Runner, coroutine: Any) -> NoReturn:
            coroutine.close()
            raise asyncio.CancelledError

        with monkeypatch.context() as patch:
            patch.setattr(asyncio.Runner, "run", cancelled)
            with pytest.raises(KeyboardInterrupt):
                sub._run(sub._inner.next(1))
        assert sub.next(5).version == 1


def test_a_call_interrupted_before_its_first_step_does_not_run_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        genuine: Callable[..., Any] = asyncio.Runner.run

        def interrupted(runner: asyncio.Runner, coroutine: Any) -> NoReturn:
            runner.get_loop().create_task(coroutine)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(asyncio.Runner, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sub._run(sub._inner.next(1))
        assert asyncio.Runner.run is genuine
        pub.publish(patterns.state(1, 1))
        assert sub.next(5).version == 1
        with pytest.raises(busync.WaitTimeout):
            sub.next(0.05)


def ctrl_c() -> None:
    """As the terminal sends it: what is to be done about it is for the handler."""
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_at_every_instruction_of_a_subscriber_loses_nothing() -> None:
    """Neither the session, nor a lease, nor the version that had not been handed out yet."""
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        module, state = patterns.Module(patterns.SHAPES), patterns.state(1, 1)
        for moment in itertools.count(1, 5):
            newest = pub.publish(state).version
            got: list[blocking.Snapshot] = []
            reached = strike(moment, lambda got=got: got.append(sub.next(5)), ctrl_c)  # type: ignore[misc]
            if not got and sub.adopted != newest:  # and not lost on its way back to us
                got.append(sub.next(5))
            reached |= strike(moment, lambda got=got: got and got[0].ack(), ctrl_c)  # type: ignore[misc]
            reached |= strike(moment, lambda got=got: got and got[0].load_into(module), ctrl_c)  # type: ignore[misc]
            assert sub.adopted == newest
            del got
            if not reached:
                break
        assert pub.status()["counters"]["attached"] == 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        pub.publish(state)
        last = sub.next(5)
        last.ack()
        pub.wait(last.version, "acked", timeout=5)


def test_a_handler_that_raises_in_the_middle_of_a_message_costs_the_session_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was read and not handled comes again in the next session."""
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        pub.publish(patterns.state(1, 1))
        with monkeypatch.context() as patch:
            patch.setattr(sub._inner._core, "receive_bus", lambda message: interrupt())
            with pytest.raises(KeyboardInterrupt):
                sub.next(5)
        assert sub.next(5).version == 1
        assert pub.status()["counters"]["attached"] == 2


def test_a_child_that_another_thread_forks_has_its_own_ctrl_c() -> None:
    """The parent's main thread waits in a call, which the child does not have."""
    with blocking.Publisher("p"), blocking.Subscriber("p") as sub:
        statuses: list[int] = []

        def fork() -> None:
            time.sleep(0.2)
            pid = os.fork()
            if pid == 0:
                os._exit(0 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)
            statuses.append(os.waitpid(pid, 0)[1])

        thread = threading.Thread(target=fork)
        thread.start()
        with pytest.raises(busync.WaitTimeout):
            sub.next(0.6)
        thread.join()
        assert statuses == [0]
