"""A step as the kernels take it: one buffer of int32 on the host, its copy on the device, and named views of both.

tokens, position, slot  [rows]      decoded tokens first, then those of chunks; slot -1 is a padding row
length                  [decodes]   tokens of the context of each decoded token, itself included
context                 [rows]      tokens that each row sees
sequence                [rows]      the row's table, -1 for padding
tables                  [sequences, pages]
tiles                   [tiles, 4]  of chunks; see `engine.kernels.paged_prefill`
wanted                  [wanted]    rows whose logits are asked for
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from engine.backends.face import Tile
from engine.backends.groups import by_sequence
from engine.facts import PAGE_SIZE


@dataclass(frozen=True)
class StepShape:
    rows: int
    decodes: int
    sequences: int
    pages: int
    tiles: int
    wanted: int

    def parts(self) -> dict[str, tuple[int, ...]]:
        rows = (self.rows,)
        return {
            "tokens": rows, "position": rows, "slot": rows, "length": (self.decodes,), "context": rows,
            "sequence": rows, "tables": (self.sequences, self.pages), "tiles": (self.tiles, 4),
            "wanted": (self.wanted,),
        }  # fmt: skip


@dataclass(frozen=True)
class StepTensors:
    """Views of one flat buffer; see the module."""

    tokens: Tensor
    position: Tensor
    slot: Tensor
    length: Tensor
    context: Tensor
    sequence: Tensor
    tables: Tensor
    tiles: Tensor
    wanted: Tensor

    @classmethod
    def of(cls, flat: Tensor, shape: StepShape) -> StepTensors:
        parts, at = {}, 0
        for name, part in shape.parts().items():
            size = math.prod(part)
            parts[name] = flat[at : at + size].view(part)
            at += size
        return cls(**parts)


class StepBuffer:
    """`on_host` is filled in place, `send` copies it to `on_device`, whose addresses never change."""

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        size = sum(math.prod(part) for part in shape.parts().values())
        self.shape = shape
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self.on_host = StepTensors.of(self._host, shape)
        self.on_device = StepTensors.of(self._device, shape)
        self._arrays = {part.name: getattr(self.on_host, part.name).numpy() for part in fields(StepTensors)}

    def send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)

    def fill_decodes(self, tiles: Sequence[Tile]) -> None:
        """Lone tokens, one a sequence; the rows behind them become padding, which writes nothing and sees nothing."""
        arrays, count = self._arrays, len(tiles)
        for row, tile in enumerate(tiles):
            self._fill_row(row, tile, 0, row)
            arrays["tables"][row, : len(tile.blocks)] = tile.blocks
        for name, idle in (
            ("tokens", 0),
            ("position", 0),
            ("slot", -1),
            ("length", 0),
            ("context", 0),
            ("sequence", -1),
        ):
            arrays[name][count:] = idle
        arrays["length"][:count] = arrays["context"][:count]

    def _fill_row(self, row: int, tile: Tile, at: int, table: int) -> None:
        arrays, in_page = self._arrays, tile.row + at
        position = (len(tile.blocks) - 1) * PAGE_SIZE + in_page
        arrays["tokens"][row] = tile.tokens[at]
        arrays["position"][row] = position
        arrays["slot"][row] = tile.blocks[-1] * PAGE_SIZE + in_page
        arrays["context"][row] = position + 1
        arrays["sequence"][row] = table

    def fill(self, layout: Layout, tiles: Sequence[Tile]) -> None:
        """Any step, laid out by `lay_out`."""
        arrays = self._arrays
        for table, group in enumerate(layout.groups):
            blocks = tiles[group[-1]].blocks
            arrays["tables"][table, : len(blocks)] = blocks
            for index in group:
                for at in range(len(tiles[index].tokens)):
                    self._fill_row(layout.first_row[index] + at, tiles[index], at, table)
        arrays["length"][:] = arrays["context"][: self.shape.decodes]
        if layout.tiles:
            arrays["tiles"][:] = layout.tiles
        arrays["wanted"][:] = layout.wanted


@dataclass(frozen=True)
class Layout:
    """groups: tiles by sequence, decodes first; first_row: of each tile; wanted: rows, in the order of tiles."""

    shape: StepShape
    groups: list[list[int]]
    first_row: dict[int, int]
    tiles: list[tuple[int, int, int, int]]
    wanted: list[int]


def lay_out(tiles: Sequence[Tile], tile_tokens: int) -> Layout:
    """Where everything of a step goes. `tile_tokens`: the most queries that a program of prefill takes."""
    groups = by_sequence(tiles)
    decodes = [group for group in groups if len(group) == 1 and len(tiles[group[0]].tokens) == 1]
    chunks = [group for group in groups if not (len(group) == 1 and len(tiles[group[0]].tokens) == 1)]
    first_row: dict[int, int] = {}
    cuts: list[tuple[int, int, int, int]] = []
    row = 0
    for table, group in enumerate([*decodes, *chunks]):
        for index in group:
            first_row[index] = row
            tile = tiles[index]
            position = (len(tile.blocks) - 1) * PAGE_SIZE + tile.row
            if table >= len(decodes):
                cuts += [
                    (row + at, min(tile_tokens, len(tile.tokens) - at), position + at, table)
                    for at in range(0, len(tile.tokens), tile_tokens)
                ]
            row += len(tile.tokens)
    ends = [first_row[i] + len(tile.tokens) for i, tile in enumerate(tiles)]
    wanted = [row for end, tile in zip(ends, tiles, strict=True) for row in range(end - tile.logits_rows, end)]
    pages = max(len(tile.blocks) for tile in tiles)
    shape = StepShape(row, len(decodes), len(groups), pages, len(cuts), len(wanted))
    return Layout(shape, [*decodes, *chunks], first_row, cuts, wanted)


__all__ = ["Layout", "StepBuffer", "StepShape", "StepTensors", "lay_out"]
