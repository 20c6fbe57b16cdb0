"""Pages on their way to a tier: snapshots between steps, written in the background. Runs on the compute thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.backends.moves import Copied, Moved
from engine.lanes import Lanes
from engine.pages import PagePool
from kvtier import Receipt, Tier, TierStack

SLICE_PAGES = 16
STAGED_LIMIT_BYTES = 256 * 1024 * 1024

Landed = Callable[[int, int], None]  # pages that the tier now has, bytes written


@dataclass(frozen=True)
class Staged:
    """A copy of a page that waits to be written; it holds once `ready` is done."""

    page: bytes | memoryview
    ready: Moved


@dataclass
class CopyJob:
    """`waiting` pages are not yet snapshotted; `flying` slices are in the lane."""

    waiting: deque[bytes]
    tier: Tier
    epoch: int
    salt_id: bytes
    session: str
    then: Landed
    flying: int = 0
    stored: int = 0
    bytes: int = 0
    ended: bool = False


class Copies:
    """A queue of copy jobs, taken a slice at a time, with a bound on the bytes that wait to be written."""

    def __init__(
        self,
        pool: PagePool,
        stack: TierStack,
        lanes: Lanes,
        page_bytes: int,
        gather: Callable[[Sequence[tuple[int, bytes]]], Copied],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._stack = stack
        self._lanes = lanes
        self._page_bytes = page_bytes
        self._clock = clock
        self._gather = gather  # (block, key) of pages -> their bytes
        self._jobs: deque[CopyJob] = deque()
        self.staged: dict[bytes, Staged] = {}  # pages that are being written: no tier has them yet
        self._staged_bytes = 0
        self.stored_pages = 0
        self.written_s = 0.0  # how long tiers took to take what was sent

    @property
    def full(self) -> bool:
        """Whether so much waits to be written that nothing more may be snapshotted."""
        return self._staged_bytes > STAGED_LIMIT_BYTES

    @property
    def waits(self) -> bool:
        """Whether somebody waits for copies."""
        return bool(self._jobs) or self._staged_bytes > 0

    @property
    def ready(self) -> bool:
        """Whether `pump` has something to do now."""
        return bool(self._jobs) and not self.full

    def add(self, keys: Sequence[bytes], tier: Tier, *, epoch: int, salt_id: bytes, session: str, then: Landed) -> int:
        """Queue copies of those pages that are on the device and dirty.

        Returns how many; `then` comes when all are stored, or could not be.
        """
        pool = self._pool
        dirty = deque(key for key in keys if pool.find(key) is not None and not pool.is_clean(key))
        count = len(dirty)
        self._jobs.append(CopyJob(dirty, tier, epoch, salt_id, session, then))
        return count

    def cancel(self, session: str) -> None:
        """Whatever of this session is not yet snapshotted stays where it is."""
        for job in self._jobs:
            if job.session == session:
                job.waiting.clear()

    def pump(self) -> None:
        """Snapshot one slice and send it off."""
        while self._jobs and not self._jobs[0].waiting:
            self._finish(self._jobs.popleft())
        if not self.ready:
            return
        job = self._jobs[0]
        pages: list[tuple[int, bytes]] = []
        while job.waiting and len(pages) < SLICE_PAGES:
            key = job.waiting.popleft()
            block = self._pool.find(key)
            if block is not None and not self._pool.is_clean(key):
                pages.append((block, key))
        if pages:
            job.flying += 1
            copied = self._gather(pages)
            keys = [key for _, key in pages]
            self.send(
                keys, copied, job.tier, job.epoch, job.salt_id, lambda present, size: self._landed(job, present, size)
            )

    def send(self, keys: Sequence[bytes], copied: Copied, tier: Tier, epoch: int, salt_id: bytes, then: Landed) -> None:
        """Write copies in the background; pages that the tier then has are clean."""
        size = len(keys) * self._page_bytes
        self._staged_bytes += size
        pages = list(zip(keys, copied.pages, strict=True))
        mine = {key: Staged(page, copied.ready) for key, page in pages}
        self.staged |= mine
        stack = self._stack

        def write() -> tuple[Receipt, list[Tier | None], float]:
            copied.ready.wait()
            began_s = self._clock()
            receipt = stack.put(pages, epoch=epoch, salt_id=salt_id, tier=tier)
            return receipt, stack.lookup(keys), self._clock() - began_s

        def done(result: tuple[Receipt, list[Tier | None], float] | None) -> None:
            self._staged_bytes -= size
            self.written_s += result[2] if result else 0
            for key, staged in mine.items():
                if self.staged.get(key) is staged:
                    del self.staged[key]
            places: list[Tier | None] = result[1] if result else [None] * len(keys)
            stored = [key for key, place in zip(keys, places, strict=True) if place is not None]
            for key, place in zip(keys, places, strict=True):
                self._pool.mark(key, clean=place is not None)  # one that was read back meanwhile may be the only copy
            self.stored_pages += len(stored)
            then(len(stored), result[0].bytes if result else 0)

        self._lanes.write(write, done, shared=tier is Tier.SHARED)

    def _landed(self, job: CopyJob, present: int, size: int) -> None:
        job.flying -= 1
        job.stored += present
        job.bytes += size
        if not job.waiting:
            self._finish(job)

    def _finish(self, job: CopyJob) -> None:
        if job.flying == 0 and not job.ended:
            job.ended = True
            job.then(job.stored, job.bytes)
