"""Fixtures of the commands' tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.daemon.commands import Commands, commands_in


@pytest.fixture
def commands(context: ForkServerContext) -> Iterator[Commands]:
    """Starts commands. Their runtime directory has a short path, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="busync-") as directory, commands_in(context, Path(directory)) as started:
        yield started
