"""Running an example as somebody at a shell would, and reading what its README promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[2]


class Run:
    """One program, from the repository's directory. ``lines`` grow as they are printed."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONWARNINGS": "error"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()

    def wait_for(self, pattern: str, timeout: float) -> None:
        """Wait until a line matches."""
        with self._news:
            assert self._news.wait_for(lambda: any(re.search(pattern, line) for line in self.lines), timeout), (
                self.lines
            )

    def interrupt(self, number: int) -> None:
        """Send a signal to the program alone."""
        self._process.send_signal(number)

    def end(self, timeout: float) -> tuple[int, str]:
        """Wait for the program; its exit code and what it wrote to standard error."""
        code = self._process.wait(timeout)
        self._reader.join(timeout)
        assert self._process.stderr is not None
        return code, self._process.stderr.read()


def promised(name: str) -> list[list[str]]:
    """The indented blocks of an example's README, line by line."""
    text = (ROOT / "examples" / name / "README.md").read_text()
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    return [[line[4:] for line in block.splitlines()] for block in blocks]
