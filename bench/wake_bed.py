"""Sessions whose KV waits in a chosen place, and what waking them takes. Two engines: one with tiers, one without.

"No tier" is a process of its own that has no tiers at all: in an engine that has some, a session that lost its pages
would still be looked for in them, and the tiers would be compared with a baseline that they had made slower.

Per context and state a *keeper* session owns the prefix, under a salt of its own, so that equal tokens lie in
different places. Every wake is a session of its own that shares the keeper's pages and is dropped afterwards, so
that the prefix is computed once and not for every round.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.compiled import BenchError
from bench.evidence import Line
from bench.wake_hear import Heard, hear
from engine import EngineClient, KvReceipt
from engine.facts import PAGE_SIZE

PINNED, HOST, NVME, SHARED, NONE = "pinned", "host", "nvme", "shared", "none"
TIERS = (HOST, NVME, SHARED)
STATES = (PINNED, *TIERS, NONE)
RESULT_TOKENS, ANSWER_TOKENS = 64, 4
_IDS = (1_000, 40_000)  # no special tokens


def prefix_of(context: int, seed: int) -> list[int]:
    draw = random.Random(f"prefix {context} {seed}")
    return [draw.randrange(*_IDS) for _ in range(context)]


def result_of(prefix: Sequence[int], number: int) -> list[int]:
    """A tool result that repeats a piece of the prefix: what a model says next is what followed there, so an answer
    tells whether the prefix is the right one."""
    at = random.Random(f"result {len(prefix)} {number}").randrange(len(prefix) - RESULT_TOKENS - ANSWER_TOKENS)
    return list(prefix[at : at + RESULT_TOKENS])


@dataclass
class Bed:
    """The engines of one run. `flip` and `foreign` are sabotage."""

    tiered: EngineClient
    plain: EngineClient
    nvme: Path
    shared: Path
    flip: bool = False
    foreign: bool = False
    _numbers: dict[str, int] = field(default_factory=dict)

    # -- one wake -------------------------------------------------------------------------------------------------

    async def wake(self, context: int, number: int, state: str) -> Line:
        """One round of a state: where its pages were, both times, and the answer."""
        prefix = prefix_of(context, int(self.foreign and state == NVME))
        result = result_of(prefix_of(context, 0), number)
        taken = await (self._from_nothing if state == NONE else self._from_place)(state, prefix, result)
        return {"kind": "wake", "context": context, "round": number, "state": state, **taken}

    async def restored(self, context: int) -> tuple[int, float]:
        """Bytes and seconds of a prefix that comes back from NVMe."""
        prefix = prefix_of(context, int(self.foreign))
        await self._put(NVME, prefix)
        usable_s, receipt = await self._make_usable(NVME, prefix)
        return receipt.bytes, usable_s

    async def _from_nothing(self, state: str, prefix: list[int], result: list[int]) -> Line:
        """The prefix is computed; what one more token costs once it is there is taken off."""
        await self.plain.kv("drop", session=state, wait=True)
        cold_s = await self._compute(self.plain, state, prefix)
        warm_s = await self._compute(self.plain, state, prefix)
        await self.plain.kv("drop", session=state, wait=True)
        heard = await hear(self.plain, state, prefix + result, ANSWER_TOKENS, known=len(prefix))
        await self.plain.kv("drop", session=state, wait=True)
        return {"usable_s": cold_s - warm_s, "here": 0, **_told(heard)}

    async def _from_place(self, state: str, prefix: list[int], result: list[int]) -> Line:
        here = await self._put(state, prefix)
        usable_s, receipt = await self._make_usable(state, prefix)
        await self._put(state, prefix)
        session = await self._open(state, prefix)
        began = time.perf_counter()
        await self._intend("prefetch", session, state, prefix)  # as at a pause's end: it is queued, nobody waits for it
        asked_s = time.perf_counter() - began
        heard = await hear(self.tiered, session, prefix + result, ANSWER_TOKENS, salt=state.encode(), known=len(prefix))
        await self._intend("drop", session, state, wait=True)
        told = {"status": receipt.status, "pages": receipt.pages, "bytes": receipt.bytes, "ms": receipt.ms}
        return {"usable_s": usable_s, "here": here, "receipt": told, **_told(heard, asked_s)}

    async def _make_usable(self, state: str, prefix: list[int]) -> tuple[float, KvReceipt]:
        """Until the receipt; where pages are missing, until they are computed again."""
        session = await self._open(state, prefix)
        began = time.perf_counter()
        receipt = await self._intend("prefetch", session, state, prefix, wait=True)
        usable_s = time.perf_counter() - began
        if receipt.pages < _pages(prefix):
            usable_s += await self._compute(self.tiered, session, prefix, state)
        await self._intend("drop", session, state, wait=True)
        return usable_s, receipt

    async def _open(self, state: str, prefix: list[int]) -> str:
        """A session that comes back: the engine knows its transcript before the clock runs."""
        self._numbers[state] = self._numbers.get(state, 0) + 1
        session = f"{state}-{self._numbers[state]}"
        await self._intend("release", session, state, prefix)
        return session

    # -- places ---------------------------------------------------------------------------------------------------

    async def _put(self, state: str, prefix: list[int]) -> int:
        """Have the keeper's pages in one place alone, and cold there. Returns how many are."""
        here, _ = await self._here(state)
        if here < _pages(prefix):
            await self._compute(self.tiered, state, prefix, state)
            if state == PINNED:
                await self._intend("pin", state, state, wait=True)
            else:
                await self._intend("offload", state, state, tier=state, wait=True, evict=True)
            if state == NVME and self.flip:
                flip_bits(self.nvme)
        if state != PINNED:
            await self._intend("offload", state, state, tier=HOST, wait=True, evict=True)  # off the device
        for directory in (self.nvme, self.shared):
            forget_cached(directory)
        here, nearer = await self._here(state)
        if here < _pages(prefix) or nearer:
            raise BenchError(f"{here} of {_pages(prefix)} pages wait in {state}, and {nearer} on the device")
        return here

    async def _here(self, state: str) -> tuple[int, int]:
        """The keeper's pages for which its place is the nearest below the device, and how many the device has too."""
        known = await self.tiered.kv_state(state)
        if state == PINNED:
            return known.device_pages, 0
        below = {HOST: known.host_pages, NVME: known.nvme_pages, SHARED: known.shared_pages}
        return below[state], known.device_pages

    async def keys(self, state: str) -> list[bytes]:
        return [bytes.fromhex(key) for key in (await self.tiered.kv_state(state)).keys]

    async def clear(self) -> None:
        """The keepers go, before the next context comes."""
        for state in (PINNED, *TIERS):
            await self._intend("drop", state, state, wait=True)

    # -- the protocol ---------------------------------------------------------------------------------------------

    async def _intend(
        self, intent: str, session: str, state: str, prefix: list[int] | None = None, **options: Any
    ) -> KvReceipt:
        return await self.tiered.kv(intent, session=session, salt=state.encode(), token_ids=prefix, **options)

    async def _compute(self, client: EngineClient, session: str, tokens: list[int], salt: str = "") -> float:
        """One token over a prompt. Seconds until it came."""
        return (await hear(client, session, tokens, 1, salt=salt.encode())).first_token_s


def _pages(tokens: Sequence[int]) -> int:
    return -(-len(tokens) // PAGE_SIZE)


def _told(heard: Heard, asked_s: float = 0.0) -> Line:
    return {"first_token_s": asked_s + heard.first_token_s, "tokens": heard.tokens, "sources": heard.sources}


def forget_cached(directory: Path) -> None:
    """Ask the kernel to drop what the page cache has of these files; they are synced, so it can."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def flip_bits(directory: Path) -> None:
    """Sabotage: one bit in the middle of every segment."""
    for path in directory.rglob("*.seg"):
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
            file.flush()
            os.fsync(file.fileno())
