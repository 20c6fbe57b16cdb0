"""What a file holds: its hash, and the runs of what is not zeros."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

from .workspace import PAGE, ZEROS

SPARSE_FROM = 32 << 10
WINDOW = 1 << 20


def hashed(file: int, size: int) -> tuple[str, str]:
    """("f", hash of the content), or ("s", hash of the runs) for what is mostly zeros: there may be terabytes."""
    if size > SPARSE_FROM and mostly_zeros(file, size):
        digest = hashlib.sha256()
        for start, data in runs(file, 0, size):
            digest.update(run_head(start, data) + data)
        return "s", digest.hexdigest()
    digest = hashlib.sha256()
    at = 0
    while piece := os.pread(file, min(size + 1, WINDOW), at):
        digest.update(piece)
        at += len(piece)
        if at == size:
            break
    return "f", digest.hexdigest()


def mostly_zeros(file: int, size: int) -> bool:
    filled = 0
    for _, data in runs(file, 0, size):
        filled += len(data)
        if 2 * filled > size:
            return False
    return True


def runs(file: int, offset: int, size: int) -> Iterator[tuple[int, bytes]]:
    """The pages that hold anything but zeros, as (offset, bytes): neighbours together, none across a window's edge."""
    while offset < size:
        try:
            offset = os.lseek(file, offset, os.SEEK_DATA)
        except OSError:
            return  # nothing but a hole to the end
        base = offset - offset % WINDOW
        data = os.pread(file, WINDOW, base)
        for start, end in filled_pages(data):
            yield base + start, data[start:end]
        offset = base + WINDOW


def filled_pages(data: bytes) -> Iterator[tuple[int, int]]:
    if ZEROS not in data:
        if data.strip(b"\0"):
            yield 0, len(data)
        return
    start = -1
    for at in range(0, len(data), PAGE):
        if data[at : at + PAGE].strip(b"\0") if len(data) - at < PAGE else data[at : at + PAGE] != ZEROS:
            start = at if start < 0 else start
        elif start >= 0:
            yield start, at
            start = -1
    if start >= 0:
        yield start, len(data)


def run_head(start: int, data: bytes) -> bytes:
    return start.to_bytes(8, "big") + len(data).to_bytes(8, "big")
