"""What keeps two processes on one directory apart: a lease to delete and a turn to add. They die with their process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvtier.fileops import Io

LOCK_NAMES: Final = ("lease", "turn")
TURN_S: Final = 5.0
_PAUSE_S: Final = 0.002


class DirectoryLocks:
    """Two empty files, locked by `flock`."""

    def __init__(self, root: Path, io: Io) -> None:
        self._root, self._io = root, io
        self._fd: int | None = None
        self.in_turn = False

    def open(self) -> None:
        """Of a new directory, when the old one is gone. May raise OSError."""
        fresh = self._io.open(self._root / "lease", os.O_RDWR | os.O_CREAT)
        self.close()
        self._fd = fresh

    def close(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._io.close(self._fd)
        self._fd = None

    def are_current(self) -> bool:
        """Whether the directory is still the one that was opened."""
        if self._fd is None:
            return False
        try:
            found, held = os.stat(self._root / "lease"), os.fstat(self._fd)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

    def hold_lease(self) -> bool:
        return self._fd is not None and _lock(self._fd)

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Of several processes, one at a time adds to the directory, or their sum would pass the budget.

        False where another one has not finished within `TURN_S`. Not for several threads.
        """
        try:
            fd = self._io.open(self._root / "turn", os.O_RDWR | os.O_CREAT)
        except OSError:  # whatever is wrong, the write that follows will say it
            yield True
            return
        try:
            self.in_turn = _locked_within(fd, TURN_S)
            yield self.in_turn
        finally:
            self.in_turn = False
            self._io.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _locked_within(fd: int, seconds: float) -> bool:
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not _lock(fd):
        if time.monotonic() >= deadline:
            return False
        pause.wait(_PAUSE_S)
    return True
