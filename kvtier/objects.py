"""Named blobs that several machines see: what a shared store is built on.

root/NAME            a blob, whole from the moment it has its name
root/incoming/ID     a blob being written
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from kvtier.errors import TierConfigError
from kvtier.fileops import Buffer, Io, RealIo, fsync_dir

INCOMING: Final = "incoming/"


class Objects(Protocol):
    """Immutable blobs by name, parts of which are joined by "/". Thread-safe. Any method may raise OSError.

    What one process created, every other one sees at once, in `read` and in `list`.
    """

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        """Whole and durable under its name; False where the name exists, which then stays as it is."""
        ...

    def read(self, name: str) -> Buffer | None:
        """All of it, or None where there is none."""
        ...

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Names that begin with `prefix`, with their sizes in bytes, in no particular order."""
        ...

    def remove(self, name: str) -> None:
        """No error where there is none."""
        ...

    def close(self) -> None: ...


class DirectoryObjects:
    """Files under a directory, also of a network file system: exclusion rests on link(2) alone, not on locks."""

    def __init__(self, root: Path, io: Io | None = None) -> None:
        self._root, self._io = root, io or RealIo()
        try:
            (root / INCOMING).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise TierConfigError(f"the shared directory {root} cannot be made: {error.strerror}") from error

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        path, temp = self._root / name, self._root / INCOMING / secrets.token_hex(16)
        if path.exists():
            return False
        fd = self._open_new(temp)
        try:
            self._io.write_at(fd, list(parts), 0)
            self._io.fsync(fd)
            self._link(temp, path)
        except FileExistsError:
            return False
        finally:
            self._io.close(fd)
            with contextlib.suppress(OSError):
                self._io.unlink(temp)
        return True

    def _open_new(self, temp: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return self._io.open(temp, flags)
        except FileNotFoundError:  # the directory vanished; go on in a new one
            temp.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return self._io.open(temp, flags)

    def _link(self, temp: Path, path: Path) -> None:
        try:
            self._io.link(temp, path)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fsync_dir(self._io, path.parent.parent)
            self._io.link(temp, path)
        fsync_dir(self._io, path.parent)

    def read(self, name: str) -> Buffer | None:
        try:
            fd = self._io.open(self._root / name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            raw = bytearray(os.fstat(fd).st_size)
            if self._io.read_at(fd, [raw], 0) != len(raw):
                raise OSError(errno.EIO, "the file is shorter than it said")
            return raw
        finally:
            self._io.close(fd)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """`prefix` ends with "/": it is a folder."""
        for folder, _, names in os.walk(self._root / prefix, onerror=_unless_gone):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    yield path.relative_to(self._root).as_posix(), path.stat().st_size

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._io.unlink(self._root / name)

    def close(self) -> None:
        """Nothing is held open."""


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
