"""Weights in groups of 32 inputs, each code * scale + minimum, and the panels that the C++ decoder multiplies by.

Codes of a model file are kept where its groups are ours too: Q4_0, Q4_1 and Q4_K in 4 bits, Q5_0 and Q8_0 in 8. All
others are quantised to 8 bits here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import ModelError
from engine.gguf import GgufFile

VERSION = 2  # of what this file makes of a model file; cached weights and KV pages of other versions are not used
GROUP = 32
PANEL = 32  # outputs that are packed together
WIDE_SCALES, WIDE_CODES = 1, 2  # bits of a panel's kind: scales in fp32 instead of fp16, codes of 8 bits instead of 4
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Groups:
    """Weight = code * scale + minimum. codes: uint8 [rows, groups, 32]; scale and minimum: fp32 [rows, groups]."""

    codes: Array
    scale: Array
    minimum: Array
    bits: int

    def rows(self, order: Array) -> Groups:
        """The rows in another order."""
        return Groups(self.codes[order], self.scale[order], self.minimum[order], self.bits)

    def values(self) -> Array:
        """fp32 [rows, inputs]."""
        values: Array = self.codes * self.scale[..., None] + self.minimum[..., None]
        return values.reshape(len(values), -1)

    @property
    def kind(self) -> int:
        """The kind of a panel that holds these and nothing else."""
        narrow = all(np.array_equal(_halves(x).astype(np.float32), x) for x in (self.scale, self.minimum))
        return (0 if narrow else WIDE_SCALES) | (WIDE_CODES if self.bits == 8 else 0)


def read_groups(file: GgufFile, name: str) -> Groups:
    """A matrix of a file. Raises ModelError where its rows are no whole number of groups."""
    info = file.tensors[name]
    read = _READERS.get(info.quant_name)
    if read is None or info.shape[-1] % GROUP:
        return grouped(name, file.tensor(name))
    return read(file.blocks(name))


def grouped(name: str, values: Array) -> Groups:
    """A matrix in fp32, quantised. Raises ModelError where its rows are no whole number of groups."""
    if values.shape[-1] % GROUP:
        raise ModelError(f"w4a8 takes inputs in groups of {GROUP}; {name!r} has rows of {values.shape[-1]}; use bf16")
    return quantise(values)


def quantise(values: Array) -> Groups:
    """fp32 [rows, inputs] in 8 bits: 255 steps from the least value of a group to the greatest."""
    grouped = values.reshape(len(values), -1, GROUP)
    least, greatest = grouped.min(axis=2), grouped.max(axis=2)
    scale = ((greatest - least) / np.float32(255)).astype(np.float32)
    steps = np.divide(
        grouped - least[..., None], scale[..., None], out=np.zeros_like(grouped), where=scale[..., None] > 0
    )
    return Groups(np.rint(steps).clip(0, 255).astype(np.uint8), scale, least, 8)


def pack(parts: Sequence[Groups], gated: bool = False) -> tuple[Array, Array]:
    """Matrices of the same inputs, one below the other, as panels: their bytes, back to back, and the kind of each.

    A panel is [groups] blocks; a block is [bits][32] units of codes, 32 scales, 32 minimums: see native/grouped.inl. A
    panel that holds rows of several kinds has the least kind that holds them all. `gated`: each panel holds 16 rows of
    the upper half and the 16 of the lower half that belong to them. Missing rows are zeros.
    """
    rows = np.concatenate([np.full(len(part.codes), part.kind, np.uint8) for part in parts])
    order = _panel_rows(len(rows), gated)
    kinds = np.bitwise_or.reduce(np.append(rows, np.uint8(0))[order], axis=1)
    codes, scale, minimum = (
        _with_zero_row([getattr(part, name) for part in parts]) for name in ("codes", "scale", "minimum")
    )
    whole = Groups(codes, scale, minimum, bits=8)
    panels = [_blocks(whole.rows(order[at]), int(kinds[at])) for at in range(len(order))]
    return np.concatenate(panels), kinds


def _panel_rows(rows: int, gated: bool) -> Array:
    """[panels, 32] row numbers; `rows` stands for a row that is missing."""
    if gated:
        halves = np.arange(rows).reshape(2, -1, PANEL // 2)
        return halves.swapaxes(0, 1).reshape(-1, PANEL)
    panels = -(-rows // PANEL)
    return np.minimum(np.arange(panels * PANEL), rows).reshape(panels, PANEL)


def _with_zero_row(arrays: list[Array]) -> Array:
    return np.concatenate([*arrays, np.zeros_like(arrays[0][:1])])


def _blocks(panel: Groups, kind: int) -> Array:
    """The bytes of one panel, flat."""
    groups = panel.codes.shape[1]
    if kind & WIDE_CODES:
        codes = panel.codes.reshape(PANEL, groups, 8, 4)
    else:
        halves = panel.codes.reshape(PANEL, groups, 4, 2, 4)
        codes = halves[:, :, :, 0] | halves[:, :, :, 1] << 4
    units = codes.transpose(1, 2, 0, 3).reshape(groups, -1)  # [groups, bits * 32 * 4] bytes
    scales = np.concatenate([panel.scale.T, panel.minimum.T], axis=1)  # [groups, 64]
    stored = np.ascontiguousarray(scales if kind & WIDE_SCALES else _halves(scales)).view(np.uint8)
    return np.concatenate([units, stored], axis=1).reshape(-1)


def _halves(values: Array) -> Array:
    with np.errstate(over="ignore"):  # too great for fp16 is infinite there, and so not equal
        return values.astype(np.float16)


# -- the blocks of GGUF files, each uint8 [rows, blocks, bytes of a block] --------------------------------------------


def _read_q4_0(blocks: Array) -> Groups:
    scale = _half_at(blocks, 0)
    return Groups(_nibbles(blocks[..., 2:]), scale, scale * np.float32(-8), 4)


def _read_q4_1(blocks: Array) -> Groups:
    return Groups(_nibbles(blocks[..., 4:]), _half_at(blocks, 0), _half_at(blocks, 2), 4)


def _read_q5_0(blocks: Array) -> Groups:
    scale = _half_at(blocks, 0)
    high = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    return Groups(_nibbles(blocks[..., 6:]) | high << 4, scale, scale * np.float32(-16), 8)


def _read_q8_0(blocks: Array) -> Groups:
    scale = _half_at(blocks, 0)
    return Groups(blocks[..., 2:] ^ 128, scale, scale * np.float32(-128), 8)  # int8 + 128


def _read_q4_k(blocks: Array) -> Groups:
    """Eight groups to a block; 6 bits for the scale and for the minimum of each, in units of the block's own."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minimums = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    pairs = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, GROUP)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-2).reshape(len(blocks), -1, GROUP)
    scale = _half_at(blocks, 0)[..., None] * scales.astype(np.float32)
    minimum = _half_at(blocks, 2)[..., None] * -minimums.astype(np.float32)
    return Groups(codes, scale.reshape(len(blocks), -1), minimum.reshape(len(blocks), -1), 4)


def _half_at(blocks: Array, at: int) -> Array:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(packed: Array) -> Array:
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


_READERS: dict[str, Callable[[Array], Groups]] = {
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q4_K": _read_q4_k,
    "Q5_0": _read_q5_0,
    "Q8_0": _read_q8_0,
}
