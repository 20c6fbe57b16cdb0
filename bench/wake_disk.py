"""What the disk can do at most, beside what our reads make of it, on the very same files.

Raw: whole segment files, O_DIRECT, eight reads of 2 MiB in flight, into one aligned buffer that is there already and
never looked at. Ours: `TierStack.read_into` in this process over the directory that the engine wrote, as an engine
calls it: into the places of the pages, which are there already too, and every page verified. Both are over the bytes of
KV that come out.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.compiled import BenchError
from bench.wake_bed import forget_cached
from kvtier import Tier, TierConfig, TierStack

READS = ("raw", "tier", "path")
IN_FLIGHT, CHUNK_BYTES = 8, 2 << 20
_NO_ROOM = 1 << 20  # the budget of a stack that only reads is never used up: it writes nothing


class DiskReads:
    """One NVMe directory, read in two ways: `raw`, and `tier` for the pages of `keys`. Raises BenchError where files
    are missing."""

    def __init__(self, directory: Path, fingerprint: bytes, page_bytes: int, keys: Sequence[bytes]) -> None:
        self._directory, self._page_bytes = directory, page_bytes
        self._map = huge(len(keys) * page_bytes)
        self._room = memoryview(self._map)
        touch(self._room)
        places = (self._room[at : at + page_bytes] for at in range(0, len(self._room), page_bytes))
        self._wanted = list(zip(keys, places, strict=True))
        used = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        config = TierConfig(
            page_bytes=page_bytes,
            fingerprint=fingerprint,
            host_path=None,
            host_bytes=0,
            nvme_dir=directory,
            nvme_bytes=2 * used + _NO_ROOM,
        )
        self._raw = RawReads(directory)
        self._stack = TierStack.open(config)

    def __enter__(self) -> DiskReads:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._raw.close()
        for _key, place in self._wanted:
            place.release()
        self._room.release()
        self._map.close()

    def timed(self, read: str) -> tuple[int, float]:
        """Bytes and seconds of one read of everything, cold. Raises BenchError where a page is missing."""
        forget_cached(self._directory)
        began = time.perf_counter()
        size = self._raw.read() if read == "raw" else self._tier()
        return size, time.perf_counter() - began

    def _tier(self) -> int:
        landed = self._stack.read_into(self._wanted)
        if sum(tier is Tier.NVME for tier in landed.tiers.values()) < len(self._wanted):
            raise BenchError("pages that were just written to the NVMe tier cannot be read")
        return len(self._wanted) * self._page_bytes


def huge(size_bytes: int) -> mmap.mmap:
    """Memory in huge pages where there are, as an engine's pool is: a direct read has to pin every page."""
    memory = mmap.mmap(-1, size_bytes)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def touch(room: memoryview) -> None:
    """Memory is there before the clock runs."""
    room[::4096] = bytes(len(room[::4096]))


class RawReads:
    """The files of a directory, open past the page cache."""

    def __init__(self, directory: Path) -> None:
        paths = sorted(directory.rglob("*.seg"))
        if not paths:
            raise BenchError(f"{directory} holds no segments")
        self._files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
        self._pool = ThreadPoolExecutor(IN_FLIGHT)
        self._spans: list[tuple[int, int, int]] = []  # file, offset in it, offset in the buffer
        at = 0
        for file, path in zip(self._files, paths, strict=True):
            for offset in range(0, path.stat().st_size, CHUNK_BYTES):
                self._spans.append((file, offset, at))
                at += CHUNK_BYTES
        self._map = huge(at)
        self._room = memoryview(self._map)
        touch(self._room)

    def close(self) -> None:
        self._pool.shutdown()
        self._room.release()
        self._map.close()
        for file in self._files:
            os.close(file)

    def read(self) -> int:
        """Everything once. Bytes that came."""
        return sum(self._pool.map(self._one, self._spans))

    def _one(self, span: tuple[int, int, int]) -> int:
        file, offset, at = span
        return os.preadv(file, [self._room[at : at + CHUNK_BYTES]], offset)
