"""Run a check in a forked child, and tell what it said."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def check_in_child(check: Callable[[], object]) -> None:
    """Fork, run ``check`` in the child, and fail with its traceback if it fails there."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            check()
            status = 0
        except BaseException:
            os.write(writer, traceback.format_exc()[-4000:].encode())
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as report:
        said = report.read().decode()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {status}: {said}"
