"""Which tiles of a step belong together. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from engine.backends.face import Tile


def by_sequence(tiles: Sequence[Tile]) -> list[list[int]]:
    """Indices of tiles, those of one sequence together: a later tile's blocks begin with an earlier one's."""
    groups: list[list[int]] = []
    for at, tile in enumerate(tiles):
        last = tiles[groups[-1][-1]].blocks if groups else ()
        if last and tile.blocks[: len(last)] == last and len(tile.blocks) > len(last):
            groups[-1].append(at)
        else:
            groups.append([at])
    return groups


def lone_tokens(tiles: Sequence[Tile], most: int) -> bool:
    """Whether a step is a lone token of each of at most so many sequences, logits of all wanted: it is captured."""
    return len(tiles) <= most and all(tile.wants_logits and len(tile.tokens) == 1 for tile in tiles)
