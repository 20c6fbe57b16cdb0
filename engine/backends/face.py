"""What a backend is. No torch here: the scheduler and the tests speak in these values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from engine.backends.moves import Arrival, MovesPages
from engine.facts import PAGE_SIZE, BackendIdentity
from engine.penalties import Tally
from engine.sampling import Sampling

Logits = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Tile:
    """Live rows of one 16-row page tile of one sequence.

    blocks:      pool blocks of pages 0..j; the tile is page j, the last of them
    row:         first live row; the token of row r has position 16*j + r
    tokens:      token ids of rows row..row+len(tokens)
    wants_logits: logits of the last live row are returned
    all_logits:  of every live row
    """

    blocks: tuple[int, ...]
    row: int
    tokens: tuple[int, ...]
    wants_logits: bool = False
    all_logits: bool = False

    @property
    def logits_rows(self) -> int:
        """How many rows of logits it wants: its last ones."""
        return len(self.tokens) if self.all_logits else int(self.wants_logits)


def cut(
    blocks: Sequence[int], start: int, tokens: Sequence[int], wants_logits: bool = True, all_logits: bool = False
) -> list[Tile]:
    """Tokens from position `start` on as tiles, cut at page boundaries; the last one wants logits, or none does, or all
    do of all their rows.

    blocks: pool blocks of the sequence's pages from the first one on
    """
    tiles: list[Tile] = []
    at, end = start, start + len(tokens)
    while at < end:
        page = at // PAGE_SIZE
        stop = min(end, (page + 1) * PAGE_SIZE)
        wanted = wants_logits and stop == end
        inside = tuple(tokens[at - start : stop - start])
        tiles.append(Tile(tuple(blocks[: page + 1]), at % PAGE_SIZE, inside, wanted and not all_logits, all_logits))
        at = stop
    return tiles


def shared_out(rows: Logits, tiles: Sequence[Tile]) -> list[Logits | None]:
    """What `Backend.forward` returns, of the rows [wanted, vocab] of a step, in the order of its tiles."""
    given: list[Logits | None] = []
    at = 0
    for tile in tiles:
        count = tile.logits_rows
        given.append(rows[at : at + count] if tile.all_logits else rows[at] if count else None)
        at += count
    return given


class Backend(MovesPages, Protocol):
    """Not thread-safe: one thread steps a backend. What a page's bytes mean is named by the identity's layout."""

    @property
    def identity(self) -> BackendIdentity: ...

    def forward(self, tiles: Sequence[Tile], arrival: Arrival | None = None) -> list[Logits | None]:
        """Run one step. Writes the K and V of every live row into its page, then attends.

        `arrival`: pages among the tiles' blocks are still coming; raises ArrivalFailed where they do not come, and the
        pages that the step writes are undefined then.

        Tiles of one sequence come in position order. Returns, per tile, fp32 logits [vocab] or None, and [rows, vocab]
        where all are wanted; they hold until the next step, which may write its own over them. A row's bits are the
        same whether it comes alone or beside others of its sequence.
        """
        ...

    def zero(self, block: int) -> None:
        """Zero a page before its first use, so that nothing of its former owner is left in it."""
        ...

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Make page `target` the first `rows` rows of page `source` and zeros after them."""
        ...

    def snapshot(self, block: int, rows: int) -> bytes:
        """A copy of the page's bytes in which rows from `rows` on are zero."""
        ...


@dataclass(frozen=True)
class Wish:
    """A draw from a row of logits, at a position of its transcript. `allowed`: bool [vocab], or None for all; `tally`:
    of the tokens before it, where they are penalised."""

    sampling: Sampling
    position: int
    allowed: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    tally: Tally | None = None


@runtime_checkable
class DrawsTokens(Protocol):
    """What a backend that samples where its logits are has besides `Backend`: none of them comes to the host."""

    def draw(self, tiles: Sequence[Tile], wishes: Sequence[Wish]) -> list[int]:
        """Run one step as `forward` does. Returns, for each row of logits that a tile wants, the token that
        `engine.sampler.sample` draws from it; -1 where none is possible."""
        ...

    def rows(self, wanted: Sequence[int]) -> list[Logits]:
        """Logits [vocab] of these rows of the last `draw`, on the host; they hold until the next step."""
        ...


@runtime_checkable
class CountsReplays(Protocol):
    """What a backend that captures decode steps has besides `Backend`."""

    @property
    def replays(self) -> int:
        """Steps that found what was recorded. One of lone tokens that did not was recorded, or ran as any other."""
        ...


class CapturedStep(Protocol):
    """A decode step recorded once and replayed, as a CUDA graph is: same kernels, same buffers, only contents change.

    A replay asks for no memory and dispatches what was recorded. Its bits are those of `Backend.forward`.
    """

    @property
    def batch(self) -> int:
        """The most rows that a replay takes."""
        ...

    def replay(self, tiles: Sequence[Tile]) -> list[Logits]:
        """Run a step of up to `batch` lone tokens. Returns logits [vocab] per tile, which hold until the next step."""
        ...


class CapturesSteps(Protocol):
    """What a backend that captures decode steps has besides `Backend`; its `forward` replays them by itself."""

    def capture(self, batch: int) -> CapturedStep:
        """The captured step for so many rows, captured first if need be: before the first request is the best time."""
        ...
