"""Shared CPU memory: processes that come and go."""

from __future__ import annotations

import multiprocessing.util
import os
import random
import shutil
import sys
import threading
import time
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import busync
from busync import blocking
from busync.transport.door import DoorConnection, Packet
from tests.field_reports.kit import bus, end_of, program, raised, scaled, shared_bytes, traces
from tests.limits.kit import mappings
from tests.support import patterns
from tests.support.mutants import Mutant
from tests.support.processes import Cast
from tests.support.roles import PublisherRole, Role, wait_until

MUTANTS = {
    "test_b07_a_killed_publisher_leaves_nothing_for_ever": Mutant(
        "busync/transport/endpoint.py",
        "    os.unlink(path)\n",
        "    os.stat(path)\n",
        "what a killed publisher left stays in the way of the next",
    ),
    "test_b08_a_reader_that_exits_takes_nothing_along": Mutant(
        "busync/session.py",
        "        self.door.shutdown()\n",
        "        self.door.shutdown()\n        os.unlink(self.endpoint.door_path)\n",
        "whoever attached cleans up like an owner",
    ),
    "test_b09_what_is_gone_already_is_no_error_at_the_end": Mutant(
        "busync/transport/endpoint.py",
        "with contextlib.suppress(OSError, EndpointError):",
        "with contextlib.nullcontext():",
        "a close that finds something else where its socket was fails",
    ),
    "test_b10_a_publisher_that_ends_after_its_publish": Mutant(
        "busync/session.py",
        'raise SessionEnded("the publisher closed the connection") from None',
        "raise",
        "the raw end of the connection gets out of the session",
    ),
    "test_b11_unrelated_programs_share_without_a_common_secret": Mutant(
        "busync/links.py",
        "if door.peer.uid != os.geteuid() and",
        "if os.getsid(door.peer.pid) != os.getsid(0) and",
        "only relatives may subscribe",
    ),
}


def test_b07_a_killed_publisher_leaves_nothing_for_ever(cast: Cast, runtime_dir: Path) -> None:
    """SIGKILL at random moments of publishing: the next start finds its way, and another bus notices nothing."""
    rng = random.Random(7)
    other = cast.publisher("other")
    reader = cast.subscriber("other", "blocking")
    victims = []
    for turn in range(scaled(4, 20)):
        victim = cast.publisher("policy")
        victims.append(victim.pid)
        victim.call("publish_forever", 0.0)
        time.sleep(rng.uniform(0.0, 0.1))
        victim.kill()
        other.call("publish")
        assert reader.call("next")[0] == turn + 1
        reader.call("keep")
        reader.call("drop")
        assert sorted(os.listdir(runtime_dir / "policy")) == ["bus", "door", "lock"]
    last = cast.publisher("policy")
    last.call("publish")
    with blocking.Subscriber("policy") as sub:
        snapshot = sub.next(5)
        patterns.check(snapshot.tensors, int(snapshot.label), 1)
        del snapshot
    last.stop()
    assert sorted(os.listdir(runtime_dir / "policy")) == ["lock"]
    assert sorted(os.listdir(runtime_dir / "other")) == ["bus", "door", "lock"]
    assert traces(*victims, other.pid) == []
    assert mappings(other.pid, "memfd:busync") <= 5
    assert shared_bytes() == 0


READER = """
import os, sys, threading
from multiprocessing import resource_sharer, resource_tracker
from busync import blocking
sub = blocking.Subscriber("p", name=sys.argv[-1]).__enter__()
snapshot = sub.next(10)
tensors = dict(snapshot.tensors)
assert all(bool((t == snapshot.version).all()) for t in tensors.values())
assert resource_tracker._resource_tracker._fd is None, "a tracker was started"
assert resource_sharer._resource_sharer._listener is None, "a sharer was started"
assert [t.name for t in threading.enumerate()] == ["MainThread"], threading.enumerate()
assert not open(f"/proc/self/task/{os.getpid()}/children").read(), "it has children"
"""
ENDINGS = {"normally": ("sub.close()\n", 0), "by an exception": ("raise SystemError('on purpose')\n", 1)}


def test_b08_a_reader_that_exits_takes_nothing_along(cast: Cast) -> None:
    """One reader ends normally, one program by an exception: nobody else loses anything, no tracker says a word."""
    with bus() as (pub, (witness,)):
        pub.publish({f"t{i}": torch.full((5000,), 1.0) for i in range(10)})
        seen = witness.next(5).tensors
        endings = [ENDINGS["by an exception"], *scaled([], [ENDINGS["normally"]])]
        readers = [(program(READER + code), expected) for code, expected in endings]
        child = cast.subscriber("p", "blocking")
        assert child.call("next")[0] == 1
        child.stop()
        for reader, expected in readers:
            code, _, said = end_of(reader)
            assert code == expected, said
            assert "tracker" not in said
            assert "leaked" not in said
            assert len([line for line in said.splitlines() if "Error" in line]) == expected, said
        wait_until(lambda: len(pub.status()["subscribers"]) == 1)
        with blocking.Subscriber("p") as third:
            for version in (1, 2):
                snapshot = third.next(5)
                assert snapshot.version == version
                assert all(bool((tensor == version).all()) for tensor in snapshot.tensors.values())
                pub.publish({f"t{i}": torch.full((5000,), 2.0) for i in range(10)})
            del snapshot
        assert all(bool((tensor == 1).all()) for tensor in seen.values())
        del seen


def disturb(how: str, directory: Path) -> None:
    """Take away what a publisher has in the file system."""
    if how == "all":
        shutil.rmtree(directory)
    elif how == "sockets":
        for name in ("bus", "door"):
            (directory / name).unlink()
    else:
        for name in ("bus", "door"):
            (directory / name).unlink()
            (directory / name).mkdir()


def open_and_close(runtime: str, endpoint: str, how: str) -> None:
    """In a child: publish, lose the files, close twice, and once more from an exit hook."""
    os.environ["BUSYNC_RUNTIME_DIR"] = runtime
    pub, sub = blocking.Publisher(endpoint), blocking.Subscriber(endpoint)
    for end in (sub, pub):
        multiprocessing.util.Finalize(None, end.close, exitpriority=1)
    pub.__enter__()
    sub.__enter__()
    pub.publish({"w": torch.ones(1000)})
    assert sub.next(5).tensors["w"].sum() == 1000
    disturb(how, Path(runtime, endpoint))
    for _ in range(2):
        pub.close()
        sub.close()


def run(context: Any, runtime: str, endpoint: str, how: str) -> int | None:
    process = context.Process(target=open_and_close, args=(runtime, endpoint, how))
    process.start()
    process.join(30)
    code: int | None = process.exitcode
    process.close()
    return code


class Parent(Role):
    """A child that has children, which say what they say where it does."""

    def run(self, method: str, *args: str) -> int | None:
        return run(get_context(method), *args)

    def stop(self) -> None:
        pass

    def left(self) -> str:
        return ""  # the start methods keep helpers of their own


@pytest.mark.parametrize("method", ["fork", "forkserver", *scaled((), ("spawn",))])
def test_b09_what_is_gone_already_is_no_error_at_the_end(
    method: str, cast: Cast, context: ForkServerContext, runtime_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Files removed or replaced behind its back, closed twice and from an exit hook: exit status 0, not a word."""
    parent = cast.begin(Parent)
    parent.finish()
    for how in ("all", "sockets", "replaced"):
        arguments = str(runtime_dir), f"{method}-{how}", how
        if method == "forkserver":
            assert run(context, *arguments) == 0
        else:
            assert parent.call("run", method, *arguments, timeout=40) == 0
        for name in ("bus", "door"):
            with suppress(FileNotFoundError):
                (runtime_dir / f"{method}-{how}" / name).rmdir()
    assert capfd.readouterr().err == ""


class Brief(PublisherRole):
    """A publisher that ends right after its publish."""

    def publish_and_end(self, how: str) -> None:
        self.publish()
        if how == "killed":
            os.kill(os.getpid(), 9)
        self.pub.close()


@pytest.mark.parametrize("how", ["closed", "killed"])
@pytest.mark.parametrize("delay", [0.0, 0.05, 0.5])
def test_b10_a_publisher_that_ends_after_its_publish(cast: Cast, how: str, delay: float) -> None:
    """The announcement is there, the descriptor comes late, and the publisher is gone: all of it, or a clear word."""
    learner = cast.begin(Brief, "policy", {})
    learner.finish()
    arrived: list[float] = []
    receive = DoorConnection.receive

    def late(door: DoorConnection) -> Packet | None:
        if arrived and time.monotonic() < arrived[0] + delay:
            return None
        return receive(door)

    with ExitStack() as stack:
        sub = stack.enter_context(blocking.Subscriber("policy"))
        learner.call("publish")
        first = sub.next(5)
        kept, seed = first.tensors, int(first.label)
        del first
        stack.enter_context(mock.patch.object(DoorConnection, "receive", late))
        arrived.append(time.monotonic())
        learner.start("publish_and_end", how)
        began = time.monotonic()
        snapshot = None
        try:
            snapshot = sub.next(0.7)
        except busync.WaitTimeout as error:
            assert "no publisher at" in str(error), error  # noqa: PT017
        assert time.monotonic() - began < 0.7 + delay + 2.0
        if snapshot is not None:
            assert snapshot.version == 2
            patterns.check(snapshot.tensors, seed, 2)
            del snapshot
        patterns.check(kept, seed, 1)
        wait_until(lambda: not sub.connected, what="the loss was noticed")
        assert raised(busync.WaitTimeout, lambda: sub.next(0.05)).missing  # type: ignore[attr-defined]
        patterns.check(kept, seed, 1)
        learner.kill()
        del kept
    cast.publisher("policy").stop()  # sweeps what a killed one left


PUBLISHER = """
import multiprocessing, sys, threading
from multiprocessing import resource_sharer
multiprocessing.current_process().authkey = b"another secret"
import torch
from busync import blocking
with blocking.Publisher("p") as pub:
    print("ready", flush=True)
    for version in range(1, 11):
        report = pub.publish({f"t{i}": torch.full((3000,), float(version)) for i in range(5)}, wait=1, timeout=10)
        assert report.acked, report
    assert resource_sharer._resource_sharer._listener is None, "a sharer was started"
    assert not any("sharer" in t.name for t in threading.enumerate())
    sys.stdin.read()
"""


def test_b11_unrelated_programs_share_without_a_common_secret() -> None:
    """A publisher of another session, with another key for multiprocessing: ten versions, and no sharer thread."""
    threads = {thread.ident for thread in threading.enumerate()}
    publisher = program(PUBLISHER, new_session=True)
    try:
        with blocking.Subscriber("p", connect_timeout=20) as sub:
            for version in range(1, 11):
                snapshot = sub.next(10)
                assert snapshot.version == version
                assert all(bool((tensor == version).all()) for tensor in snapshot.tensors.values())
                snapshot.ack()
            del snapshot
            assert {thread.ident for thread in threading.enumerate()} == threads
    finally:
        code, _, said = end_of(publisher)
    assert (code, said) == (0, "")
    assert "multiprocessing.resource_sharer" not in sys.modules or not any(
        "sharer" in thread.name for thread in threading.enumerate()
    )
