"""``busync-pub``: publishes a checkpoint file, or each new one as it appears, and serves until it is stopped."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, NoReturn

import typer

import busync
from busync.daemon import console
from busync.daemon.checkpoints import SAFETENSORS, SafetensorsFile, load_pickled, newest
from busync.daemon.console import CommandError, Events, ExitCode
from busync.daemon.watch import Watcher
from busync.errors import BusyncError, OptionError, PoolExhausted
from busync.ids import DEFAULT_TOPIC, MAX_LABEL_BYTES, check_label
from busync.options import WhenFull

COMMAND: Final = "busync-pub"
#: Seconds between two looks at what is watched. A file must look the same twice to be published.
LOOK_EVERY: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the command was asked to do."""

    endpoint: str
    source: Path
    watch: bool
    topic: str
    label: str | None
    wait: Literal["none", "all"] | int
    timeout: float
    max_segments: int
    when_full: WhenFull
    lease_timeout: float


class Sent(NamedTuple):
    """What was published."""

    report: busync.PublishReport
    tensors: int
    nbytes: int


def _parse_wait(text: str) -> str:
    if text not in ("none", "all") and not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is not all, none or a number")
    return text


def publish(
    endpoint: Annotated[str, typer.Argument(metavar="ENDPOINT", help="Name or path of the endpoint to serve.")],
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A .safetensors, .pt, .pth or .bin file, or a directory: its newest complete one."
        ),
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Publish every new complete state of SOURCE.")] = False,
    topic: Annotated[str, typer.Option(help="Topic to publish on.")] = DEFAULT_TOPIC,
    label: Annotated[str | None, typer.Option(help="Label of the versions; the file's name unless given.")] = None,
    wait: Annotated[
        str, typer.Option(metavar="all|none|N", callback=_parse_wait, help="Whose acknowledgements to wait for.")
    ] = "none",
    timeout_s: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Longest wait for acknowledgements.")
    ] = 30.0,
    max_segments: Annotated[int, typer.Option(help="Versions that may be in memory at a time.")] = 4,
    when_full: Annotated[WhenFull, typer.Option(help="What to do when all of them are in use.")] = "wait",
    lease_timeout_s: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Longest wait for one to fall free.")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
) -> None:
    """Publish the weights in SOURCE at ENDPOINT and serve them until stopped (SIGTERM or Ctrl-C).

    Exit codes: 0 stopped, 1 failure, 2 wrong usage.
    """
    console.check_endpoint(endpoint)
    check_label("--topic", topic)
    if label is not None:
        check_label("--label", label, empty=True)
    order = Order(
        endpoint=endpoint,
        source=source,
        watch=watch,
        topic=topic,
        label=label,
        wait=int(wait) if wait.isdecimal() else "all" if wait == "all" else "none",
        timeout=timeout_s,
        max_segments=max_segments,
        when_full=when_full,
        lease_timeout=lease_timeout_s,
    )
    console.run_until_stopped(Sender(order, Events(COMMAND, as_json=as_json)).run)


class Sender:
    """Carries out one order."""

    def __init__(self, order: Order, events: Events) -> None:
        self._order = order
        self._events = events

    async def run(self) -> None:
        """Publish and serve until cancelled.

        Raises:
            CommandError: SOURCE is not there.
            BusyncError: the endpoint or, without ``--watch``, the checkpoint cannot be used.
        """
        order = self._order
        if order.watch and not order.source.parent.exists():
            raise CommandError(f"the directory {order.source.parent} is not there", "make it first", ExitCode.USAGE)
        if not order.watch and not order.source.exists():
            remedy = "check the path, or --watch to wait for it"
            raise CommandError(f"{order.source} is not there", remedy, ExitCode.USAGE)
        path = None if order.watch else await console.in_thread(newest, order.source)
        async with busync.Publisher(
            order.endpoint,
            max_segments=order.max_segments,
            when_full=order.when_full,
            lease_timeout=order.lease_timeout,
        ) as publisher:
            fields = {"endpoint": order.endpoint, "topic": order.topic, "source": str(order.source), "pid": os.getpid()}
            self._events.tell("serving", f"serving {order.source} at {order.endpoint}", **fields)
            if path is None:
                await self._follow(publisher)
            else:
                await self._publish(publisher, path)
                await asyncio.Event().wait()

    async def _follow(self, publisher: busync.Publisher) -> None:
        troubles: list[tuple[Path, str]] = []
        watcher = Watcher(self._order.source, lambda path, reason: troubles.append((path, reason)))
        while True:
            path = await console.in_thread(watcher.look)
            for file, reason in troubles:
                self._events.warn("skipped", f"{file} skipped: {reason}", file=str(file), reason=reason)
            troubles.clear()
            if path is None:
                await asyncio.sleep(LOOK_EVERY)
                continue
            try:
                await self._publish(publisher, path)
            except (OptionError, CommandError):
                raise  # would fail for every file; nobody reads the output
            except (BusyncError, OSError, MemoryError) as error:
                watcher.reject()
                reason = console.describe(error)
                self._events.warn("error", f"{path.name} was not published: {reason}", file=str(path), reason=reason)

    async def _publish(self, publisher: busync.Publisher, path: Path) -> None:
        started = time.monotonic()
        label = self._order.label
        if label is None:
            label = _label_of(path)
        send = self._publish_safetensors if path.suffix == SAFETENSORS else self._publish_pickled
        sent = await send(publisher, path, label)
        if sent is None or sent.report.version is None:
            reason = f"all {self._order.max_segments} segments are in use"
            self._events.warn("skipped", f"{path} skipped: {reason}", file=str(path), reason=reason)
            return
        seconds = time.monotonic() - started
        topic, report, tensors, nbytes = self._order.topic, sent.report, sent.tensors, sent.nbytes
        text = f"{topic} version {report.version} ({label}): {tensors} tensors, {nbytes:,} bytes in {seconds:.2f} s"
        for what in ("acked", "pending", "gone", "failed") if self._order.wait != "none" else ():
            if names := getattr(report, what):
                text += f"; {what}: {', '.join(names)}"
        self._events.tell(
            "published",
            text,
            topic=topic,
            version=report.version,
            label=label,
            file=str(path),
            tensors=tensors,
            bytes=nbytes,
            seconds=round(seconds, 6),
            waited=round(report.waited, 6),
            acked=report.acked,
            pending=report.pending,
            gone=report.gone,
            failed=report.failed,
        )

    async def _publish_safetensors(self, publisher: busync.Publisher, path: Path, label: str) -> Sent | None:
        """Read the file straight into a loan, so that its weights are in memory once. None: it would have to wait."""
        order, stop = self._order, threading.Event()
        with await console.in_thread(SafetensorsFile, path) as file:
            try:
                async with publisher.loan(like=file.layout, topic=order.topic) as loan:
                    async with console.progress(f"reading {path.name}", file.nbytes) as advance:
                        # The thread must not keep the tensors for the moment that it outlives its result.
                        await console.in_thread(lambda: file.read_into(loan.tensors, advance, stop), on_cancel=stop.set)
                    report = await loan.publish(label=label, wait=order.wait, timeout=order.timeout)
            except PoolExhausted:
                return None
            return Sent(report, len(file.layout), file.nbytes)

    async def _publish_pickled(self, publisher: busync.Publisher, path: Path, label: str) -> Sent:
        order = self._order
        async with console.progress(f"publishing {path.name}"):
            flat = await console.in_thread(partial(load_pickled, path, mapped=not order.watch))
            source = {**flat.tensors, **flat.values}
            report = await publisher.publish(
                source, topic=order.topic, label=label, wait=order.wait, timeout=order.timeout
            )
        return Sent(report, len(flat.tensors), sum(tensor.nbytes for tensor in flat.tensors.values()))


def _label_of(path: Path) -> str:
    """The file's name, if it can be a label."""
    try:
        return check_label("label", path.name.encode()[:MAX_LABEL_BYTES].decode(errors="ignore"), empty=True)
    except (OptionError, UnicodeEncodeError):
        return ""


def main() -> NoReturn:
    """Run the command."""
    console.main(COMMAND, publish)
