"""How fast a tier reads here: what the break-even between restoring and recomputing rests on."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.files import SegmentFiles
from kvtier.index import SegmentIndex
from kvtier.keys import page_digest
from kvtier.reads import came_back
from kvtier.runs import Run, RunReader
from kvtier.segment import runs

CHUNK_BYTES: Final = 2 * 2**20
_ROOM: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)  # a pool is there already


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """`direct`: past the page cache. Otherwise the figure may be that of memory, not of the medium."""

    bytes_per_s: float
    size_bytes: int
    elapsed_s: float
    direct: bool


def measure(
    index: SegmentIndex, files: SegmentFiles, reader: RunReader, size_bytes: int, free_bytes: int
) -> ReadSpeed | None:
    """About `size_bytes` of the pages that are there; if there are fewer, a scratch file within `free_bytes`.

    None where neither is possible, or a read fails.
    """
    plan = _sample(index, reader, size_bytes)
    if plan:
        return _measure_runs(plan, reader)
    size_bytes = min(size_bytes, free_bytes)
    return None if size_bytes < CHUNK_BYTES else _measure_scratch(files, size_bytes, reader)


def _sample(index: SegmentIndex, reader: RunReader, size_bytes: int) -> list[Run]:
    plan: list[Run] = []
    for held in index.segments():
        for run in runs(sorted(held.live), reader.pages):
            plan.append((held, run))
            size_bytes -= len(run) * reader.page_bytes
            if size_bytes <= 0:
                return plan
    return []


def _measure_runs(plan: Sequence[Run], reader: RunReader) -> ReadSpeed | None:
    """As `read_into`: several reads in flight, verified and decoded. None where one of them fails."""

    keys = [held.header.rows[row][0] for held, rows in plan for row in rows]
    size_bytes = len(keys) * reader.page_bytes
    memory = memoryview(mmap.mmap(-1, size_bytes, flags=_ROOM))
    starts = range(0, size_bytes, reader.page_bytes)
    rooms = {key: memory[start : start + reader.page_bytes] for key, start in zip(keys, starts, strict=True)}

    def read() -> bool:
        reads = reader.land(plan, rooms)
        return all(came_back(one) and isinstance(one.result(), list) for one in reads)

    return _timed(size_bytes, read, reader)


def _measure_scratch(files: SegmentFiles, size_bytes: int, reader: RunReader) -> ReadSpeed | None:
    """The same over a file that is written for it and then removed: chunks, each hashed. None where that fails."""
    chunks = max(1, size_bytes // CHUNK_BYTES)
    with files.scratch(chunks, CHUNK_BYTES) as path:
        if path is None:
            return None

        def read_chunk(place: int, path: Path = path) -> bytes | None:
            try:
                return page_digest(b"", b"", reader.span(path, place * CHUNK_BYTES, CHUNK_BYTES))
            except OSError:
                return None

        return _timed(chunks * CHUNK_BYTES, lambda: None not in reader.each(read_chunk, range(chunks)), reader)


def _timed(size_bytes: int, read: Callable[[], bool], reader: RunReader) -> ReadSpeed | None:
    begun = time.perf_counter()
    whole = read()
    elapsed_s = time.perf_counter() - begun
    return ReadSpeed(size_bytes / elapsed_s, size_bytes, elapsed_s, reader.direct) if whole else None
