"""Content-addressed bytes on disk: named by sha256, written whole or not at all, verified when read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .errors import BlobCorrupt, BlobMissing


class BlobStore:
    """Blobs under `root`, 256 folders wide. Safe for many writers: a blob's name decides its bytes."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def path(self, digest: str) -> Path:
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise BlobMissing(f"{digest!r} is not a sha256 in hex")
        return self.root / digest[:2] / digest[2:]

    def has(self, digest: str) -> bool:
        return self.path(digest).exists()

    def put(self, data: bytes) -> str:
        """Durable when it returns: the file and its folder are synced."""
        return self.put_many([data])[0]

    def put_many(self, blobs: Iterable[bytes]) -> list[str]:
        """Like `put` for each; the folders are synced once at the end."""
        items = [(hashlib.sha256(data).hexdigest(), data) for data in blobs]
        new = {digest: data for digest, data in items if not self.has(digest)}
        if len(new) > 16:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(self._write, new, new.values()))
        else:
            for digest, data in new.items():
                self._write(digest, data)
        if new:
            for folder in {self.root, *(self.path(digest).parent for digest in new)}:
                _sync_folder(folder)
        return [digest for digest, _ in items]

    def get(self, digest: str) -> bytes:
        try:
            data = self.path(digest).read_bytes()
        except FileNotFoundError:
            raise BlobMissing(f"the blob {digest} is not in {self.root}") from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise BlobCorrupt(f"the blob {digest} in {self.root} does not have the bytes that its name says")
        return data

    def remove(self, digest: str) -> int:
        """Bytes freed. Only the holder of the collection lease may call this."""
        path = self.path(digest)
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        return size

    def __iter__(self) -> Iterator[str]:
        """All digests, in no particular order."""
        for folder in self.root.glob("[0-9a-f][0-9a-f]"):
            for path in folder.iterdir():
                if len(path.name) == 62:
                    yield folder.name + path.name

    def sweep(self) -> int:
        """Removes what a crash left half-written; returns how many. Call before the first write of a process."""
        count = 0
        for path in self.root.glob("[0-9a-f][0-9a-f]/*.part"):
            path.unlink(missing_ok=True)
            count += 1
        return count

    def _write(self, digest: str, data: bytes) -> None:
        path = self.path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{os.urandom(8).hex()}.part")
        try:
            with open(temporary, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
