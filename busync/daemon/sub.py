"""``busync-sub``: follows a topic; verifies, saves and acts on each version that it adopts."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn
from urllib.parse import quote

import msgspec
import typer

import busync
from busync.daemon import checkpoints, console
from busync.daemon.checkpoints import SAFETENSORS
from busync.daemon.console import CommandError, Events, ExitCode
from busync.errors import OptionError, PublisherLost, WaitTimeout
from busync.ids import DEFAULT_TOPIC, check_label

COMMAND: Final = "busync-sub"
#: Seconds between two looks at whether the publisher is there.
LOOK_EVERY: Final = 0.2
#: Seconds to wait for a publisher at first, unless --timeout-s is given.
CONNECT_TIMEOUT: Final = 10.0
#: Seconds that a publisher gets to compute a digest, and a command to end after SIGTERM.
DIGEST_TIMEOUT: Final = 120.0
EXEC_GRACE: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the command was asked to do."""

    endpoint: str
    topic: str
    name: str
    count: int | None
    timeout: float | None
    verify: bool
    save: Path | None
    run: tuple[str, ...]


def subscribe(
    endpoint: Annotated[str, typer.Argument(metavar="ENDPOINT", help="Name or path of the endpoint to follow.")],
    topic: Annotated[str, typer.Option(help="Topic to follow.")] = DEFAULT_TOPIC,
    name: Annotated[str | None, typer.Option(help="How the publisher's reports call this one.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="End after this many versions.")] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Longest wait for the publisher and for a newer version."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare each version with the publisher's digest.")] = False,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Write DIR/TOPIC-VERSION.safetensors.")] = None,
    exec_: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="CMD",
            help="Run CMD for each version, with BUSYNC_VERSION, BUSYNC_LABEL and (with --save) BUSYNC_FILE set.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
) -> None:
    """Follow the weights published at ENDPOINT: always the newest, never an older one.

    Exit codes: 0 stopped or --count reached, 1 failure, 2 wrong usage, 3 no publisher, 4 timeout, 5 wrong content.
    """
    if save is not None and not save.is_dir():
        raise CommandError(f"--save {save} is not a directory", "create it", ExitCode.USAGE)
    order = Order(
        endpoint=console.check_endpoint(endpoint),
        topic=check_label("--topic", topic),
        name=f"busync-sub-{os.getpid()}" if name is None else check_label("--name", name, empty=True),
        count=count,
        timeout=timeout_s,
        verify=verify,
        save=save,
        run=_parse_command(exec_),
    )
    console.run_until_stopped(Follower(order, Events(COMMAND, as_json=as_json)).run)


def _parse_command(text: str | None) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text or ""))
    except ValueError as error:
        raise CommandError(f"--exec {text}: {str(error).lower()}", "check the quotes", ExitCode.USAGE) from error
    if text is not None and not words:
        raise OptionError("--exec", text, "a command")
    return words


class Follower:
    """Carries out one order."""

    def __init__(self, order: Order, events: Events) -> None:
        self._order = order
        self._events = events
        #: Incarnation and version of the last snapshot.
        self._last = (0, 0)

    async def run(self) -> None:
        """Follow until cancelled, or until ``count`` versions were adopted.

        Raises:
            PublisherLost: there is no publisher.
            WaitTimeout: no newer version came in time.
            CommandError: a version is not what was published, or the command to run failed.
            OSError: a version cannot be saved.
        """
        order = self._order
        async with busync.Subscriber(
            order.endpoint,
            topic=order.topic,
            name=order.name,
            connect_timeout=CONNECT_TIMEOUT if order.timeout is None else order.timeout,
            digests=order.verify,
        ) as subscriber:
            self._tell_connection(attached=True)
            observer = asyncio.create_task(self._observe(subscriber))
            try:
                adopted = 0
                while order.count is None or adopted < order.count:
                    adopted += await self._next(subscriber)
            finally:
                observer.cancel()
                await asyncio.wait([observer])

    async def _observe(self, subscriber: busync.Subscriber) -> None:
        attached = True
        while True:
            await asyncio.sleep(LOOK_EVERY)
            if subscriber.connected != attached:
                attached = not attached
                self._tell_connection(attached=attached)

    def _tell_connection(self, *, attached: bool) -> None:
        endpoint, topic = self._order.endpoint, self._order.topic
        if attached:
            self._events.tell("attached", f"attached to {endpoint}", endpoint=endpoint, topic=topic)
        else:
            text = f"the publisher at {endpoint} is gone; waiting for it"
            self._events.warn("lost", text, endpoint=endpoint, topic=topic)

    async def _next(self, subscriber: busync.Subscriber) -> bool:
        """Wait for the next version and adopt it; False if the publisher went before it could be verified."""
        snapshot = await subscriber.next(timeout=self._order.timeout)
        facts = self._facts(snapshot)
        async with snapshot:
            if self._order.verify:
                try:
                    ours, theirs = await self._digests(snapshot)
                except (PublisherLost, WaitTimeout) as error:
                    reason = console.describe(error)
                    text = f"version {snapshot.version} was not verified: {reason}"
                    self._events.warn("error", text, version=snapshot.version, reason=reason)
                    return False
                facts |= {"verified": ours == theirs, "digest": ours.hex()}
                if ours != theirs:
                    self._tell_adopted(facts)
                    text = f"version {snapshot.version} has digest {ours.hex()}, but {theirs.hex()} was published"
                    raise CommandError(text, "do not use it; report this", ExitCode.VERIFICATION)
            if self._order.save is not None:
                facts["file"] = str(await self._save(snapshot, self._order.save))
            self._tell_adopted(facts)
            if self._order.run:
                await self._run(snapshot, facts.get("file"))
            await snapshot.ack()
        return True

    def _facts(self, snapshot: busync.Snapshot) -> dict[str, Any]:
        latency = time.monotonic() - snapshot.published_at
        incarnation, version = self._last
        skipped = snapshot.version - version - 1 if snapshot.incarnation == incarnation else 0
        self._last = (snapshot.incarnation, snapshot.version)
        return {
            "topic": snapshot.topic,
            "incarnation": f"{snapshot.incarnation:016x}",
            "version": snapshot.version,
            "label": snapshot.label,
            "tensors": len(snapshot.tensors),
            "bytes": snapshot.nbytes,
            "latency_s": round(latency, 6),
            "skipped": skipped,
            "verified": None,
        }

    def _tell_adopted(self, facts: dict[str, Any]) -> None:
        text = (
            f"{facts['topic']} version {facts['version']} ({facts['label']}): {facts['tensors']} tensors, "
            f"{facts['bytes']:,} bytes, {facts['latency_s'] * 1000:.1f} ms after its publish"
        )
        if facts["skipped"]:
            text += f"; skipped {facts['skipped']}"
        if facts["verified"]:
            text += "; verified"
        if "file" in facts:
            text += f"; saved as {facts['file']}"
        self._events.tell("adopted", text, **facts)

    async def _digests(self, snapshot: busync.Snapshot) -> tuple[bytes, bytes]:
        """The digest of what is here, and of what was published."""
        async with console.progress(f"verifying version {snapshot.version}"):
            theirs = await snapshot.digest(timeout=DIGEST_TIMEOUT)
            return await console.in_thread(busync.content_digest, snapshot.tensors), theirs

    async def _save(self, snapshot: busync.Snapshot, directory: Path) -> Path:
        # A topic may hold any printable character, a file name may not.
        path = directory / f"{quote(snapshot.topic, safe=' ')}-{snapshot.version}{SAFETENSORS}"
        metadata = {
            "format": "pt",
            "topic": snapshot.topic,
            "version": str(snapshot.version),
            "label": snapshot.label,
            "incarnation": f"{snapshot.incarnation:016x}",
        }
        if snapshot.values:
            metadata["values"] = msgspec.json.encode(dict(snapshot.values)).decode()
        async with console.progress(f"saving {path.name}"):
            await console.in_thread(checkpoints.write, snapshot.tensors, path, metadata)
        return path

    async def _run(self, snapshot: busync.Snapshot, file: str | None) -> None:
        """Run the user's command and wait for it; a cancellation ends it."""
        words = self._order.run
        variables = {"BUSYNC_VERSION": str(snapshot.version), "BUSYNC_LABEL": snapshot.label}
        if file is not None:
            variables["BUSYNC_FILE"] = file
        try:
            process = subprocess.Popen(  # noqa: ASYNC220, S603 - takes milliseconds; the user asked for it, and no shell
                words,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr if self._events.as_json else None,  # stdout is for JSON alone then
            )
        except OSError as error:
            text = f"--exec {words[0]}: {str(error.strerror).lower()}"
            raise CommandError(text, "check the command") from error
        code = await console.in_thread(process.wait, on_cancel=partial(_end, process))
        if code:
            text = f"--exec {words[0]} ended with code {code} for version {snapshot.version}"
            raise CommandError(text, "see its own messages")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    asyncio.get_running_loop().call_later(EXEC_GRACE, process.kill)


def main() -> NoReturn:
    """Run the command."""
    console.main(COMMAND, subscribe)
