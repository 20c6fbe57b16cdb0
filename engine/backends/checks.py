"""What every backend may take for granted about a step: a tile that is not so is a fault of ours."""

from __future__ import annotations

from collections.abc import Iterable

from engine.backends.face import Tile
from engine.facts import PAGE_SIZE, ModelFacts


def check_tiles(tiles: Iterable[Tile], facts: ModelFacts, pool_blocks: int) -> None:
    """Assert that rows are in their page, pages in the context and the pool, and tokens in the vocabulary."""
    pages = -(-facts.context // PAGE_SIZE)
    for tile in tiles:
        assert tile.tokens
        assert 0 <= tile.row <= PAGE_SIZE - len(tile.tokens)
        assert 1 <= len(tile.blocks) <= pages
        assert min(tile.tokens) >= 0
        assert max(tile.tokens) < facts.vocab
        assert min(tile.blocks) >= 0
        assert max(tile.blocks) < pool_blocks
