"""The few file operations that tiers need, behind a seam so that faults can be injected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
Room: TypeAlias = bytearray | memoryview  # what a read fills


class Io(Protocol):
    """Blocking file operations. Every one may raise OSError; writes and reads are complete or raise."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int: ...

    def close(self, fd: int) -> None: ...

    def read_at(self, fd: int, buffers: list[Room], offset: int) -> int:
        """Fills the buffers in order; returns how many bytes there were (fewer at the file's end)."""
        ...

    def write_at(self, fd: int, buffers: list[Buffer], offset: int) -> None: ...

    def fsync(self, fd: int) -> None: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def link(self, source: Path, target: Path) -> None:
        """A second name; FileExistsError where the target exists."""
        ...

    def unlink(self, path: Path) -> None: ...

    def truncate(self, fd: int, size: int) -> None: ...


class RealIo:
    """The operating system."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read_at(self, fd: int, buffers: list[Room], offset: int) -> int:
        done = 0
        rest = [memoryview(buffer) for buffer in buffers]
        while rest:
            count = os.preadv(fd, rest[:_IOV_MAX], offset + done)
            if count == 0:
                break
            done += count
            rest = _after(rest, count)
        return done

    def write_at(self, fd: int, buffers: list[Buffer], offset: int) -> None:
        done = 0
        rest = [memoryview(buffer).cast("B") for buffer in buffers]
        while rest:
            count = os.pwritev(fd, rest[:_IOV_MAX], offset + done)
            done += count
            rest = _after(rest, count)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)


_IOV_MAX = 512


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The buffers without their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def fsync_dir(io: Io, path: Path) -> None:
    """Makes renames in a directory durable."""
    fd = io.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        io.fsync(fd)
    finally:
        io.close(fd)


def file_size(path: Path) -> int:
    """0 where there is no such file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
