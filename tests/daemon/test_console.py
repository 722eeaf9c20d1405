"""What both commands share."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import sys
import threading

import pytest
import typer

from busync.daemon import console
from busync.daemon.console import CommandError, Events, ExitCode
from busync.errors import EndpointInUse, OptionError, PublisherLost, WaitTimeout


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (CommandError("it broke", "mend it", ExitCode.VERIFICATION), 5, "it broke; mend it"),
        (OptionError("--x", 1, "2"), 2, "--x=1 is not allowed; use 2"),
        (typer.BadParameter("no."), 2, "Invalid value: no; see --help"),
        (PublisherLost("policy", "none"), 3, "no publisher at policy: none; start one, or check the endpoint's name"),
        (WaitTimeout("a newer version", 2), 4, "a newer version did not happen within 2 s"),
        (EndpointInUse("policy", 7), 1,
         "endpoint policy: in use by pid 7; choose another name, or stop that publisher"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 1,
         "/x: No space left on device; make room, or choose another directory"),
        (MemoryError(), 1, "out of memory; free some, or use a smaller checkpoint"),
        (RuntimeError("two\nlines"), 1,
         "unexpected RuntimeError: two lines; set BUSYNC_TRACEBACK=1 to see where it came from"),
    ],
)  # fmt: skip
def test_every_error_has_one_line_and_a_code(error: Exception, code: int, text: str) -> None:
    assert console.exit_code_of(error) == code
    assert console.describe(error) == text


def test_events_are_lines_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (False, True):
        events = Events("busync-x", as_json=as_json)
        events.tell("adopted", "version 1", version=1)
        events.warn("lost", "it is gone", endpoint="policy")
    output = capsys.readouterr()
    assert output.out == 'version 1\n{"event": "adopted", "version": 1}\n{"event": "lost", "endpoint": "policy"}\n'
    assert output.err == "busync-x: it is gone\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cancels_the_work_once(number: int) -> None:
    steps: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(10)
        finally:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.05)
            steps.append("tidied")

    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    try:
        console.run_until_stopped(work)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert steps == ["tidied"]


def test_a_cancellation_of_nobody_is_an_error() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        console.run_until_stopped(work)


def test_blocking_work_is_told_to_end_and_waited_for() -> None:
    stop, ended = threading.Event(), threading.Event()

    def block() -> None:
        stop.wait(10)
        ended.set()

    async def work() -> None:
        task = asyncio.create_task(console.in_thread(block, on_cancel=stop.set))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(work())


class Terminal(io.StringIO):
    """A stderr that a person watches."""

    def isatty(self) -> bool:
        return True


async def take_time() -> None:
    async with console.progress("reading w.safetensors", 1000) as advance:
        await asyncio.sleep(0.05)
        await asyncio.to_thread(advance, 500)
        await asyncio.sleep(0.2)


def test_a_bar_appears_for_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    asyncio.run(take_time())
    assert terminal.getvalue() == ""
    monkeypatch.setattr(console, "PATIENCE", 0.01)
    asyncio.run(take_time())
    assert "reading w.safetensors" in terminal.getvalue()
    assert "0.5/1.0 kB" in terminal.getvalue()


def test_no_bar_appears_when_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "PATIENCE", 0.01)
    asyncio.run(take_time())
    assert capsys.readouterr().err == ""
