"""One round: children on a stage, faults that strike them, the calm after them, and what must then be gone."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import select
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.child import EXIT_REFUSED, NOBODY, OPS, Child, Part, main
from tests.faults.page import Page, Slot
from tests.faults.reader import Reader
from tests.faults.rude import Rude
from tests.faults.schedule import FLAVOURS, Round, Step
from tests.faults.writer import Writer
from tests.support.leaks import files_left, resources

BOUND = 15.0  #: seconds that any operation of any child may take; most are bounded more tightly by the child itself
TROUBLE = re.compile(r"Traceback|Warning|Error|ERROR|Exception|Fatal|Assertion|Aborted|Too many", re.IGNORECASE)
#: Python's own complaints about tasks that a program left behind when it ended.
NOT_OURS = re.compile(r"Task was destroyed|^task: <Task|never awaited|unclosed event loop|Enable tracemalloc|sys:1:")
#: What docs/RELIABILITY.md does not promise: a publisher without descriptors, when somebody reaches its bus.
ABORTED_BY_LIBZMQ = "Too many open files (src/ipc_listener.cpp"
#: Ctrl-C that strikes inside a callback of Python's own weak sets: Python says so and goes on.
IN_A_CALLBACK = re.compile(
    r"^Exception ignored in: <function WeakSet.*\n(?:(?:Traceback|  ).*\n|\n)+KeyboardInterrupt: ?$", re.MULTILINE
)


class Failure(AssertionError):
    """A round found something wrong."""


@dataclass(slots=True, eq=False)
class Kid:
    """A child as the stage sees it."""

    part: Part
    page: Page
    pipe: socket.socket
    pid: int
    killed: bool = False
    leaving: set[str] = field(default_factory=set)  #: how it was told to exit
    stopped: bool = False
    wakes_at: float = 0.0
    told_to_rest: bool = False
    retiring: bool = False  #: a publisher that another one follows
    answers: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.part.name} (pid {self.pid}, trap: {self.part.trap})"


@dataclass(slots=True)
class Totals:
    """What a round did and found."""

    faults: Counter[str] = field(default_factory=Counter)
    numbers: Counter[str] = field(default_factory=Counter)
    slowest_publish: float = 0.0
    slowest_wait: float = 0.0
    over_lease: float = -1.0
    slowest_op: tuple[float, str] = (0.0, "")

    def add(self, other: Totals) -> None:
        self.faults.update(other.faults)
        self.numbers.update(other.numbers)
        self.slowest_publish = max(self.slowest_publish, other.slowest_publish)
        self.slowest_wait = max(self.slowest_wait, other.slowest_wait)
        self.over_lease = max(self.over_lease, other.over_lease)
        self.slowest_op = max(self.slowest_op, other.slowest_op)

    def take(self, page: Page) -> None:
        """Add what a dead child counted."""
        self.faults.update(page.faults())
        slots = {
            "attachments": Slot.OPENED, "adoptions": Slot.ADOPTED, "elements": Slot.ELEMENTS, "wrong": Slot.WRONG,
            "publishes": Slot.PUBLISHED, "full queues ended": Slot.FULL,
        }  # fmt: skip
        for name, slot in slots.items():
            self.numbers[name] += page[slot]
        self.slowest_publish = max(self.slowest_publish, page[Slot.SLOWEST_PUBLISH] / 1e9)
        self.slowest_wait = max(self.slowest_wait, page[Slot.SLOWEST_WAIT] / 1e9)
        if page[Slot.PUBLISHED]:
            self.over_lease = max(self.over_lease, page[Slot.OVER_LEASE] / 1e9)
        self.slowest_op = max(self.slowest_op, (page[Slot.SLOWEST_OP] / 1e9, OPS[page[Slot.SLOWEST_OP_NAME]]))


class Stage:
    """Plays one round. Children are forked from this process, which itself opens nothing of busync."""

    def __init__(self, played: Round) -> None:
        self.round = played
        self.totals = Totals()
        self.directory = Path(tempfile.mkdtemp(prefix="busync-faults-"))
        self.endpoint = self.directory / "run" / "ep"
        self.unprivileged = played.unprivileged and os.geteuid() == 0
        self.kids: list[Kid] = []
        self.writer: Kid | None = None
        self._count = 0
        self._cast = [f"reader-{i}" for i in range(played.readers)]
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._faulty = 0
        self._calm = False
        self._writer_at = 0.0

    # The round

    def play(self) -> Totals:
        """The whole round.

        Raises:
            Failure: something is wrong; the text has the stacks and what the children said.
        """
        before = resources()
        try:
            (self.directory / "run").mkdir(mode=0o700)
            if self.unprivileged:
                os.chmod(self.directory, 0o711)
                os.chown(self.directory / "run", NOBODY, NOBODY)
            self.pump(0.0)
            for step in self.round.steps:
                self.pump(step.delay)
                self.strike(step)
            self.calm()
            self._check_leaks()
        except BaseException as error:
            if not isinstance(error, Failure):
                error.add_note(self._stacks())
            raise
        finally:
            for kid in list(self.kids):
                self._kill(kid)
            while self.kids:
                self._reap(check=False)
                time.sleep(0.001)
            shutil.rmtree(self.directory, ignore_errors=True)
        gc.collect()
        left = resources().beyond(before)
        if left:
            raise Failure(f"the stage itself leaks {left}")
        return self.totals

    def pump(self, seconds: float) -> None:
        """Let the round go on for a while: wake, restore, collect the dead and replace them, watch for the stuck."""
        stop_at = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for kid in self.kids:
                if kid.page[Slot.ASLEEP] and not kid.stopped:
                    kid.page[Slot.ASLEEP] = 0
                    kid.stopped, kid.wakes_at = True, now + (0.0 if self._calm else kid.part.dice % 100 / 1000)
                if kid.stopped and kid.wakes_at <= now:
                    self._wake(kid)
            for due in [due for due in self._due if due[0] <= now]:
                self._due.remove(due)
                due[1]()
            self._reap()
            self._fill_cast()
            self._watch(now)
            if now >= stop_at:
                return
            self._listen(min(0.005, stop_at - now))

    def _fill_cast(self) -> None:
        now = time.monotonic()
        if self.writer is None and now >= self._writer_at:
            self.writer = self._spawn("writer", Writer)
            self._writer_at = now + 0.02
        present = {kid.part.name for kid in self.kids}
        for name in self._cast:
            if name not in present:
                self._spawn(name, Reader)

    def _spawn(self, name: str, make: type[Child], kind: str = "", trap: Any = None) -> Kid:
        rng = self.round.child(self._count)
        self._count += 1
        side = "publisher" if make is Writer else "subscriber"
        flavour = rng.choice(FLAVOURS) if make is not Rude else "blocking"
        options = dict(self.round.options) if make is Writer else {"name": name, "prefetch": rng.random() < 0.3}
        topics = self.round.topics if make is Writer else (rng.choice(self.round.topics),)
        if make is Reader and rng.random() < 0.1:
            options["digests"] = True
        part = Part(
            f"{name}" if make is not Rude else f"rude-{self._count}", side, kind or name, str(self.endpoint), topics,
            flavour, options, rng.randrange(1 << 30), trap, self.unprivileged,
            str(self.directory / f"{name}-{self._count}.log"),
        )  # fmt: skip
        page = Page()
        page[Slot.FAULTY] = -1 if self._faulty else 0
        page[Slot.CALM] = int(self._calm)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            for other in self.kids:
                other.pipe.close()
            main(make, part, page, theirs)
        theirs.close()
        kid = Kid(part, page, ours, pid)
        self.kids.append(kid)
        return kid

    # The dead and the stuck

    def _reap(self, *, check: bool = True) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            kid = next((k for k in self.kids if k.pid == pid), None)
            if kid is None:
                continue  # an orphan of a dead child
            self._listen(0.0)
            self.kids.remove(kid)
            if kid is self.writer:
                self.writer = None
            if kid.killed and status == signal.SIGKILL:
                self.totals.faults[f"{kid.part.side}: SIGKILL"] += 1
            faults = kid.page.faults()
            self.totals.take(kid.page)
            kid.pipe.close()
            kid.page.close()
            if check:
                self._check_end(kid, status, faults)

    def _check_end(self, kid: Kid, status: int, faults: dict[str, int]) -> None:
        code = os.waitstatus_to_exitcode(status)
        side = kid.part.side
        allowed: set[int] = set()
        if kid.killed or f"{side}: SIGKILL inside a step" in faults:
            allowed.add(-signal.SIGKILL)
        if f"{side}: exit inside a step" in faults or kid.leaving or kid.part.kind in ("bus", "door"):
            allowed.add(0)
        if "SIGTERM" in kid.leaving:
            allowed.add(-signal.SIGTERM)
        if kid.part.kind == "writer":
            allowed.add(EXIT_REFUSED)
        said = self._said(kid)
        starved = f"{side}: descriptors exhausted" in faults
        if starved and code == -signal.SIGABRT and ABORTED_BY_LIBZMQ in said:
            self.totals.numbers["ended by libzmq"] += 1
            return
        own = IN_A_CALLBACK.sub("", said)
        lines = [line for line in own.splitlines() if TROUBLE.search(line) and not NOT_OURS.search(line)]
        if code not in allowed or lines:
            text = f"{kid} ended with {code}, allowed were {sorted(allowed)}; it said:\n{said}"
            raise Failure(f"{text}\nthe others:\n{self._stacks()}")

    def _said(self, kid: Kid) -> str:
        with contextlib.suppress(OSError):
            return Path(kid.part.log).read_text(errors="replace")
        return ""

    def _watch(self, now: float) -> None:
        for kid in self.kids:
            since = kid.page[Slot.SINCE]
            if since and not kid.stopped and now - since / 1e9 > BOUND:
                operation = OPS[kid.page[Slot.OP]]
                raise Failure(f"{kid} is stuck in {operation!r}\n{self._stacks()}")

    def _stacks(self) -> str:
        """The stacks of every thread of every child."""
        texts = []
        for kid in self.kids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(kid.pid, signal.SIGCONT)
                os.kill(kid.pid, signal.SIGUSR1)
        time.sleep(0.3)
        for kid in self.kids:
            operation = OPS[kid.page[Slot.OP]] if kid.page[Slot.SINCE] else "nothing"
            texts.append(f"--- {kid}, in {operation!r}, {kid.part}\n{self._said(kid)}")
        return "\n".join(texts)

    # Talking

    def _listen(self, seconds: float) -> None:
        poll = select.poll()
        pipes = {kid.pipe.fileno(): kid for kid in self.kids}
        for number in pipes:
            poll.register(number, select.POLLIN)
        ready = poll.poll(seconds * 1000)
        for number, _ in ready:
            with contextlib.suppress(BlockingIOError, ConnectionResetError):
                data = pipes[number].pipe.recv(65536, socket.MSG_DONTWAIT)
                if data:
                    pipes[number].answers.append(json.loads(data))
        if ready and seconds:
            time.sleep(0.0005)  # the end of a pipe stays readable until its owner is collected

    def _tell(self, kid: Kid, **command: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
            kid.pipe.send(json.dumps(command).encode(), socket.MSG_DONTWAIT)

    def _answer(self, kid: Kid) -> dict[str, Any] | None:
        """The next answer of a child; None if it dies instead."""
        while not kid.answers:
            if kid not in self.kids:
                return None
            self.pump(0.005)
        return kid.answers.pop(0)

    # Faults

    def strike(self, step: Step) -> None:
        """One fault step. Children count what they do to themselves."""
        what, _, side = step.kind.partition(" ")
        match what:
            case "directory":
                self._break_directory(step)
                return
            case "rude":
                self._spawn("rude", Rude, step.detail)
                return
        kid = self._target(side, step.target)
        if kid is None:
            return
        match what:
            case "kill":
                self._kill(kid)
            case "trap":
                self._replace(kid, step)
            case "stop":
                if not kid.stopped:
                    self.totals.faults[f"{kid.part.side}: SIGSTOP, SIGCONT"] += 1
                    kid.page.add(Slot.STOPS)
                    os.kill(kid.pid, signal.SIGSTOP)
                    kid.stopped, kid.wakes_at = True, time.monotonic() + step.seconds
            case "exit":
                kid.leaving.add(step.detail)
                self._tell(kid, do="exit", seed=step.seed, detail=step.detail)
            case _:  # fork, starve, reserve, cancel
                self._tell(kid, do=what, seed=step.seed)

    def _target(self, side: str, number: int) -> Kid | None:
        if side in ("writer", ""):
            return self.writer
        readers = [kid for kid in self.kids if kid.part.name in self._cast]
        return readers[number % len(readers)] if readers else None

    def _kill(self, kid: Kid) -> None:
        kid.killed = True
        os.kill(kid.pid, signal.SIGKILL)

    def _wake(self, kid: Kid) -> None:
        if not _is_stopped(kid.pid):  # it says that it stops before it does: a SIGCONT now would be lost
            kid.wakes_at = time.monotonic() + 0.002
            return
        kid.stopped = False
        if kid.page[Slot.SINCE]:
            kid.page[Slot.SINCE] = time.monotonic_ns()
        os.kill(kid.pid, signal.SIGCONT)

    def _replace(self, kid: Kid, step: Step) -> None:
        """Put a child with a trap in the place of one that has to go; the trap may be met from the first step on."""
        self._kill(kid)
        while kid in self.kids:
            self._reap()
            time.sleep(0.0005)
        make = Writer if kid.part.kind == "writer" else Reader
        if make is Writer and self.writer is None:
            self.writer = self._spawn("writer", Writer, trap=step.trap)
        elif make is Reader:
            self._spawn(kid.part.name, Reader, trap=step.trap)

    # The endpoint's directory

    def _break_directory(self, step: Step) -> None:
        if self._faulty or not self.endpoint.exists() or self.writer is None or not self.writer.page[Slot.OPENED]:
            return
        kinds = {"deleted": "directory deleted", "unlocked": "lock and sockets removed"}
        kind = kinds.get(step.detail, "directory unreadable" if step.detail == "unreadable" else "directory replaced")
        self.totals.faults[f"endpoint: {kind}"] += 1
        self._note_faulty(1)
        if step.detail in kinds:
            if step.detail == "deleted":
                shutil.rmtree(self.endpoint)
            else:
                for name in ("lock", "bus", "door")[: 1 + step.seed % 3]:
                    with contextlib.suppress(FileNotFoundError):
                        (self.endpoint / name).unlink()
            old = self.writer
            self._due.append((time.monotonic() + step.seconds / 4, lambda: self._succeed(step, old)))
            return
        away = self.endpoint.with_name("away")
        if step.detail == "unreadable" and (self.unprivileged or os.geteuid()):
            os.chmod(self.endpoint, 0)
        else:
            os.rename(self.endpoint, away)
            if step.detail == "replaced by a file":
                self.endpoint.write_text("not a directory")
            elif step.detail == "replaced by a link":
                self.endpoint.symlink_to(away)
            elif step.detail == "replaced by a stranger":
                self.endpoint.mkdir(mode=0o700)
                (self.endpoint / "diary").write_text("not yours")
        self._due.append((time.monotonic() + step.seconds, lambda: self._restore(away)))

    def _restore(self, away: Path) -> None:
        if not away.exists():
            with contextlib.suppress(FileNotFoundError):
                os.chmod(self.endpoint, 0o700)
        elif self.endpoint.is_dir() and not self.endpoint.is_symlink() and not (self.endpoint / "diary").exists():
            shutil.rmtree(away)  # a new publisher has come meanwhile
        else:
            if self.endpoint.is_symlink() or self.endpoint.is_file():
                self.endpoint.unlink()
            elif self.endpoint.exists():
                shutil.rmtree(self.endpoint)
            try:
                os.rename(away, self.endpoint)
            except OSError:  # a new publisher has come in this very moment
                shutil.rmtree(away)
        self._note_faulty(-1)

    def _succeed(self, step: Step, old: Kid) -> None:
        """The old publisher cannot be found any more: another one follows it, and only then does it end."""
        if self.writer is not old:  # it has died meanwhile, and whoever came after it has made the directory anew
            self._note_faulty(-1)
            return
        self.writer = None
        self._writer_at = 0.0
        self._fill_cast()
        old.retiring = True

        def retire() -> None:
            if old in self.kids:
                if step.seed % 4 == 0:
                    self._kill(old)
                else:
                    old.leaving.add("stop")
                    self._tell(old, do="stop")
            self._note_faulty(-1)

        self._due.append((time.monotonic() + step.seconds, retire))

    def _note_faulty(self, change: int) -> None:
        self._faulty += change
        for kid in self.kids:
            kid.page[Slot.FAULTY] = -1 if self._faulty else time.monotonic_ns()

    # The calm

    def calm(self) -> None:
        """No more faults: everybody must get the newest version, let go, and end without a trace."""
        self._calm = True
        for kid in self.kids:
            kid.page[Slot.CALM] = 1
            if kid.part.kind in ("bus", "door"):
                self._kill(kid)
            kid.wakes_at = 0.0
        while self._due:
            self._due = [(0.0, action) for _, action in self._due]
            self.pump(0.0)
        while any(kid.retiring or kid.part.kind in ("bus", "door") for kid in self.kids):
            self.pump(0.01)
        told: set[int] = set()
        while not self._resting(told):
            self.pump(0.002)
        writer, readers = self.writer, [kid for kid in self.kids if kid.part.name in self._cast]
        assert writer is not None, "no publisher rests"
        for kid in readers:
            self._tell(kid, do="settle", seed=self.round.seed)
        self._tell(writer, do="final", seed=self.round.seed)
        final = self._expect(writer)
        for kid in readers:
            self._tell(kid, **final)
        for kid in readers:
            self._expect(kid)
        if any(set(names) - {"rude"} for names in final["missing"].values()):
            raise Failure(f"the last versions were not acknowledged: {final}")
        for kid in [*readers, writer]:
            kid.leaving.add("stop")
            self._tell(kid, do="stop")
            left = self._expect(kid)["left"]
            if left:
                raise Failure(f"{kid} left behind {left}")
            self._cast = [name for name in self._cast if name != kid.part.name]
            self._writer_at = float("inf")
        while self.kids:
            self.pump(0.002)

    def _resting(self, resting: set[int]) -> bool:
        """Whether the cast is complete and every one of it rests; those that exit now are replaced first."""
        for kid in self.kids:
            if not kid.told_to_rest and not kid.leaving and not kid.killed:
                kid.told_to_rest = True
                self._tell(kid, do="rest")
            elif kid.answers:
                resting.add(kid.pid)
                kid.answers.clear()
        return self.writer is not None and all(kid.pid in resting for kid in self.kids)

    def _expect(self, kid: Kid) -> dict[str, Any]:
        answer = self._answer(kid)
        if answer is None:
            raise Failure(f"{kid} ended in the calm")
        return answer

    def _check_leaks(self) -> None:
        """Nothing of the round is left: no process, no file."""
        stop_at = time.monotonic() + 3
        while children := list(_children()):
            self._reap()
            if time.monotonic() > stop_at:
                raise Failure(f"processes are left: {children}")
            time.sleep(0.005)
        files = files_left(self.directory / "run")
        if files:
            raise Failure(f"files are left: {files}")


def _is_stopped(pid: int) -> bool:
    """Whether the process has stopped; a dead one counts as stopped, for it needs no waiting."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    return True


def _children() -> Iterator[int]:
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            yield from map(int, Path(f"/proc/self/task/{task}/children").read_text().split())
