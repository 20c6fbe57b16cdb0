"""Blobs made durable by one write: appended to a file of this process's own, whose sync is the only one to wait for.

The files that carry their names are written and synced in the background; then the journal is emptied. Until then they
are read from memory, or by other processes from the journal. What a power loss leaves there is written to its place
when a store is next swept.

A record is a sha256, a length and the bytes. A journal is locked by whoever writes it, so that nobody else replays it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

HEAD = struct.Struct(">32sQ")
MOST_BYTES = 64 << 20  # then whoever writes waits until the files have caught up
FLUSH_S = 30.0
RETRY_S = 1.0


class Journal:
    """`place` writes blobs to their files, durably; it runs in a thread of its own."""

    def __init__(self, folder: Path, place: Callable[[Mapping[str, bytes]], None]) -> None:
        self.folder = folder
        self.pending: dict[str, bytes] = {}  # in the order in which they came
        self._place = place
        self._lock = threading.Lock()  # of the file, and of what is pending
        self._fd: int | None = None
        self._size = 0
        self._appended = threading.Event()
        self._placed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None

    def append(self, blobs: Mapping[str, bytes]) -> None:
        """Durable, and in `pending`, when it returns."""
        if self._size > MOST_BYTES and not self.flush():
            raise OSError(errno.ENOSPC, f"the blobs of {self.folder} cannot be written to their places")
        records = b"".join(HEAD.pack(bytes.fromhex(digest), len(data)) + data for digest, data in blobs.items())
        with self._lock:
            fd = self._open()
            try:
                view = memoryview(records)
                while view:
                    view = view[os.write(fd, view) :]
                os.fdatasync(fd)
            except OSError:
                os.ftruncate(fd, self._size)  # or what comes next would stand behind half a record
                raise
            self._size += len(records)
            self.pending |= blobs
            if self._thread is None:
                self._thread = threading.Thread(target=self._place_forever, name="blob-journal", daemon=True)
                self._thread.start()
        self._appended.set()

    def flush(self) -> bool:
        """Waits until every blob is in its place. False where the disk has not taken them for long."""
        with self._placed:
            return self._placed.wait_for(lambda: not self.pending, FLUSH_S)

    def _open(self) -> int:
        if self._fd is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{os.getpid()}-{os.urandom(6).hex()}"
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            for folder in (self.folder, self.folder.parent):
                sync_folder(folder)
            self._fd = fd
        return self._fd

    def _place_forever(self) -> None:
        wait_s: float | None = None
        while True:
            self._appended.wait(wait_s)
            self._appended.clear()
            with self._lock:
                blobs = dict(self.pending)
            try:
                self._place(blobs)
            except Exception:  # also where no thread can be started: nobody else would ever place them
                wait_s = RETRY_S  # they are safe where they are
                continue
            wait_s = None
            with self._placed:
                for digest in blobs:
                    del self.pending[digest]
                if not self.pending and self._fd is not None:
                    os.ftruncate(self._fd, 0)
                    self._size = 0
                self._placed.notify_all()


def find(folder: Path, digest: str) -> bytes | None:
    """A blob that some process has promised and not put in its place yet."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with open(path, "rb") as f:
                while len(head := f.read(HEAD.size)) == HEAD.size:
                    name, size = HEAD.unpack(head)
                    if name.hex() == digest:
                        data = f.read(size)
                        if hashlib.sha256(data).hexdigest() == digest:
                            return data
                    else:
                        f.seek(size, os.SEEK_CUR)
    return None


def left(folder: Path) -> Iterator[tuple[Path, int]]:
    """Journals whose writers are gone, locked: (path, descriptor). Each is closed after its turn."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path, fd
            except BlockingIOError:
                continue
            finally:
                os.close(fd)


def records(fd: int) -> Iterator[tuple[str, bytes]]:
    """The whole records of a journal, from its start; one that a crash cut off ends it."""
    with open(fd, "rb", closefd=False) as f:
        while len(head := f.read(HEAD.size)) == HEAD.size:
            digest, size = HEAD.unpack(head)
            data = f.read(size)
            if len(data) != size or hashlib.sha256(data).digest() != digest:
                return
            yield digest.hex(), data


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
