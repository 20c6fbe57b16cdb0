"""Content-addressed bytes on disk: named by sha256, written whole or not at all, verified when read."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from . import journal
from .errors import BlobCorrupt, BlobMissing

JOURNALED_BYTES = 4 << 20  # more at once is written in place: the disk has as much to do with one copy as with two
WRITERS = 8  # that wait for the disk at the same time, whose journal takes their syncs together
DIGEST = re.compile(r"[0-9a-f]{64}\Z")


class BlobStore:
    """Blobs under `root`, 256 folders wide. Safe for many writers: a blob's name decides its bytes.

    Blobs become visible in the order in which they are put, so what names others is put after them, and whoever finds
    it may count on them: the store is `whole`. It is not while blobs are removed, nor after that was interrupted.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._base = str(self.root)
        self._torn = self.root / "removing"
        self._journal = journal.Journal(self.root / "journal", self._place)

    def path(self, digest: str) -> Path:
        return Path(self._name(digest))

    def _name(self, digest: str) -> str:
        if not DIGEST.match(digest):
            raise BlobMissing(f"{digest!r} is not a sha256 in hex")
        return f"{self._base}/{digest[:2]}/{digest[2:]}"

    def has(self, digest: str) -> bool:
        return digest in self._journal.pending or os.path.exists(self._name(digest))

    @property
    def whole(self) -> bool:
        """Whether a blob that is there has everything there that it names."""
        return not self._torn.exists()

    def put(self, data: bytes) -> str:
        """Durable when it returns."""
        return self.put_many([data])[0]

    def put_many(self, blobs: Iterable[bytes]) -> list[str]:
        """Like `put` for each, visible in this order. A few are durable by one write to the journal."""
        items = [(hashlib.sha256(data).hexdigest(), data) for data in blobs]
        new = {digest: data for digest, data in items if not self.has(digest)}
        if new and sum(map(len, new.values())) <= JOURNALED_BYTES:
            self._journal.append(new)
        elif new:
            self._place(new)
        return [digest for digest, _ in items]

    def _place(self, new: Mapping[str, bytes]) -> None:
        """Each in its own file, durably."""
        for folder in {digest[:2] for digest in new}:
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        parts = [f"{self._base}/{digest[:2]}/{os.urandom(8).hex()}.part" for digest in new]
        try:
            if len(new) < WRITERS // 2:
                for part, data in zip(parts, new.values(), strict=True):
                    _write(part, data)
            else:
                with ThreadPoolExecutor(WRITERS) as pool:
                    list(pool.map(_write, parts, new.values()))
            for part, digest in zip(parts, new, strict=True):
                os.replace(part, self._name(digest))
        except BaseException:
            for part in parts:
                with suppress(FileNotFoundError):
                    os.unlink(part)
            raise
        for path in {self.root, *(self.root / digest[:2] for digest in new)}:
            journal.sync_folder(path)

    def flush(self) -> None:
        """Waits until what this process has put is in files of its own. Listing and removing do so by themselves."""
        self._journal.flush()

    def get(self, digest: str) -> bytes:
        name, pending = self._name(digest), self._journal.pending.get(digest)
        if pending is not None:
            return pending
        try:
            data = _read(name)
        except FileNotFoundError:
            promised = journal.find(self.root / "journal", digest)
            try:
                data = _read(name) if promised is None else promised  # it may have come to its place just now
            except FileNotFoundError:
                raise BlobMissing(f"the blob {digest} is not in {self.root}") from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise BlobCorrupt(f"the blob {digest} in {self.root} does not have the bytes that its name says")
        return data

    def remove(self, digest: str) -> int:
        """Bytes freed. Only the holder of the collection lease may call this. The store is not whole after it, unless
        `removing` says so."""
        path = self.path(digest)
        self.flush()
        try:
            size = path.stat().st_size
            self._tear()
            path.unlink()
        except FileNotFoundError:
            return 0
        return size

    @contextmanager
    def removing(self, *, everything: bool) -> Iterator[None]:
        """Around removals after which the store is whole again: all that was dead, or only of what one session had."""
        was_whole = self.whole
        yield
        if was_whole or everything:
            self._torn.unlink(missing_ok=True)

    def _tear(self) -> None:
        """Durable before the first removal is."""
        if self.whole:
            self._torn.touch()
            journal.sync_folder(self.root)

    def __iter__(self) -> Iterator[str]:
        """All digests, in no particular order."""
        self.flush()
        for folder in self.root.glob("[0-9a-f][0-9a-f]"):
            for path in folder.iterdir():
                if len(path.name) == 62:
                    yield folder.name + path.name

    def sweep(self) -> int:
        """Removes what a crash left half-written; returns how many. Call before the first write of a process.

        Blobs that only a journal still has are written again. The store is not whole then: they may name others that
        were removed meanwhile.
        """
        count = 0
        for path, fd in journal.left(self.root / "journal"):
            self._replay(fd)
            path.unlink()
        for path in self.root.glob("[0-9a-f][0-9a-f]/*.part"):
            path.unlink(missing_ok=True)
            count += 1
        return count

    def _replay(self, fd: int) -> None:
        for digest, data in journal.records(fd):
            try:
                whole = _read(self._name(digest)) == data
            except FileNotFoundError:
                whole = False
            if not whole:
                self._tear()
            self._place({digest: data})  # again where it is whole: it may not have been synced


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as f:
        return f.read()


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
