"""What plain subscribers do between and without turns of an event loop."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest
import torch

import busync
from busync import blocking, holds, session
from busync.attachment import Attachment
from busync.errors import PublisherLost, RefusedError
from busync.handles.unmapper import LARGE_BYTES
from tests.support import patterns


def test_one_that_only_polls_reconnects() -> None:
    with blocking.Publisher("p") as pub:
        pub.publish(patterns.state(1, 1))
        sub = blocking.Subscriber("p").__enter__()
        assert sub.next(5).version == 1
    with blocking.Publisher("p") as pub:
        pub.publish(patterns.state(1, 1))
        stop_at = time.monotonic() + 5
        while (snapshot := sub.poll()) is None:
            assert time.monotonic() < stop_at
            time.sleep(0.01)
        assert snapshot.incarnation == pub.incarnation
        sub.close()


def ask_in_vain(sub: blocking.Subscriber) -> None:
    with pytest.raises(busync.WaitTimeout):
        sub.next(timeout=0.0)


def test_one_that_never_waits_finds_the_next_publisher() -> None:
    with ExitStack() as stack:
        with blocking.Publisher("p") as pub:
            sub = stack.enter_context(blocking.Subscriber("p"))
            pub.publish(patterns.state(1, 1))
            sub.next(5)
        with blocking.Publisher("p") as pub:
            pub.publish(patterns.state(1, 1))
            stop_at = time.monotonic() + 5
            while True:
                try:
                    assert sub.next(timeout=0.0).incarnation == pub.incarnation
                    break
                except busync.WaitTimeout:
                    assert time.monotonic() < stop_at
                    time.sleep(0.01)


def test_small_versions_that_are_kept_are_in_nobodys_way() -> None:
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        kept = []
        for version in range(1, 51):
            pub.publish({"w": torch.tensor([float(version)])})
            snapshot = sub.next(5)
            kept.append(snapshot.tensors["w"])
            kept.append(snapshot)  # type: ignore[arg-type]
        assert sub.latest(5).tensors["w"].item() == 50
        opened = sub._inner._session
        assert opened is not None
        assert max(len(opened.leases.holds), len(opened.leases.words), len(opened.core.leases)) <= 2
        assert [float(tensor) for tensor in kept[::2]] == list(range(1, 51))


def test_what_a_finalizer_saves_keeps_its_lease() -> None:
    """The collector takes references to it away before the finalizer runs: it must not seem to be gone."""
    saved = []

    class Keeper:
        def __init__(self, snapshot: blocking.Snapshot) -> None:
            self.me, self.snapshot = self, snapshot

        def __del__(self) -> None:
            saved.append(self.snapshot)

    with blocking.Publisher("p", max_segments=2) as pub, blocking.Subscriber("p") as sub:
        pub.publish({"w": torch.ones(100_000)})
        Keeper(sub.next(5))
        gc.collect()
        assert sub.poll() is None
        weight = saved[0].tensors["w"]
        for version in range(2, 6):
            pub.publish({"w": torch.full((100_000,), float(version))})
            assert pub.status()["subscribers"][0]["leases"], "the lease has ended"
        assert bool((weight == 1).all())
        del weight
        saved.clear()
        pub.wait(1, "released", timeout=5)


@pytest.mark.asyncio
async def test_what_found_no_room_is_sent_while_a_call_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
        await pub.publish({"w": torch.zeros(100_000)})
        snapshot = await sub.next(5)
        weight = snapshot.tensors["w"]
        opened = sub._session
        assert opened is not None
        with monkeypatch.context() as patch:
            patch.setattr(opened.door, "_transmit", lambda data, fd: False)
            del snapshot, weight
            await asyncio.sleep(0)  # the future that brought it
            assert opened.door.outbox, "the Release waits"
        task = asyncio.create_task(sub.next())
        await asyncio.sleep(0.05)
        await pub.publish({"w": torch.ones(100_000)})
        assert (await asyncio.wait_for(task, 2)).version == 2


@pytest.mark.parametrize("call", ["latest", "wait_version", "poll", "next"])
@pytest.mark.parametrize("nbytes", [100, 200_000], ids=["copied", "mapped"])
def test_every_call_acknowledges_what_was_handed_out_before(call: str, nbytes: int) -> None:
    asks: dict[str, Callable[[blocking.Subscriber], object]] = {
        "latest": lambda sub: sub.latest(5),
        "wait_version": lambda sub: sub.wait_version(1, 5),
        "poll": lambda sub: sub.poll(),
        "next": ask_in_vain,
    }
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        pub.publish({"w": torch.zeros(nbytes, dtype=torch.uint8)})
        snapshot = sub.next(5)
        assert len(snapshot.tensors["w"]) == nbytes
        asks[call](sub)
        pub.wait(1, "acked", timeout=2)


def test_a_timeout_of_months() -> None:
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        later = threading.Timer(0.1, pub.publish, [patterns.state(1, 1)])
        later.start()
        assert sub.next(1e7).version == 1
        later.join()


def test_nothing_piles_up_in_the_loop_that_does_not_run() -> None:
    with blocking.Publisher("p") as pub, blocking.Subscriber("p", digests=True) as sub:
        assert sub._runner is not None
        waiting = getattr(sub._runner.get_loop(), "_ready")  # noqa: B009  # asyncio's own
        for version in range(1, 101):
            pub.publish({"w": torch.tensor(version)})
            snapshot = sub.next(5)
            snapshot.ack()
            del snapshot
        assert len(waiting) < 5


def test_another_thread_may_ask_for_tensors_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Nack disturbs nothing of a call that waits on the main thread."""
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        pub.publish(patterns.state(1, 1))
        snapshot = sub.next(5)
        refused: list[type[BaseException]] = []

        def refuse(*_: object) -> None:
            raise busync.AllocationError(1, "there is none")

        def ask() -> None:
            time.sleep(0.1)
            try:
                snapshot.tensors  # noqa: B018
            except busync.AllocationError as error:
                refused.append(type(error))

        with monkeypatch.context() as patch:
            patch.setattr(type(snapshot._hold), "own_memory", refuse)
            thread = threading.Thread(target=ask)
            thread.start()
            with pytest.raises(busync.WaitTimeout):
                sub.next(0.3)
            thread.join()
        assert refused == [busync.AllocationError]
        (status,) = pub.status()["subscribers"]
        assert "there is none" in status["reason"]
        assert pub.status()["counters"]["attached"] == 1


def test_the_end_waits_until_a_large_version_has_been_let_go_of() -> None:
    """Or its lease would end without the reader's word, and its segment would never be used again."""
    with blocking.Publisher("p") as pub:
        pub.publish({"w": torch.ones(LARGE_BYTES // 4)})
        with blocking.Subscriber("p") as sub:
            tensor = sub.next(5).tensors["w"]
            assert int(tensor.sum().item()) == tensor.numel()
            del tensor
        pub.wait(1, "released", timeout=5)
        assert pub.status()["counters"].get("broken leases", 0) == 0


def test_a_lease_whose_finalizer_was_struck_ends_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C inside a finalizer is swallowed by Python, and with it the word that the version is not used any more."""
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        for version in range(1, 5):
            pub.publish(patterns.state(1, version))
            snapshot = sub.next(5)
            snapshot.ack()
            with monkeypatch.context() as patch:
                patch.setattr(holds._Word, "__del__", lambda word: None)
                del snapshot
        pub.publish(patterns.state(1, 5))
        assert sub.next(5).version == 5
        assert pub.status()["subscribers"][0]["leases"] in ([], [5])


def test_large_versions_in_cycles_are_waited_for() -> None:
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        for version in range(1, 4):
            pub.publish({"w": torch.full((LARGE_BYTES // 4,), float(version))})
            cycle: list[object] = [sub.next(5).tensors["w"]]
            cycle.append(cycle)
            del cycle


def test_a_signal_handler_may_not_call_the_subscriber_inside_its_call() -> None:
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        said: list[str] = []

        def handle(*_: object) -> None:
            try:
                sub.poll()
            except busync.UsageError as error:
                said.append(str(error))

        before = signal.signal(signal.SIGALRM, handle)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(busync.WaitTimeout):
                sub.next(0.3)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert len(said) == 1
        assert "inside a call of its own" in said[0]
        pub.publish(patterns.state(1, 1))
        try:
            sub.wait_version(9, 0.01)
        except busync.WaitTimeout:  # whose traceback refers to the call
            assert sub.next(5).version == 1


def test_a_handler_that_raises_while_a_session_ends_does_not_end_the_subscriber(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with blocking.Publisher("p") as pub:
        sub = blocking.Subscriber("p").__enter__()
        pub.publish(patterns.state(1, 1))
        assert sub.next(5).version == 1
    with monkeypatch.context() as patch:

        def struck(one: session.Session) -> None:
            close(one)
            raise InterruptedError("by a signal's handler")

        close = session.Session.close
        patch.setattr(session.Session, "close", struck)
        with pytest.raises(InterruptedError):
            sub.next(1)
    with blocking.Publisher("p") as pub:
        pub.publish(patterns.state(1, 1))
        assert sub.next(5).incarnation == pub.incarnation
        sub.close()


def test_why_a_session_is_lost_keeps_nothing_that_callers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is kept has a traceback, and with it the frames of whoever called, and what they hold."""

    class Held:
        pass

    turn, turns = Attachment.turn, []

    def break_later(attachment: Attachment) -> None:
        """The first turn is the keeper's, a coroutine; in the next ones the loop itself calls."""
        turns.append(attachment)
        if len(turns) % 2:
            turn(attachment)
            return
        try:
            raise RefusedError("p", "protocol", "for a test")
        except RefusedError as error:
            attachment.end(error)

    with blocking.Publisher("p"), blocking.Subscriber("p") as sub:
        attachment = sub._inner._attachment

        def call() -> weakref.ref[Held]:
            held = Held()
            with monkeypatch.context() as patch:
                patch.setattr(Attachment, "turn", break_later)
                attachment.end(PublisherLost("p", "for a test"))
                with suppress(busync.WaitTimeout):
                    sub.next(timeout=0.3)
            return weakref.ref(held)

        known = call()
        gc.collect()
        assert isinstance(attachment.lost_reason, RefusedError)
        assert known() is None
