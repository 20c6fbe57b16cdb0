"""A backend whose pages can be read, and an engine core around it: a wrong page gives a wrong token."""

from __future__ import annotations

import hashlib
import queue
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.backends.face import Logits, Tile
from engine.backends.moves import Arrival, HostPages, WholeArrival
from engine.core import EngineCore
from engine.errors import EngineError
from engine.facts import PAGE_SIZE, BackendIdentity
from engine.intents import Intents
from engine.kvcall import parse_kv
from engine.lanes import Lanes
from engine.live import Guides
from engine.pages import PagePool
from engine.reports import Reports
from engine.request import Limits, parse_generate
from engine.scheduler import Budget, Scheduler
from engine.store import KvStore
from kvtier import TierConfig, TierStack

VOCAB, EOS = 64, 63
ROW_BYTES = 8
PAGE_BYTES = PAGE_SIZE * ROW_BYTES
FINGERPRINT = b"f" * 32


def oracle_logits(tokens: Sequence[int]) -> Logits:
    """What the fake model says after these tokens, from the tokens alone."""
    digest = hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens)).digest()
    logits = np.random.default_rng(list(digest)).standard_normal(VOCAB).astype(np.float32)
    logits[EOS] = -100.0
    return logits


def oracle(tokens: Sequence[int], count: int) -> list[int]:
    """The fake model's greedy continuation."""
    grown = list(tokens)
    for _ in range(count):
        grown.append(int(np.argmax(oracle_logits(grown))))
    return grown[len(tokens) :]


class FakeBackend(HostPages):
    """A page row holds the token and its position; the answer is a function of all rows that the block table names."""

    layers = 1
    identity = BackendIdentity("fake", "exact", "bf16", "row", "none", 1, "1")

    def __init__(self, blocks: int) -> None:
        self._memory = bytearray(blocks * PAGE_BYTES)
        self.steps: list[int] = []

    def page(self, block: int) -> memoryview:
        return memoryview(self._memory)[block * PAGE_BYTES : (block + 1) * PAGE_BYTES]

    def zero(self, block: int) -> None:
        self.page(block)[:] = bytes(PAGE_BYTES)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        self.page(target)[:] = self.snapshot(source, rows)

    def snapshot(self, block: int, rows: int) -> bytes:
        return bytes(self.page(block)[: rows * ROW_BYTES]) + bytes((PAGE_SIZE - rows) * ROW_BYTES)

    def expect(self, blocks: Sequence[int]) -> Arrival:
        return WholeArrival(1)

    def forward(self, tiles: Sequence[Tile], arrival: Arrival | None = None) -> list[Logits | None]:
        if isinstance(arrival, WholeArrival):
            arrival.wait()
        self.steps.append(len(tiles))
        return [self._run(tile) for tile in tiles]

    def _run(self, tile: Tile) -> Logits | None:
        start = (len(tile.blocks) - 1) * PAGE_SIZE + tile.row
        for index, token in enumerate(tile.tokens):
            row = (tile.row + index) * ROW_BYTES
            self.page(tile.blocks[-1])[row : row + ROW_BYTES] = struct.pack("<ii", token, start + index + 1)
        if tile.all_logits:
            ends = range(start + 1, start + len(tile.tokens) + 1)
            return np.stack([self._answer(self._context(tile.blocks, end)) for end in ends])
        if not tile.wants_logits:
            return None
        return self._answer(self._context(tile.blocks, start + len(tile.tokens)))

    def _answer(self, context: Sequence[int]) -> Logits:
        return oracle_logits(context)

    def _context(self, blocks: Sequence[int], length: int) -> list[int]:
        tokens = []
        for position in range(length):
            row = position % PAGE_SIZE * ROW_BYTES
            token, mark = struct.unpack("<ii", self.page(blocks[position // PAGE_SIZE])[row : row + ROW_BYTES])
            tokens.append(token if mark == position + 1 else -1)  # a row of another position is a wrong page
        return tokens


class Harness:
    """An engine core without sockets; calls return what a client would see."""

    def __init__(
        self,
        root: Path | None,
        *,
        blocks: int = 32,
        host_pages: int = 64,
        nvme_pages: int = 64,
        budget: Budget = Budget(),  # noqa: B008 (frozen)
    ) -> None:
        self.backend = FakeBackend(blocks)
        self.stack = None if root is None else TierStack.open(_tiers(root, host_pages, nvme_pages))
        inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.lanes = Lanes(inbox.put)
        self.store = KvStore(self.backend, PagePool(blocks), self.stack, self.lanes, FINGERPRINT, PAGE_BYTES)
        limits = Limits(context=4096, vocab=VOCAB, pool_tokens=blocks * PAGE_SIZE)
        scheduler = Scheduler(self.store.pool, budget)
        self.core = EngineCore(self.backend, self.store, scheduler, limits, (EOS,), inbox)
        self.intents = Intents(self.core)
        self.reports = Reports(self.core)
        self._names = iter(range(1 << 30))
        self.core.start()

    def close(self) -> None:
        self.core.stop()
        self.lanes.close()
        if self.stack is not None:
            self.stack.close()
        if self.core.fault is not None:
            raise AssertionError("the compute thread failed") from self.core.fault

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self, session: str, tokens: Sequence[int], count: int, cancel_after: int = 0, **fields: Any
    ) -> Generation:
        """Begin a generation; with `cancel_after`, it is cancelled between that token's step and the next."""
        name = f"q{next(self._names)}"
        message = {"request_id": name, "session": session, "token_ids": list(tokens), "max_tokens": count, **fields}
        spec = parse_generate(message)
        generation = Generation(spec.request_id)
        heard = 0

        def sink(frame: dict[str, Any]) -> None:
            nonlocal heard
            heard += frame["type"] == "tokens"
            if heard == cancel_after and frame["type"] == "tokens":
                self.cancel(generation)
            generation.frames.put(frame)

        def submit() -> None:
            try:
                self.core.submit(spec, Guides(), sink)
            except EngineError as error:
                generation.frames.put({"type": "error", "code": getattr(error, "code", ""), "message": str(error)})

        self.core.post(submit)
        return generation

    def hold(self) -> threading.Event:
        """What is sent from here on is taken up together, once the event is set."""
        go = threading.Event()
        self.core.post(go.wait)
        return go

    def generate(self, session: str, tokens: Sequence[int], count: int, **fields: Any) -> Generation:
        return self.start(session, tokens, count, **fields).finish()

    def cancel(self, generation: Generation) -> None:
        self.core.post(lambda: self.core.cancel(generation.request_id))

    def kv(self, intent: str, session: str, **fields: Any) -> dict[str, Any]:
        """The receipt; `wait` is on unless given."""
        call = parse_kv({"intent": intent, "session": session, "wait": True, **fields})
        return self._ask(lambda reply: self.intents.handle(call, reply))

    def state(self, session: str) -> dict[str, Any]:
        return self._ask(lambda reply: self.reports.state(session, reply))

    def stats(self) -> dict[str, Any]:
        return self._ask(self.reports.stats)

    def delete_keys(self, keys: list[bytes]) -> dict[str, Any]:
        return self._ask(lambda reply: self.reports.delete_keys(keys, reply))

    def _ask(self, command: Callable[[Callable[[dict[str, Any]], None]], None]) -> dict[str, Any]:
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

        def run() -> None:
            try:
                command(answers.put)
            except EngineError as error:
                answers.put({"status": "error", "code": getattr(error, "code", ""), "detail": str(error)})

        self.core.post(run)
        return answers.get(timeout=60)


class Generation:
    """Frames of one generation."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.frames: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.tokens: list[int] = []
        self.prefill: dict[str, Any] = {}
        self.swaps: list[dict[str, Any]] = []
        self.end: dict[str, Any] = {}

    def next(self) -> dict[str, Any]:
        frame = self.frames.get(timeout=60)
        if frame["type"] == "tokens":
            self.tokens += frame["ids"]
        elif frame["type"] == "prefill":
            self.prefill = frame
        elif frame["type"] in ("preempted", "resumed"):
            self.swaps.append(frame)
        else:
            self.end = frame
        return frame

    def finish(self) -> Generation:
        while not self.end:
            self.next()
        return self


def _tiers(root: Path, host_pages: int, nvme_pages: int) -> TierConfig:
    room = 4096
    return TierConfig(
        page_bytes=PAGE_BYTES,
        fingerprint=FINGERPRINT,
        host_path=root / "arena" if host_pages else None,
        host_bytes=host_pages * (PAGE_BYTES + room) + room if host_pages else 0,
        nvme_dir=root / "nvme",
        nvme_bytes=nvme_pages * (PAGE_BYTES + room),
    )
