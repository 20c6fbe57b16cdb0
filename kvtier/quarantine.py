"""What did not verify, for whoever wants to know why. Never served, bounded in number and bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier.fileops import Buffer, Io, file_size

_MOST_FILES: Final = 64


class Quarantine:
    """A folder. Nothing here raises: what cannot be kept is removed."""

    def __init__(self, folder: Path, io: Io, most_bytes: int) -> None:
        self.folder, self._io, self._most_bytes = folder, io, most_bytes

    def files(self) -> list[Path]:
        """Oldest first: names begin with the age of their segment."""
        try:
            return sorted(self.folder.iterdir())
        except OSError:
            return []

    def size_bytes(self) -> int:
        return sum(file_size(path) for path in self.files())

    def take(self, paths: Sequence[Path]) -> None:
        """Moves files here."""
        for path in paths:
            try:
                self._io.rename(path, self.folder / path.name)
            except OSError:
                self._remove(path)
        self._bound()

    def keep(self, name: str, payload: Buffer) -> None:
        """Writes a copy of a page that did not verify."""
        path = self.folder / name
        try:
            fd = self._io.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                self._io.write_at(fd, [payload], 0)
            finally:
                self._io.close(fd)
        except OSError:
            self._remove(path)
        self._bound()

    def _bound(self) -> None:
        """Oldest out first."""
        paths, total = self.files(), self.size_bytes()
        while paths and (len(paths) > _MOST_FILES or total > self._most_bytes):
            oldest = paths.pop(0)
            total -= file_size(oldest)
            self._remove(oldest)

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            self._io.unlink(path)
