"""Forks with everything open, on both sides: parents go on, children harm nobody."""

from __future__ import annotations

import gc
import os
import signal
import time
from contextlib import suppress

import pytest
import torch

import busync
from busync import blocking
from busync.errors import ForkedError
from tests.forking import check_in_child
from tests.support import patterns
from tests.support.processes import Cast
from tests.support.roles import FLAVOURS, wait_until

LEAVE = ["os._exit", "collect"]


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_child_of_a_subscriber_reads_on(cast: Cast, flavour: str, leave: str) -> None:
    learner = cast.publisher("policy", max_segments=4, max_held=4)
    actor = cast.subscriber("policy", flavour, name="actor")
    for version in (1, 2):
        learner.call("publish")
        actor.call("next")
        actor.call("keep")
        if version == 1:
            actor.call("load")
    actor.call("fork_reader", leave)
    for version in range(3, 23):
        actor.start("next")
        learner.call("publish")
        assert actor.finish()[0] == version
        actor.call("keep")
        actor.call("drop")
    assert actor.call("check") == 1
    actor.call("end_child")
    assert learner.call("subscribers") == ["actor"]


@pytest.mark.parametrize("leave", LEAVE)
def test_a_child_of_a_publisher(cast: Cast, leave: str) -> None:
    learner = cast.publisher("policy")
    actor = cast.subscriber("policy", name="actor")
    learner.call("publish")
    actor.call("next")
    actor.call("keep")
    learner.call("fork_child", leave)
    for version in range(2, 12):
        actor.start("next")
        learner.call("publish")
        assert actor.finish()[0] == version
        actor.call("keep")
        actor.call("drop")
    learner.call("end_child")
    late = cast.subscriber("policy", "uvloop", name="late")
    assert late.call("next")[0] == 11
    learner.start("publish", wait="all")
    for reader in (actor, late):
        reader.call("next")
        reader.call("ack")
    assert len(learner.finish()["acked"]) == 2


def test_a_child_that_survives_its_killed_publisher_holds_nothing(cast: Cast) -> None:
    learner = cast.publisher("policy")
    actor = cast.subscriber("policy", name="actor")
    learner.call("publish")
    actor.call("next")
    actor.call("keep")
    orphan = learner.call("fork_child")
    learner.forked.clear()
    try:
        learner.kill()
        wait_until(lambda: not actor.call("connected"), timeout=2, what="the loss was noticed")
        begun = time.monotonic()
        with blocking.Publisher("policy") as pub:
            assert time.monotonic() - begun < 1
            wait_until(lambda: bool(actor.call("connected")), what="the reconnection")
            pub.publish(patterns.state(5, 1), label="5")
            assert actor.call("next")[0] == 1
            actor.call("keep")
            assert actor.call("check") == 2
            os.kill(orphan, 0)  # it lives
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_child_that_survives_its_killed_subscriber_holds_no_session(cast: Cast) -> None:
    learner = cast.publisher("policy", max_segments=2)
    actor = cast.subscriber("policy", name="actor")
    learner.call("publish")
    actor.call("next")
    actor.call("keep")
    orphan = actor.call("fork_idle")
    actor.forked.clear()
    try:
        actor.kill()
        wait_until(lambda: learner.call("subscribers") == [], timeout=2, what="the end of the session")
        for _ in range(5):
            assert learner.call("publish", wait="all")["pending"] == ()
    finally:
        os.kill(orphan, signal.SIGKILL)


@pytest.mark.asyncio
@pytest.mark.blocks_loop  # a fork of a process this size does
async def test_a_fork_inside_a_running_loop_with_both_sides_in_the_process() -> None:
    async with busync.Publisher("p", max_segments=3) as pub, busync.Subscriber("p", name="a") as sub:
        await pub.publish(patterns.state(1, 1))
        snapshot = await sub.next(timeout=5)
        tensors = snapshot.tensors
        await snapshot.load_into(patterns.Module())
        async with pub.loan(like=patterns.Module()) as loan:
            loan.tensors["conv"].fill_(1)

            def child() -> None:
                patterns.check(tensors, 1, 1)
                for call in (
                    sub.poll, pub.status, lambda: snapshot.tensors, lambda: pub.incarnation,
                    lambda: sub.latest(1).send(None), lambda: snapshot.load_into(patterns.Module()).send(None),
                    lambda: snapshot.ack().send(None), lambda: pub.publish({"w": torch.ones(1)}).send(None),
                ):  # fmt: skip
                    with pytest.raises(ForkedError):
                        call()
                assert not sub.connected
                snapshot.release()
                gc.collect()

            check_in_child(child)
            loan.tensors["scalar"].fill_(2)
        for version in range(2, 8):
            await pub.publish(patterns.state(1, version))
            assert (await sub.next(timeout=5)).version == version
        patterns.check(tensors, 1, 1)
        assert sub.connected


def test_a_version_that_a_finalizer_saved_is_known_to_a_fork() -> None:
    with blocking.Publisher("p", max_segments=2) as pub, blocking.Subscriber("p", name="a") as sub:
        pub.publish(patterns.state(1, 1))
        saved: list[blocking.Snapshot] = []

        class Agent:
            def __init__(self, snapshot: blocking.Snapshot) -> None:
                self.snapshot = snapshot
                self.me = self

            def __del__(self) -> None:
                saved.append(self.snapshot)

        Agent(sub.next(timeout=5))
        gc.collect()
        tensors = dict(saved[0].tensors)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            with suppress(BaseException):
                os.close(writer)
                os.read(reader, 1)  # until the parent has published over what it let go of
                patterns.check(tensors, 1, 1)
                status = 0
            os._exit(status)
        tensors.clear()
        saved.clear()
        for version in range(2, 6):
            pub.publish(patterns.state(1, version))
        os.close(writer)
        os.close(reader)
        assert os.waitpid(pid, 0)[1] == 0


def test_a_loaded_snapshot_in_a_child_is_refused_and_not_read() -> None:
    """The read-only mapping of a load is not in the child: to read it there would be a SIGSEGV."""
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        pub.publish(patterns.state(1, 1))
        with sub.next(timeout=5) as snapshot:
            module = patterns.Module()
            snapshot.load_into(module)

            def child() -> None:
                with pytest.raises(ForkedError):
                    snapshot.load_into(module)
                with pytest.raises(ForkedError):
                    sub.next(timeout=1)
                with pytest.raises(ForkedError):
                    snapshot.tensors  # noqa: B018

            check_in_child(child)


def test_a_child_that_collects_a_blocking_subscriber_leaves_the_parents_loop_alone() -> None:
    with blocking.Publisher("p") as pub:
        box = [blocking.Subscriber("p").__enter__()]
        try:

            def child() -> None:
                box.clear()
                gc.collect()

            check_in_child(child)
            for version in range(1, 4):
                pub.publish(patterns.state(1, version))
                snapshot = box[0].next(timeout=5)
                snapshot.load_into(patterns.Module())  # a thread of the loop's wakes it
                assert snapshot.version == version
        finally:
            box[0].close()


def test_a_child_may_open_its_own() -> None:
    with blocking.Publisher("p") as pub, blocking.Subscriber("p") as sub:
        pub.publish(patterns.state(1, 1))
        held = sub.next(timeout=5).tensors

        def child() -> None:
            with blocking.Subscriber("p", name="child") as own:
                patterns.check(own.next(timeout=5).tensors, 1, 1)
                patterns.check(held, 1, 1)
            with blocking.Publisher("q") as other, blocking.Subscriber("q") as own:
                other.publish(patterns.state(2, 1))
                patterns.check(own.next(timeout=5).tensors, 2, 1)

        check_in_child(child)
        pub.publish(patterns.state(1, 2))
        patterns.check(sub.next(timeout=5).tensors, 1, 2)
