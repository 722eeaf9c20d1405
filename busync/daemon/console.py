"""What both commands share: exit codes, events, one-line errors, signals, progress bars."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import typer

from busync.calls import settle
from busync.errors import BusyncError, EndpointError, OptionError, PublisherLost, WaitTimeout
from busync.transport.endpoint import Endpoint

if TYPE_CHECKING:
    from rich.progress import Progress

#: Seconds that something may take before a person who is watching gets a progress bar.
PATIENCE: Final = 1.0
#: Set to anything to see where an error came from.
TRACEBACK_VARIABLE: Final = "BUSYNC_TRACEBACK"

_R = TypeVar("_R")


class ExitCode(IntEnum):
    """How a command ended."""

    FINE = 0
    FAILURE = 1
    USAGE = 2
    NO_PUBLISHER = 3
    TIMEOUT = 4
    VERIFICATION = 5


class CommandError(BusyncError):
    """Ends a command: one line for people, and its exit code."""

    def __init__(self, text: str, remedy: str = "", code: ExitCode = ExitCode.FAILURE) -> None:
        self.code = code
        super().__init__(text, remedy)


def check_endpoint(where: str) -> str:
    """Return ``where`` if it can name an endpoint.

    Raises:
        CommandError: it cannot, which is wrong usage.
    """
    try:
        Endpoint.resolve(where)
    except EndpointError as error:
        raise CommandError(error.text, error.remedy, ExitCode.USAGE) from error
    return where


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code of a command that ``error`` ends."""
    match error:
        case CommandError():
            return error.code
        case OptionError() | typer.TyperException():
            return ExitCode.USAGE
        case PublisherLost():
            return ExitCode.NO_PUBLISHER
        case WaitTimeout():
            return ExitCode.TIMEOUT
        case _:
            return ExitCode.FAILURE


def describe(error: BaseException) -> str:
    """One line for people: what happened, and what to do about it where that is known."""
    match error:
        case BusyncError():
            text = str(error)
        case typer.TyperException():
            text = f"{error.format_message().rstrip('.')}; see --help"
        case OSError(strerror=str(reason)):
            text = f"{error.filename}: {reason}" if error.filename else reason
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                text += "; make room, or choose another directory"
        case MemoryError():
            text = "out of memory; free some, or use a smaller checkpoint"
        case _:
            text = f"unexpected {type(error).__name__}: {error}; set {TRACEBACK_VARIABLE}=1 to see where it came from"
    return " ".join(text.split())


class Events:
    """What a command tells: a readable line per event, or with ``as_json`` one JSON object per line on stdout.

    Lines that tell of trouble go to stderr unless ``as_json``.
    """

    def __init__(self, command: str, *, as_json: bool) -> None:
        self._command = command
        self.as_json = as_json

    def tell(self, event: str, text: str, **fields: object) -> None:
        """Report an event: ``text`` for people, ``fields`` for programs.

        Raises:
            CommandError: nobody reads stdout any more.
        """
        try:
            sys.stdout.write((json.dumps({"event": event, **fields}) if self.as_json else text) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            # What the interpreter flushes at its end must have somewhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())
            raise CommandError("nobody reads the output any more") from None

    def warn(self, event: str, text: str, **fields: object) -> None:
        """Report trouble that does not end the command."""
        if self.as_json:
            self.tell(event, text, **fields)
        else:
            say(self._command, text)


def main(command: str, function: Callable[..., None]) -> NoReturn:
    """Run ``function`` as the command ``command`` with the process's arguments, and exit."""
    _tame(command)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(function)
    try:
        # Until a loop runs (importing torch takes seconds) a signal ends the command here and now.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)
        code = app(prog_name=command, standalone_mode=False) or ExitCode.FINE
    except Exception as error:
        code = exit_code_of(error)
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        say(command, describe(error))
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # ending already
    sys.exit(code)


def say(command: str, text: str) -> None:
    """Print one line on stderr."""
    with suppress(OSError, ValueError):  # closed, or nobody reads it
        sys.stderr.write(f"{command}: {' '.join(text.split())}\n")
        sys.stderr.flush()


def _leave(number: int, frame: object) -> NoReturn:
    # There is nothing to tidy yet, and an exception would get lost in one of the modules that are being imported.
    os._exit(ExitCode.FINE)


def _tame(command: str) -> None:
    """Turn everything that libraries print on their own into single lines on stderr."""

    class OneLine(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            exception = record.exc_info[1] if record.exc_info else None
            text = record.getMessage() + (f": {describe(exception)}" if exception else "")
            return f"{command}: {' '.join(text.split())}"

    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    # numpy is not needed; torch says this once when it is not there.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    warnings.showwarning = lambda message, *rest, **named: say(command, str(message))
    threading.excepthook = lambda args: say(command, describe(args.exc_value or RuntimeError("a thread ended")))
    sys.unraisablehook = lambda args: say(command, describe(args.exc_value or RuntimeError(str(args.err_msg))))


def run_until_stopped(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` on a loop. SIGTERM and SIGINT cancel it, once, and that is a tidy end."""
    import torch  # noqa: F401 - takes seconds, in which a loop could not react to a signal

    stopped = False

    async def supervise() -> None:
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()

        def stop() -> None:
            nonlocal stopped
            if not stopped and task is not None:
                stopped = True
                task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        await work()

    try:
        asyncio.run(supervise())
    except asyncio.CancelledError:
        if not stopped:
            raise


async def in_thread(function: Callable[..., _R], *args: Any, on_cancel: Callable[[], object] = lambda: None) -> _R:
    """Run blocking work off the loop. A cancellation calls ``on_cancel`` and waits for the work to end.

    So nothing that the work uses is taken from under it; ``on_cancel`` should make it end soon.
    """
    future = asyncio.get_running_loop().run_in_executor(None, function, *args)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        on_cancel()
        await settle(future)
        raise


def _make_bar(sized: bool) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    more = [DownloadColumn(), TimeRemainingColumn()] if sized else []
    return Progress(TextColumn("{task.description}"), BarColumn(), *more, console=Console(stderr=True), transient=True)


@asynccontextmanager
async def progress(what: str, total: int | None = None) -> AsyncIterator[Callable[[int], None]]:
    """A bar on stderr that appears after a second, if stderr is a terminal.

    Gives a function that adds to what is done, in the unit of ``total`` (bytes); any thread may call it.
    """
    bar: Progress | None = None
    done = 0

    async def show() -> None:
        nonlocal bar
        await asyncio.sleep(PATIENCE)
        fresh = await asyncio.to_thread(_make_bar, total is not None)  # to import it takes a tenth of a second
        fresh.add_task(what, total=total, completed=done)
        fresh.start()
        bar = fresh

    def advance(amount: int) -> None:
        nonlocal done
        done += amount
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)

    shown = asyncio.create_task(show()) if sys.stderr.isatty() else None
    try:
        yield advance
    finally:
        cancelled = False
        if shown is not None:
            shown.cancel()
            cancelled = await settle(shown)
        if bar is not None:
            bar.stop()
        if cancelled:
            raise asyncio.CancelledError
