"""The C++ decoder: one call per step over a mixed batch of prefill and decode.

Bits depend on tokens and positions, on nothing else: every sum runs in one order whatever the number of rows, and
attention walks pages in position order. Decode steps are captured and replayed, with the same bits. The number of
threads changes no bit either, so the identity leaves it out.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from engine.backends.captured import CapturedStep, CapturedSteps, is_decode
from engine.backends.checks import check_tiles
from engine.backends.face import Logits, Tile, shared_out
from engine.backends.memory import pool_memory
from engine.backends.moves import Arrival, HostPages
from engine.errors import BackendUnavailable
from engine.facts import PAGE_SIZE, BackendIdentity, ModelFacts
from engine.native import Decoder, Library, StepArrays
from engine.quantised import GROUP, VERSION
from engine.rope import rope_table
from engine.weights import Weights

# A unit u is 4 bytes: two neighbouring bf16 or one fp32. K is [d/u][16] units and V is [16/u][d] units.
_PAGE_LAYOUT = "layer.kv.head.k:d_u.16.u,v:16_u.d.u"
_LANES = 16
_MAX_HEAD_SIZE = 256
Array = np.ndarray[Any, np.dtype[Any]]


def unsupported(facts: ModelFacts, dtype: str) -> str | None:
    """Why this backend cannot run a model, or None."""
    if facts.mla is not None:
        return "it does not run latent attention (MLA)"
    multiple = GROUP if dtype == "w4a8" else _LANES
    widths = {"hidden size": facts.hidden, "ffn size": facts.ffn, "head size": facts.head_size}
    for name, width in widths.items():
        if width % multiple:
            return f"it needs a {name} that is a multiple of {multiple} for {dtype}; this model has {width}"
    if facts.head_size > _MAX_HEAD_SIZE:
        return f"it runs head sizes up to {_MAX_HEAD_SIZE}; this model has {facts.head_size}"
    return None


class Cpu(HostPages):
    """A decoder over one pool of KV pages. See `engine.backends.face.Backend`.

    `isa` is one of INSTRUCTION_SETS; None: the best that the machine has. Raises BackendUnavailable for a shape that it
    does not run.
    """

    def __init__(
        self,
        facts: ModelFacts,
        weights: Weights,
        *,
        library: Library,
        pool_blocks: int,
        threads: int,
        isa: str | None = None,
    ) -> None:
        reason = unsupported(facts, weights.dtype)
        if reason is not None:
            raise BackendUnavailable(reason)
        chosen = isa or library.best_instruction_set
        self._facts = facts
        self._pool_blocks = pool_blocks
        # Readers hash what comes: where every core computes, they take from the step what they give it, and over many
        # pairs of restores neither way was the faster one.
        self.overlaps = threads < len(os.sched_getaffinity(0))
        self._identity = identity(weights.dtype, chosen, library.key)
        self._page_bytes = facts.page_bytes(weights.dtype)
        self._memory = pool_memory(pool_blocks * self._page_bytes)
        self._bytes = memoryview(self._memory)
        self._pool = np.frombuffer(self._memory, np.uint8)
        self._unit = 1 if weights.dtype == "fp32" else 2
        cos, sin = rope_table(facts)
        arrays = {**weights.arrays, "cos": cos, "sin": sin}
        self._decoder = Decoder(library, facts, weights.dtype, arrays, chosen, threads)
        self._captured = CapturedSteps(self._decoder, self._pool.ctypes.data, facts.vocab)

    @property
    def layers(self) -> int:
        return self._facts.layers

    @property
    def identity(self) -> BackendIdentity:
        return self._identity

    @property
    def replays(self) -> int:
        return self._captured.replays

    def page(self, block: int) -> memoryview:
        return self._bytes[block * self._page_bytes : (block + 1) * self._page_bytes]

    def zero(self, block: int) -> None:
        self._page_array(block)[:] = 0

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        page = self._page_array(target)
        page[:] = self._page_array(source)
        self._clear_from(page, rows)

    def snapshot(self, block: int, rows: int) -> bytes:
        if rows == PAGE_SIZE:
            return bytes(self.page(block))
        page = self._page_array(block).copy()
        self._clear_from(page, rows)
        return page.tobytes()

    def expect(self, blocks: Sequence[int]) -> Arrival:
        return LayerArrival(self._decoder.library, self._facts.layers)

    def forward(self, tiles: Sequence[Tile], arrival: Arrival | None = None) -> list[Logits | None]:
        check_tiles(tiles, self._facts, self._pool_blocks)
        landed = arrival.landed if isinstance(arrival, LayerArrival) else None
        if is_decode(tiles) and landed is None:
            pages = max(len(tile.blocks) for tile in tiles)
            return [*self._captured.for_rows(len(tiles), pages).replay(tiles)]
        step = self._step(tiles)
        self._decoder.run(self._pool.ctypes.data, step, landed)
        return shared_out(step.logits, tiles)

    def capture(self, batch: int) -> CapturedStep:
        return self._captured.for_rows(batch, 1)

    def _step(self, tiles: Sequence[Tile]) -> StepArrays:
        """The tiles as arrays."""
        counts = np.array([(len(tile.tokens), len(tile.blocks), tile.row) for tile in tiles], np.int32).reshape(-1, 3)
        rows, pages, page_rows = counts.T
        ends, block_ends = np.cumsum(rows), np.cumsum(pages)
        tokens = np.fromiter(chain.from_iterable(tile.tokens for tile in tiles), np.int32)
        blocks = np.fromiter(chain.from_iterable(tile.blocks for tile in tiles), np.int32)
        described = np.stack([ends - rows, rows, page_rows, pages, block_ends - pages], axis=1, dtype=np.int32)
        wanted = np.array(
            [row for tile, end in zip(tiles, ends, strict=True) for row in range(end - tile.logits_rows, end)], np.int32
        )
        logits = np.empty((len(wanted), self._facts.vocab), np.float32)
        return StepArrays(tokens, blocks, described, wanted, logits)

    def _page_array(self, block: int) -> Array:
        return self._pool[block * self._page_bytes : (block + 1) * self._page_bytes]

    def _clear_from(self, page: Array, row: int) -> None:
        """Zero the rows from `row` on of a page given as bytes."""
        facts, u = self._facts, self._unit
        elements = page.view(np.uint16 if u == 2 else np.uint32).reshape(facts.layers, 2, facts.kv_heads, -1)
        keys = elements[:, 0].reshape(facts.layers, facts.kv_heads, facts.head_size // u, PAGE_SIZE, u)
        values = elements[:, 1].reshape(facts.layers, facts.kv_heads, PAGE_SIZE // u, facts.head_size, u)
        assert np.shares_memory(keys, page)
        assert np.shares_memory(values, page)
        keys[:, :, :, row:] = 0
        for at in range(row, PAGE_SIZE):
            values[:, :, at // u, :, at % u] = 0


class LayerArrival:
    """See `Arrival`: a count that the decoder looks at before each layer."""

    def __init__(self, library: Library, layers: int) -> None:
        self._library, self._layers, self._lock = library, layers, threading.Lock()
        self.landed = np.zeros(1, np.int32)

    def land(self, layers: int) -> None:
        with self._lock:
            if self.landed[0] >= 0:
                self._library.land(self.landed, layers)

    def fail(self) -> None:
        with self._lock:
            if self.landed[0] < self._layers:
                self._library.land(self.landed, -1)


def identity(dtype: str, instruction_set: str, key: str) -> BackendIdentity:
    """What this backend would be called on this machine."""
    return BackendIdentity(
        backend="cpu",
        mode="exact",
        dtype=dtype,
        page_layout=_PAGE_LAYOUT,
        instruction_set=f"{platform.machine()}/{instruction_set}",
        threads=0,
        version=f"{key}.{VERSION}" if dtype == "w4a8" else key,
    )
