"""Decode steps that are recorded once and replayed: the CPU's form of a CUDA graph.

What a step of lone tokens needs is laid out once per bucket of batch sizes: the arrays that describe it, its logits,
the decoder's scratch and its list of jobs. A replay refills the arrays in place and runs the list. Rows are not padded:
how many are live is refilled too, so a bucket of 8 runs 5 rows as 5, and no page is written for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.backends.face import Logits, Tile
from engine.backends.groups import lone_tokens
from engine.native import Decoder, StepArrays

BUCKETS = (1, 2, 4, 8, 16, 32)  # rows; larger decode steps run as any other
_FIRST_PAGES = 64


class CapturedStep:
    """A decode step of up to `batch` rows, each with up to `pages` pages. See `engine.backends.face.CapturedStep`."""

    def __init__(self, decoder: Decoder, pool: int, vocab: int, batch: int, pages: int) -> None:
        self.batch = batch
        self.pages = pages
        rows = np.arange(batch, dtype=np.int32)
        self._tables = np.zeros((batch, pages), np.int32)
        # first token, rows, row within the page, pages, where the blocks begin
        tiles = np.stack([rows, rows * 0 + 1, rows * 0, rows * 0, rows * pages], axis=1, dtype=np.int32)
        logits = np.zeros((batch, vocab), np.float32)
        self.arrays = StepArrays(np.zeros(batch, np.int32), self._tables.reshape(-1), tiles, rows, logits)
        self._rows = list(logits)
        self._captured = decoder.capture(pool, self.arrays, pages)

    def replay(self, tiles: Sequence[Tile]) -> list[Logits]:
        for row, tile in enumerate(tiles):
            count = len(tile.blocks)
            self.arrays.tokens[row] = tile.tokens[0]
            self.arrays.tiles[row, 2:4] = tile.row, count
            self._tables[row, :count] = tile.blocks
        self._captured.replay(len(tiles))
        return self._rows[: len(tiles)]


class CapturedSteps:
    """The captured steps of one decoder, by bucket.

    A context that outgrows a bucket's block tables has it captured again with twice the pages; `captures` counts all,
    `replays` those that were there.
    """

    def __init__(self, decoder: Decoder, pool: int, vocab: int) -> None:
        self._decoder = decoder
        self._pool = pool
        self._vocab = vocab
        self._steps: dict[int, CapturedStep] = {}
        self.captures = self.replays = 0

    def for_rows(self, rows: int, pages: int) -> CapturedStep:
        """The step of the smallest bucket that holds so many rows, with room for so many pages each."""
        assert rows <= BUCKETS[-1]
        batch = next(bucket for bucket in BUCKETS if bucket >= rows)
        step = self._steps.get(batch)
        if step is None or step.pages < pages:
            room = step.pages if step else _FIRST_PAGES
            while room < pages:
                room *= 2
            step = self._steps[batch] = CapturedStep(self._decoder, self._pool, self._vocab, batch, room)
            self.captures += 1
        else:
            self.replays += 1
        return step


def is_decode(tiles: Sequence[Tile]) -> bool:
    """Whether a step is one that is captured."""
    return lone_tokens(tiles, BUCKETS[-1])
