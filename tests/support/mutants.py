"""Mutants: changes of busync that a test must notice. ``make mutants`` makes each of them and runs the test.

A test file names them as data, by the name of the test function that must fail:

    MUTANTS = {"test_b03_descriptors_do_not_grow": Mutant("busync/transport/door.py", "old", "new", "what it breaks")}

Each is made in a copy of the tree, from which the test, its forkserver, its children and the commands that it starts
all take busync. Before that, the tests have to pass in the copy as it is.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
FILES = ("tests/field_reports/test_*.py", "tests/protocol/test_ledger.py", "tests/cuda/test_[bp]*.py")
NEEDED = ("busync", "tests", "bin", "docs", "examples", "pyproject.toml", "README.md", "Makefile")
TEST_TIMEOUT = 30  #: seconds that one test may take before pytest fails it
RUN_TIMEOUT = 90.0  #: seconds that one run may take before it is ended


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file, as a test names it."""

    path: str  #: below the root of the repository
    old: str  #: occurs there exactly once
    new: str
    why: str  #: one line: what the change breaks

    def apply(self, text: str) -> str:
        """The text of the file with the change.

        Raises:
            ValueError: ``old`` does not occur there exactly once, or the outcome is no Python.
        """
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.path} has {self.old!r} {found} times")
        changed = text.replace(self.old, self.new)
        if changed == text:
            raise ValueError(f"{self.old!r} in {self.path} stays as it is")
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise ValueError(f"{self.path} with {self.new!r} is no Python: {error}") from error
        return changed


Mutants = Mapping[str, "Mutant | tuple[Mutant, ...]"]


@dataclass(frozen=True, slots=True)
class Case:
    """A mutant and the test that must fail with it."""

    file: str
    test: str
    mutant: Mutant

    @property
    def node(self) -> str:
        """What pytest calls the test."""
        return f"{self.file}::{self.test}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one mutant: "killed", "hung" (killed too), "survived" or "broken" (no test was run)."""

    outcome: str
    seconds: float
    said: str

    @property
    def good(self) -> bool:
        """Whether the test noticed."""
        return self.outcome in ("killed", "hung")


def tests_and_mutants(file: str) -> tuple[list[str], list[Case]]:
    """The names of the test functions of a file, and its mutants."""
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    tests = [name for name, value in vars(module).items() if name.startswith("test_") and callable(value)]
    named: Mutants = getattr(module, "MUTANTS", {})
    cases = []
    for test, mutants in named.items():
        cases += [Case(file, test, m) for m in (mutants if isinstance(mutants, tuple) else (mutants,))]
    return tests, cases


def files() -> list[str]:
    """The test files that name mutants."""
    return [str(path.relative_to(ROOT)) for pattern in FILES for path in sorted(ROOT.glob(pattern))]


def collect() -> list[Case]:
    """All mutants."""
    return [case for file in files() for case in tests_and_mutants(file)[1]]


class Tree:
    """A copy of what the tests need, in which one mutant at a time is made."""

    def __init__(self, directory: Path) -> None:
        self._root = directory
        for name in NEEDED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, directory / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, directory / name)
        (directory / ".venv").symlink_to(sys.prefix)  # where the commands look for their interpreter
        path = self.python("import busync; print(busync.__file__)").strip()
        assert path == str(directory / "busync" / "__init__.py"), f"the copy is not what is run, but {path}"

    def python(self, code: str) -> str:
        """What a program prints."""
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, cwd=self._root, env=self._environment(), check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def _environment(self) -> dict[str, str]:
        # Without bytecode: a file that changes within a second, and keeps its length, would look the same.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "BUSYNC_"))}
        return {**kept, "PYTHONPATH": str(self._root), "PYTHONDONTWRITEBYTECODE": "1"}

    def pytest(self, nodes: list[str], timeout: float) -> Verdict:
        """Run tests until the first that fails."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
        command += [f"--timeout={TEST_TIMEOUT}", *nodes]
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as said:
            child = subprocess.Popen(
                command,
                cwd=self._root,
                env=self._environment(),
                stdout=said,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            code: int | None = None
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(timeout)
            with suppress(ProcessLookupError, PermissionError):  # its children stay in its group
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            said.seek(0)
            text = said.read()
        outcome = {None: "hung", 0: "survived", 1: "killed"}.get(code, "killed" if code and code < 0 else "broken")
        return Verdict(outcome, time.monotonic() - began, text)

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """The tree with the mutant, while the block runs."""
        path = self._root / mutant.path
        text = path.read_text()
        path.write_text(mutant.apply(text))
        try:
            yield
        finally:
            path.write_text(text)

    def judge(self, case: Case) -> Verdict:
        """Run the case's test against its mutant."""
        with self.changed(case.mutant):
            return self.pytest([case.node], RUN_TIMEOUT)


def run(cases: list[Case], jobs: int = 1) -> list[Verdict]:
    """Judge all cases, printing a line for each as it is done; the verdicts, in order.

    Raises:
        RuntimeError: the tests fail without a mutant.
    """
    with tempfile.TemporaryDirectory(prefix="busync-mutants-") as directory:
        trees = [Tree(Path(directory) / str(i)) for i in range(jobs)]
        first = trees[0].pytest(list(dict.fromkeys(case.node for case in cases)), 600.0)
        if first.outcome != "survived":
            raise RuntimeError(f"the tests fail without a mutant:\n{first.said[-4000:]}")
        free: SimpleQueue[Tree] = SimpleQueue()
        for tree in trees:
            free.put(tree)

        def judge(case: Case) -> Verdict:
            tree = free.get()
            try:
                verdict = tree.judge(case)
            finally:
                free.put(tree)
            said = f"{verdict.outcome:8} {verdict.seconds:5.1f} s  {case.test}: {case.mutant.why}"
            print(said, flush=True)  # noqa: T201
            return verdict

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(judge, cases))


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 if every mutant died."""
    parser = argparse.ArgumentParser(prog="mutants", description="make every mutant, and run the test it must fail")
    parser.add_argument("-k", default="", metavar="TEXT", help="only tests whose file or name has this")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many at a time")
    options = parser.parse_args(arguments)
    cases = [case for case in collect() if options.k in case.node]
    if not cases:
        print(f"no test has {options.k!r}")  # noqa: T201
        return 1
    try:
        verdicts = run(cases, max(1, options.jobs))
    except RuntimeError as error:
        print(error)  # noqa: T201
        return 1
    for case, verdict in zip(cases, verdicts, strict=True):
        if verdict.outcome == "broken":
            print(f"\n{case.node}\n{verdict.said[-2000:]}")  # noqa: T201
    killed = sum(verdict.good for verdict in verdicts)
    print(f"\n{killed} of {len(cases)} mutants killed")  # noqa: T201
    return 0 if killed == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
