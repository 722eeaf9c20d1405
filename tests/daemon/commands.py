"""The commands as real processes. They start from a preloaded server, since importing torch takes seconds."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TypeVar

#: Seconds until something that should happen at once counts as failed.
PATIENCE = 30.0

T = TypeVar("T")


def _main(
    module: str, argv: list[str], environment: dict[str, str], out: Path, err: Path, prepare: Callable[[], None] | None
) -> None:
    """In the child: be the command."""
    for path, fd in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
    os.environ.update(environment)
    sys.argv = argv
    if prepare is not None:
        prepare()
    import_module(module).main()


class Command:
    """One running command. What it prints is in ``stdout`` and ``stderr``; its events are read with ``event``.

    ``prepare`` is a module's function that is called in the new process first.
    """

    def __init__(
        self,
        context: ForkServerContext,
        directory: Path,
        command: str,
        *arguments: object,
        prepare: Callable[[], None] | None = None,
        **environment: str,
    ) -> None:
        self.command = command
        number = len(list(directory.glob("*.out")))
        self._out, self._err = directory / f"{number}.out", directory / f"{number}.err"
        self._taken = 0
        context.set_forkserver_preload(
            ["torch", "zmq", "uvloop", "safetensors", "busync.daemon.pub", "busync.daemon.sub"]
        )
        module = f"busync.daemon.{command.removeprefix('busync-')}"
        argv = [command, *map(str, arguments)]
        self._process = context.Process(target=_main, args=(module, argv, environment, self._out, self._err, prepare))
        self._out.touch()
        self._err.touch()
        self._process.start()

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def events(self) -> list[dict[str, Any]]:
        """Every event so far; a line that is not complete yet is left out."""
        return [json.loads(line) for line in self.stdout.splitlines(keepends=True) if line.endswith("\n")]

    def event(self, kind: str) -> dict[str, Any]:
        """The next event of a kind that was not returned before; waits for it."""

        def find() -> dict[str, Any] | None:
            events = self.events()
            for index in range(self._taken, len(events)):
                if events[index]["event"] == kind:
                    self._taken = index + 1
                    return events[index]
            assert self._process.is_alive(), f"it ended before {kind}: {self!r}"
            return None

        return self.until(find, kind)

    def until(self, look: Callable[[], T | None], what: str) -> T:
        """The first true result of ``look``."""
        deadline = time.monotonic() + PATIENCE
        while not (result := look()):
            assert time.monotonic() < deadline, f"waited in vain for {what}: {self!r}"
            time.sleep(0.01)
        return result

    def wait(self) -> int:
        """The exit code, once it ended by itself."""
        self._process.join(PATIENCE)
        assert self._process.exitcode is not None, f"it did not end: {self!r}"
        return self._process.exitcode

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; returns the exit code."""
        os.kill(self.pid, number)
        return self.wait()

    def close(self) -> None:
        """End it if it still runs, and forget it."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()

    def __repr__(self) -> str:
        return f"<{self.command} code {self._process.exitcode} stdout {self.stdout!r} stderr {self.stderr!r}>"


class Commands:
    """Starts commands that share a runtime directory."""

    def __init__(self, context: ForkServerContext, directory: Path) -> None:
        self._context = context
        self._directory = directory
        self.runtime = directory / "run"
        self.runtime.mkdir(mode=0o700)
        self._running: list[Command] = []

    def __call__(
        self, command: str, *arguments: object, prepare: Callable[[], None] | None = None, **environment: str
    ) -> Command:
        """Start a command."""
        environment.setdefault("BUSYNC_RUNTIME_DIR", str(self.runtime))
        self._running.append(
            Command(self._context, self._directory, command, *arguments, prepare=prepare, **environment)
        )
        return self._running[-1]

    def pub(self, source: object, *arguments: object, prepare: Callable[[], None] | None = None) -> Command:
        """A publisher that serves."""
        command = self("busync-pub", "policy", source, *arguments, "--json", prepare=prepare)
        command.event("serving")
        return command

    def sub(self, *arguments: object, prepare: Callable[[], None] | None = None) -> Command:
        """A subscriber."""
        return self("busync-sub", "policy", *arguments, "--json", prepare=prepare)

    def close(self) -> None:
        for command in self._running:
            command.close()


@contextmanager
def commands_in(context: ForkServerContext, directory: Path) -> Iterator[Commands]:
    """Commands whose output is kept in ``directory``; all of them are ended afterwards."""
    commands = Commands(context, directory)
    try:
        yield commands
    finally:
        commands.close()
