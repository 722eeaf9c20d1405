"""Which file to publish next: one that is new, complete, and not being written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from busync.daemon.checkpoints import CheckpointError, Stamp, candidates, check


class Watcher:
    """Looks at a checkpoint file, or a directory of them, whenever it is asked.

    A file is handed out once per state, and only when two looks in a row saw it unchanged and it is complete. In a
    directory nothing is handed out that is older than what was handed out before. ``tell(path, reason)`` is called once
    for each state of a file that is stable and cannot be used, and once while the path cannot be read at all.
    """

    def __init__(self, source: Path, tell: Callable[[Path, str], None]) -> None:
        self._source = source
        self._tell = tell
        #: What the last look saw.
        self._seen: dict[Path, Stamp] = {}
        #: Files that cannot be used, in the state that was judged.
        self._bad: dict[Path, Stamp] = {}
        self._handed: tuple[Path, Stamp] | None = None
        self._handed_before: tuple[Path, Stamp] | None = None
        self._trouble = ""

    def look(self) -> Path | None:
        """The file to publish now, if any. Blocks for as long as the file system does."""
        try:
            found = candidates(self._source)
            self._trouble = ""
        except (OSError, CheckpointError) as error:
            found = []
            reason = error.reason if isinstance(error, CheckpointError) else str(error.strerror or error).lower()
            if reason != self._trouble:
                self._trouble = reason
                self._tell(self._source, f"{reason}; waiting for it")
        before, self._seen = self._seen, dict(found)
        self._bad = {path: stamp for path, stamp in self._bad.items() if self._seen.get(path) == stamp}
        for path, stamp in found:
            if self._is_old(path, stamp):
                return None
            if before.get(path) == stamp and path not in self._bad:
                try:
                    check(path)
                except CheckpointError as error:
                    self._bad[path] = stamp
                    self._tell(path, error.reason)
                else:
                    self._handed_before, self._handed = self._handed, (path, stamp)
                    return path
        return None

    def reject(self) -> None:
        """What was handed out last cannot be used after all: it does not come again, and hides no older file."""
        if self._handed is not None:
            path, stamp = self._handed
            self._bad[path] = stamp
            self._handed = self._handed_before

    def _is_old(self, path: Path, stamp: Stamp) -> bool:
        if self._handed is None:
            return False
        last, handed = self._handed
        if path == last:
            return stamp == handed
        return (stamp.mtime_ns, path.name) < (handed.mtime_ns, last.name)
