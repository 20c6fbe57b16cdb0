"""Pages that come back from pinned memory and from NVMe, beside computing them again, by length."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bench.gpu_course import Course, wall
from bench.gpu_random import LARGE, TINY, facts_of, weights_of
from engine.backends.face import Logits, Tile, cut
from engine.backends.triton import Triton
from engine.facts import PAGE_SIZE

LENGTHS, DRY_LENGTHS = (2048, 4096, 8192, 16_384, 32_768), (48,)
_CHUNK = 1024  # tokens of a step of prefill
_REPEATS = 3
_READERS = 8
_PAGES_A_READ = 16
_LENGTH_S = 25.0  # for the longest; less for others


def restore(course: Course) -> None:
    shape, lengths = (TINY, DRY_LENGTHS) if course.dry else (LARGE, LENGTHS)
    pages = lengths[-1] // PAGE_SIZE
    backend = Triton(facts_of(shape), weights_of(shape), pool_blocks=2 * pages + 1)
    draw = random.Random(5)
    tokens = [draw.randrange(3, shape.vocab) for _ in range(lengths[-1])]
    with tempfile.TemporaryDirectory(dir=os.environ.get("TENUTO_BENCH_NVME")) as directory:
        for length in lengths:
            if course.enough_time(f"restore {length}", _LENGTH_S * length / lengths[-1]):
                _length(course, backend, tokens[:length], Path(directory) / "pages")


def _length(course: Course, backend: Triton, tokens: Sequence[int], path: Path) -> None:
    """Pages in blocks from 0 on leave, and come back as the blocks after them."""
    pages = len(tokens) // PAGE_SIZE
    there, back = list(range(pages)), list(range(pages, 2 * pages))
    repeats = 1 if course.dry else _REPEATS
    seconds = [wall(lambda: _prefill(backend, there, tokens)) for _ in range(repeats)]
    course.say("recompute", tokens=len(tokens), seconds=seconds)
    before = _next(backend, there, pages)
    began = time.perf_counter()
    copied = backend.gather([(block, PAGE_SIZE) for block in there])
    copied.ready.wait()
    page_bytes = len(copied.pages[0])
    course.say("offload", tokens=len(tokens), bytes=pages * page_bytes, seconds=[time.perf_counter() - began])
    _write(path, copied.pages)
    for tier in ("pinned", "nvme"):
        took, equal = [], []
        for _ in range(repeats):
            took.append(_bring(backend, back, copied.pages, path if tier == "nvme" else None))
            equal.append(bool(np.array_equal(before, _next(backend, back, pages))))
        course.say("restore", tier=tier, tokens=len(tokens), bytes=pages * page_bytes, seconds=took, equal=all(equal))


def _prefill(backend: Triton, blocks: Sequence[int], tokens: Sequence[int]) -> None:
    for start in range(0, len(tokens), _CHUNK):
        part = tokens[start : start + _CHUNK]
        backend.forward(cut(blocks, start, part, start + len(part) == len(tokens)))
    backend._streams.finish(backend._streams.compute)


def _next(backend: Triton, blocks: Sequence[int], pages: int) -> Logits:
    """Logits of a token after these pages, which goes to a block of nobody's."""
    (row,) = backend.forward([Tile((*blocks, 2 * pages), 0, (7,), True)])
    assert row is not None
    return row.copy()


def _bring(backend: Triton, blocks: Sequence[int], pages: Sequence[bytes | memoryview], path: Path | None) -> float:
    """Seconds until the pages are on the device, from their landings or from the file."""
    for block in blocks:
        backend.zero(block)
    landings = [backend.landing(block) for block in blocks]
    if path is None:
        for landing, page in zip(landings, pages, strict=True):
            landing[:] = page
    backend._streams.finish(backend._streams.compute)
    began = time.perf_counter()
    if path is not None:
        _read(path, landings)
    backend.scatter(blocks).wait()
    return time.perf_counter() - began


def _write(path: Path, pages: Sequence[bytes | memoryview]) -> None:
    with path.open("wb") as file:
        for page in pages:
            file.write(page)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path, landings: Sequence[memoryview]) -> None:
    """Past the page cache where pages and file system allow it, several reads in flight."""
    page_bytes = len(landings[0])
    direct = os.O_DIRECT if page_bytes % 4096 == 0 else 0
    try:
        file = os.open(path, os.O_RDONLY | direct)
    except OSError:
        file = os.open(path, os.O_RDONLY)

    def read(at: int) -> None:
        part = landings[at : at + _PAGES_A_READ]
        wanted = sum(map(len, part))
        if os.preadv(file, list(part), at * page_bytes) != wanted:
            raise OSError(f"{path} is shorter than its pages")

    try:
        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(read, range(0, len(landings), _PAGES_A_READ)))
    finally:
        os.close(file)
