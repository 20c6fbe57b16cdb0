"""Sabotage: an engine in which each read of a segment takes as long as on a disk of 5 MB/s. Options as of `engine`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import engine.launch
from engine.__main__ import main
from kvtier import RealIo, TierStack
from kvtier.fileops import Room

BYTES_PER_S = 5e6


class SlowIo(RealIo):
    """The operating system, but for segments."""

    def __init__(self) -> None:
        self._segments: set[int] = set()

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        if path.suffix == ".seg":
            self._segments.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._segments.discard(fd)
        super().close(fd)

    def read_at(self, fd: int, buffers: list[Room], offset: int) -> int:
        count = super().read_at(fd, buffers, offset)
        if fd in self._segments:
            time.sleep(count / BYTES_PER_S)
        return count


class SlowStack(TierStack):
    """As TierStack, over SlowIo."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **{**options, "io": SlowIo()})


if __name__ == "__main__":
    vars(engine.launch)["TierStack"] = SlowStack
    sys.exit(main())
