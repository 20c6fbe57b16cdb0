"""One lock over the store of snapshots, for all nodes of a machine: many may write, one may delete.

A writer holds it from a snapshot's first blob until the record names its root. Files are locked, not values, since the
nodes are processes; the kernel lets go of what a killed one held. Whoever waits to delete stands in a turnstile that
writers pass as well, so that writers who come one after the other do not keep it out.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from runtime.errors import Unavailable

PATIENCE_S: Final = 60.0  # a node that is stopped in the middle keeps what it holds
_PAUSE_S: Final = 0.005


class BlobLock:
    """`async with lock` to write, `async with lock.deleting()` to delete; both raise Unavailable after PATIENCE_S."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing: list[int] = []  # one for every writer; which of them goes first makes no difference

    async def __aenter__(self) -> None:
        async with self._held(".gate", fcntl.LOCK_EX):
            self._writing.append(await self._take("", fcntl.LOCK_SH))

    async def __aexit__(self, *exc: object) -> None:
        os.close(self._writing.pop())

    @contextlib.asynccontextmanager
    async def deleting(self) -> AsyncIterator[None]:
        async with self._held(".gate", fcntl.LOCK_EX), self._held("", fcntl.LOCK_EX):
            yield

    @contextlib.asynccontextmanager
    async def _held(self, suffix: str, how: int) -> AsyncIterator[None]:
        fd = await self._take(suffix, how)
        try:
            yield
        finally:
            os.close(fd)

    async def _take(self, suffix: str, how: int) -> int:
        """An open file that holds the lock until it is closed. Not in a thread: one that waits cannot be cancelled."""
        fd = os.open(f"{self._path}{suffix}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + PATIENCE_S
        try:
            while True:
                try:
                    fcntl.flock(fd, how | fcntl.LOCK_NB)
                    return fd
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise Unavailable("the store of snapshots is held by a process that does not go on") from None
                await asyncio.sleep(_PAUSE_S)
        except BaseException:
            os.close(fd)
            raise
