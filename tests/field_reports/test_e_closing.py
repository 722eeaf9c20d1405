"""Ends, forks, threads and loops (B88, B89, B90, B94)."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

import busync
from busync import blocking
from busync.errors import BusyncError
from tests.support import patterns
from tests.support.mutants import Mutant
from tests.support.processes import Cast
from tests.support.roles import Role

LONG = bool(os.environ.get("BUSYNC_LONG"))
CROWD = max(1.0, os.getloadavg()[0] / 2)  #: what takes a second alone takes longer with others on two cores
SMALL = patterns.SMALL
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
Loop = Callable[[], asyncio.AbstractEventLoop]
on_both_loops = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)

MUTANTS = {
    "test_b88_every_end_is_soon": Mutant(
        "busync/transport/bus.py", "            sock.close(0)\n", "            sock.close(30_000)\n",
        "the end waits for messages that a stopped reader does not take",
    ),
    "test_b89_children_disturb_nobody": Mutant(
        "busync/transport/door.py", "        _abandon_socket(self._sock)\n        self._flushing",
        "        self.shutdown()\n        self._flushing",
        "a child ends the sessions of its parent",
    ),
    "test_b90_a_publisher_may_be_called_from_any_thread": Mutant(
        "busync/publisher.py", "return server.call(status()).block()",
        "return server.loop.run_until_complete(status())",
        "whoever calls runs the loop of the publisher's thread",
    ),
    "test_b90_a_subscriber_refuses_other_threads": (
        Mutant(
            "busync/asking.py", "        running = asyncio._get_running_loop()\n",
            "        running = self._attachment.loop\n",
            "any thread may use the sockets of a subscriber",
        ),
        Mutant(
            "busync/blocking.py", "if not self._inside.acquire(blocking=False):", "if not self._inside:",
            "two threads run the loop of one subscriber",
        ),
    ),
    "test_b94_made_before_its_loop_and_used_in_a_second_one": Mutant(
        "busync/asking.py", "        running = asyncio._get_running_loop()\n",
        "        running = self._attachment.loop\n",
        "a call on another loop waits for what nobody brings",
    ),
    "test_b94_two_loops_in_two_threads": Mutant(
        "busync/calls.py", "            self._loop.call_soon_threadsafe(cancel)\n", "            pass\n",
        "a publish cannot be cancelled from another loop than its own",
    ),
}  # fmt: skip


# B88: closing while messages wait

#: what the program does, its exit code, and what it says
ENDINGS = {
    "close": ("RUN.close()", 0, ""),
    "interrupt": ("pub = RUN; os.kill(os.getpid(), signal.SIGINT); wait_for_all(pub)", 1, "KeyboardInterrupt"),
    "interpreter": ("pub = RUN", 0, ""),
    "coroutine": (
        "pub = RUN\nasync def main():\n  with contextlib.ExitStack() as stack:\n    stack.push(pub)\n"
        "    task = asyncio.create_task(asyncio.to_thread(wait_for_all, pub))\n"
        "    await asyncio.sleep(0.05)\n    1 / 0\nasyncio.run(main())",
        1, "ZeroDivisionError",
    ),
    "block": ("with contextlib.ExitStack() as stack:\n  stack.push(RUN)\n  raise KeyError", 1, "KeyError"),
}  # fmt: skip

SCRIPT = """
import asyncio, atexit, contextlib, gc, os, signal, sys, time, torch, traceback, busync
from busync import blocking
from busync.wire import Joined, encode
state = {"w": torch.ones(100_000)}
gc.collect(), gc.freeze()  # or children take their time over torch's own objects
signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background inherits that it is ignored

def run(name):
    slow = os.fork()
    if slow == 0:
        with blocking.Subscriber(name, name="slow") as sub:
            sub.next(timeout=60)
    pub = blocking.Publisher(name).__enter__()
    while not any(s["state"] != "joining" for s in pub.status()["subscribers"]):
        time.sleep(0.001)
    time.sleep(0.05)
    os.kill(slow, signal.SIGSTOP)
    pub.publish(state)
    async def fill():
        peer = next(iter(pub._server.links.peers.values()))
        for _ in range(4000):  # more than its sockets take
            pub._server.links.bus.send(peer.token, encode(Joined(incarnation=1)))
    pub._server.call(fill()).block()
    os.write(writing, b"%d" % slow)
    return pub

def wait_for_all(pub):
    with contextlib.suppress(busync.ClosedError):
        pub.publish(state, wait="all", timeout=60)
"""
FORKED = """
for name in ENDINGS:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:  # an interpreter that ends as any other does
        os.close(reading)
        code = 0
        try:
            exec(ENDINGS[name].replace("RUN", f"run({name!r})"))
        except BaseException:
            traceback.print_exc()
            code = 1
        if name == "interpreter":
            sys.exit(code)
        atexit._run_exitfuncs()
        os._exit(code)  # the rest of an interpreter's end takes long, and has nothing of busync
    os.close(writing)
    slow = int(os.read(reading, 20))
    begun = time.monotonic()
    while os.listdir(os.path.join(os.environ["BUSYNC_RUNTIME_DIR"], name)) != ["lock"]:
        assert time.monotonic() - begun < 20, name
        time.sleep(0.001)
    took = time.monotonic() - begun
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    os.kill(slow, signal.SIGKILL)
    print(name, os.waitstatus_to_exitcode(status), took, sep=":", flush=True)
os._exit(0)
"""


def test_b88_every_end_is_soon(runtime_dir: Path) -> None:
    """However a publisher ends while a stopped reader leaves messages undelivered, it takes less than 2 s."""
    script = f"{SCRIPT}\nENDINGS = { ({name: body for name, (body, _, _) in ENDINGS.items()})!r}\n{FORKED}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split(":") for line in done.stdout.splitlines()]
    ends = {name: (int(code), float(took)) for name, code, took in lines}
    assert list(ends) == list(ENDINGS), done
    for name, (_, code, error) in ENDINGS.items():
        assert ends[name][0] == code, f"{name} ended with {ends[name][0]}: {done.stderr}"
        assert ends[name][1] < 2 * CROWD, f"{name} took {ends[name][1]} s"
        assert error in done.stderr
    assert "Exception ignored" not in done.stderr


# B89: forks

FORKS = """
import gc, os, sys, torch, busync
from busync import blocking
state = {"w": torch.ones(100_000)}
gc.collect(), gc.freeze()  # or children take their time over torch's own objects
pub, sub = blocking.Publisher("p").__enter__(), blocking.Subscriber("p").__enter__()
pub.publish(state)
snapshot = sub.next(5)
tensors = dict(snapshot.tensors)
loan = pub.loan(like=state).__enter__()
module = torch.nn.ParameterDict({"w": torch.zeros(100_000)})
pids = []
for number in range(20):
    pid = os.fork()
    if pid == 0:
        if number % 3 == 1:
            pub.close(), sub.close()
        if number < 2:
            sys.exit(0)  # ends the interpreter, which takes long
        if number % 2:
            del pub, sub, snapshot, tensors, loan
            gc.collect()
        os._exit(0)
    pids.append(pid)
for pid in pids:
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
loan.__exit__(None, None, None)
del loan
for version in range(2, 52):
    snapshot = tensors = None
    report = pub.publish({"w": torch.full((100_000,), float(version))}, wait=0)
    assert (report.version, len(report.pending)) == (version, 1), report
    snapshot = sub.next(5)
    snapshot.load_into(module)  # on a thread, which wakes the loop
    assert bool((module["w"] == version).all())
    snapshot = sub.latest(5)
    tensors = dict(snapshot.tensors)
    assert snapshot.version == version and bool((tensors["w"] == version).all())
with blocking.Subscriber("p") as late:
    assert late.next(5).version == 51
assert sorted(os.listdir(pub.endpoint.directory)) == ["bus", "door", "lock"]
assert len(pub.status()["subscribers"]) == 1
snapshot = tensors = None
sub.close(), pub.close()
print("done")
"""


def test_b89_children_disturb_nobody(runtime_dir: Path) -> None:
    """Children that exit at once, collect garbage or close what they inherited leave the parent all that is its own."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# B90: threads


class Hammered(Role):
    """A publisher, or a subscriber, that many threads use at once."""

    def stop(self) -> None:
        """Every step has closed what it opened."""

    def _from_threads(self, seconds: float, seed: int, *calls: Callable[[random.Random], object]) -> dict[str, int]:
        """Make the calls from 4 threads until the time is over; how often each ended in which way."""
        ends: dict[str, int] = {}
        wrong: list[BaseException] = []
        over = time.monotonic() + seconds

        def run(rng: random.Random) -> None:
            while time.monotonic() < over:
                try:
                    rng.choice(calls)(rng)
                    end = "ok"
                except BusyncError as error:
                    end = type(error).__name__
                except BaseException as error:
                    wrong.append(error)
                    return
                ends[end] = ends.get(end, 0) + 1

        threads = [threading.Thread(target=run, args=(random.Random(seed + i),)) for i in range(4)]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
        if wrong:
            raise wrong[0]
        return ends

    def hammer_publisher(self, seconds: float) -> dict[str, int]:
        """Publish, wait, look and at last close from all threads."""
        pub = blocking.Publisher("policy", lease_timeout=0.05).__enter__()
        stop_at = time.monotonic() + seconds * 0.9

        def publish(rng: random.Random) -> None:
            seed = rng.randrange(1000)
            pub.publish(patterns.state(seed, 1, SMALL), label=str(seed), topic=rng.choice("ab"))

        def look(rng: random.Random) -> None:
            status = pub.status()
            assert status["incarnation"] == pub.incarnation
            for topic in status["topics"].values():
                numbers = [v["version"] for v in topic["versions"] if v["version"]]
                assert len(numbers) == len(set(numbers)), numbers

        def loan(rng: random.Random) -> None:
            with pub.loan(like={"w": ("float32", (3,))}, topic="b") as loan:
                loan.tensors["w"].fill_(1)
                loan.publish(label="-")

        def close(rng: random.Random) -> None:
            if time.monotonic() > stop_at:
                pub.close()

        ends = self._from_threads(
            seconds, 1, publish, publish, look, look, loan, close, lambda rng: pub.wait(1, timeout=0.001, topic="a")
        )
        pub.close()
        return ends

    def hammer_blocking_subscriber(self, seconds: float) -> dict[str, int]:
        """Use one plain subscriber from all threads."""
        sub = blocking.Subscriber("policy").__enter__()
        ends = self._from_threads(
            seconds, 2, lambda rng: sub.next(0.001), lambda rng: sub.poll(), lambda rng: sub.latest(0.001).tensors,
            lambda rng: sub.version + sub.lag + sub.adopted, lambda rng: sub.connected, lambda rng: sub.incarnation,
        )  # fmt: skip
        over = time.monotonic() + seconds / 4
        closing = threading.Timer(seconds / 8, self._close, [sub])
        closing.start()
        while time.monotonic() < over:
            assert sub.version + sub.lag + sub.adopted >= 0
            sub.incarnation  # noqa: B018
        closing.join()
        return ends

    @staticmethod
    def _close(sub: blocking.Subscriber) -> None:
        while True:
            try:
                sub.close()
            except busync.UsageError:
                continue
            return

    def hammer_subscriber(self, seconds: float, flavour: str) -> dict[str, int]:
        """Use one subscriber from threads and other loops while its own loop reads versions."""

        async def run() -> dict[str, int]:
            async with busync.Subscriber("policy") as sub:
                snapshot = await sub.latest(5)
                assert snapshot.tensors
                calls: list[Callable[[random.Random], object]] = [
                    lambda rng: sub.poll(), lambda rng: sub.connected,
                    lambda rng: asyncio.run(sub.next(0.001)), lambda rng: asyncio.run(snapshot.ack()),
                    lambda rng: asyncio.run(snapshot.load_into(patterns.Module(SMALL))),
                    lambda rng: asyncio.run(sub.close()),
                ]  # fmt: skip
                other = asyncio.create_task(asyncio.to_thread(self._from_threads, seconds, 3, *calls))
                seen = snapshot.version
                while not other.done():
                    newer = await sub.next(5)  # its own loop goes on
                    assert newer.version > seen
                    seen = newer.version
                    patterns.check(newer.tensors, int(newer.label), 1, SMALL)
                    assert sub.connected
                    del newer
                return await other

        with asyncio.Runner(loop_factory=LOOPS[flavour]) as runner:
            return runner.run(run())


def test_b90_a_publisher_may_be_called_from_any_thread(cast: Cast) -> None:
    """Publish, wait, loan, status and close from many threads: right results or typed errors, and no abort."""
    actor = cast.begin(Hammered)
    actor.finish()
    ends = actor.call("hammer_publisher", 10.0 if LONG else 1.5)
    assert ends.pop("ok") > 100
    assert ends.pop("ClosedError") > 0
    assert set(ends) <= {"WaitTimeout", "OptionError", "PoolExhausted", "UsageError"}, ends


def test_b90_a_subscriber_refuses_other_threads(cast: Cast) -> None:
    """A subscriber is used by one thread at a time, and an asyncio one by its own: others get a typed error."""
    seconds = 10.0 if LONG else 0.8
    over = threading.Event()
    with blocking.Publisher("policy", lease_timeout=0.05, max_held=8) as pub:

        def publish() -> None:
            while not over.wait(0.001):
                pub.publish(patterns.state(7, 1, SMALL), label="7")

        publisher = threading.Thread(target=publish)
        publisher.start()
        try:
            actor = cast.begin(Hammered)
            actor.finish()
            ends = actor.call("hammer_blocking_subscriber", seconds)
            assert ends.pop("ok") > 50
            assert ends.pop("UsageError") > 0
            assert set(ends) <= {"WaitTimeout", "PinnedError"}, ends
            for flavour in LOOPS:
                ends = actor.call("hammer_subscriber", seconds, flavour)
                assert set(ends) == {"UsageError"}, ends
        finally:
            over.set()
            publisher.join()


# B94: loops


@on_both_loops
def test_b94_made_before_its_loop_and_used_in_a_second_one(loop: Loop) -> None:
    """What is made outside a loop works in one. A publisher works in the next, too; a subscriber says if it cannot."""
    pub, sub, second = busync.Publisher("p"), busync.Subscriber("p"), busync.Subscriber("p", name="second")

    async def first() -> busync.Snapshot:
        await pub.__aenter__()
        await sub.__aenter__()
        await pub.publish(patterns.state(1, 1, SMALL))
        return await sub.next(timeout=5)

    async def later() -> None:
        begun = time.monotonic()
        await pub.publish(patterns.state(1, 2, SMALL))
        for call in (sub.next, sub.latest, lambda timeout: sub.wait_version(2, timeout)):
            with pytest.raises(busync.UsageError, match=r"another event loop.*one per loop"):
                await call(timeout=5)
        with pytest.raises(busync.UsageError, match="another event loop"):
            sub.poll()
        for use in (snapshot.ack, lambda: snapshot.load_into(patterns.Module(SMALL))):
            with pytest.raises(busync.UsageError, match="another event loop"):
                await use()
        async with second:
            patterns.check((await second.next(timeout=5)).tensors, 1, 2, SMALL)
        assert time.monotonic() - begun < 2
        await sub.close()
        with pytest.raises(busync.ClosedError):
            await sub.next(timeout=5)
        await pub.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        snapshot = runner.run(first())
        patterns.check(snapshot.tensors, 1, 1, SMALL)
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(later())
    patterns.check(snapshot.tensors, 1, 1, SMALL)
    for _ in range(2):  # two runs, each with its own
        with asyncio.Runner(loop_factory=loop) as runner:

            async def both() -> None:
                async with busync.Publisher("p") as pub, busync.Subscriber("p") as sub:
                    await pub.publish(patterns.state(1, 1, SMALL))
                    assert (await sub.next(timeout=5)).version == 1

            runner.run(both())


def test_b94_two_loops_in_two_threads() -> None:
    """One publisher serves loops in several threads at once; each has a subscriber of its own, and may cancel."""
    rounds = 100 if LONG else 30
    wrong: list[BaseException] = []
    with blocking.Publisher("unused"):
        pub = busync.Publisher("p", max_segments=8)

        async def work(seed: int) -> None:
            topic = f"topic-{seed}"
            async with busync.Subscriber("p", topic=topic) as sub:
                for version in range(1, rounds + 1):
                    await pub.publish(patterns.state(seed, version, SMALL), topic=topic)
                    snapshot = await sub.next(timeout=5)
                    assert snapshot.version == version
                    patterns.check(snapshot.tensors, seed, version, SMALL)
                    del snapshot
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):  # nobody acknowledges: ends by being cancelled
                        await pub.publish(patterns.state(seed, rounds + 1, SMALL), topic=topic, wait="all", timeout=60)

        def run(seed: int, loop: Loop) -> None:
            try:
                with asyncio.Runner(loop_factory=loop) as runner:
                    runner.run(work(seed))
            except BaseException as error:
                wrong.append(error)

        with asyncio.Runner() as runner:
            runner.run(pub.__aenter__())
            threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(LOOPS.values(), 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert not any(thread.is_alive() for thread in threads), "a call never ended"
            runner.run(pub.close())
    if wrong:
        raise wrong[0]
