"""Attention of chunks of prompts over paged KV, the chunk's own keys already in their pages.

    q      [T, Hq, D]              all chunks, one after the other
    k, v   [blocks, Hkv, page, D]  as in `paged_decode`
    table  int32 [B, pages]        a row per sequence
    tiles  int32 [N, 4]            first row in q, rows (at most `tile_tokens`), position of the first one, row of table
    out    [T, Hq, D]              in q's dtype

A program takes a tile of queries of one KV head and goes over its whole context: in the splits of `paged_decode`,
merged in the same order by the same arithmetic. So a token's result has the same bits here, in a decode step, and in a
chunk of any other size: as long as the tiles compile to the same matrix instructions, which the compile gate looks at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import paged_decode
from engine.kernels.sample import Sample, Size
from engine.kernels.shapes import Paged, check_paged, poisoned, rows_of
from engine.kernels.softmax import LOG2_E, attend_split, join, settle
from engine.kernels.target import Config, pick


@dataclass(frozen=True)
class PrefillConfig(Config):
    """`rows`: queries times heads of a program, at most."""

    rows: int = 32


# Tiles of 64 rows and more are compiled to wgmma on sm_90 and to tcgen05 on sm_100: faster, other bits than decode.
CONFIGS: dict[tuple[str, object], PrefillConfig] = {
    ("interpreter", "*"): PrefillConfig(rows=64),
    ("gfx942", "*"): PrefillConfig(num_stages=1),
    ("*", 256): PrefillConfig(num_stages=1, num_warps=8),
    ("*", "*"): PrefillConfig(num_stages=2, num_warps=8),
}


@triton.jit
def _kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, tile_ptr, out_ptr,
    scale_log2, k_scale, v_scale, window,
    q_t, q_h, kv_block, kv_head, kv_row, table_b, out_t, out_h,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Grid (N, Hkv)."""
    tile = tile_ptr + tl.program_id(0) * 4
    first = tl.load(tile).to(tl.int64)
    count = tl.load(tile + 1)
    start_position = tl.load(tile + 2)
    b = tl.load(tile + 3).to(tl.int64)
    head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    token = row // GROUP
    live = token < count
    d = tl.arange(0, D)
    at_row = (first + token) * q_t + (head * GROUP + row % GROUP) * q_h
    q = tl.load(q_ptr + at_row[:, None] + d[None, :], mask=live[:, None], other=0.0)
    position = start_position + token
    length = start_position + count
    first_seen = tl.maximum(start_position - window + 1, 0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, D], tl.float32)
    for split in range(first_seen // SPLIT, tl.cdiv(length, SPLIT)):
        partial, lse = attend_split(
            q, k_ptr + head * kv_head, v_ptr + head * kv_head, table_ptr + b * table_b, kv_block, kv_row,
            position, window, first_seen, split, length, scale_log2, k_scale, v_scale,
            SPLIT=SPLIT, BLOCK_N=BLOCK_N, PAGE=PAGE, CAST=CAST,
        )  # fmt: skip
        peak, weight, merged = join(partial, lse, peak, weight, merged)
    result, _ = settle(peak, weight, merged)
    out_row = (first + token) * out_t + (head * GROUP + row % GROUP) * out_h
    tl.store(out_ptr + out_row[:, None] + d[None, :], result.to(out_ptr.dtype.element_ty), mask=live[:, None])


def tile_tokens(head_size: int, group: int) -> int:
    """The most queries that a tile takes on this arch, for `group` query heads per KV head."""
    return max(1, pick(CONFIGS, head_size).rows // group)


def paged_prefill(
    q: Tensor, kv: Paged, table: Tensor, tiles: Tensor, out: Tensor, *, scale: float, window: int = 0
) -> None:
    """See the module. Raises UnsupportedShape."""
    d = q.shape[-1]
    group = check_paged(q, kv)
    config, decode = pick(CONFIGS, d), pick(paged_decode.CONFIGS, d)
    _kernel[(tiles.shape[0], kv.k.shape[1])](
        q, kv.k, kv.v, table, tiles, out,
        scale * LOG2_E, kv.k_scale, kv.v_scale, window or 1 << 30,
        q.stride(0), q.stride(1), kv.k.stride(0), kv.k.stride(1), kv.k.stride(2), table.stride(0),
        out.stride(0), out.stride(1),
        GROUP=group, ROWS=rows_of(tile_tokens(d, group) * group), D=d, PAGE=kv.k.shape[2],
        SPLIT=decode.split, BLOCK_N=decode.block_n, CAST=kv.k.dtype != q.dtype,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip


def cut_tiles(chunks: list[tuple[int, int]], tokens: int) -> list[tuple[int, int, int, int]]:
    """Tiles of chunks given as (position of the first token, tokens), chunk i being row i of the table."""
    tiles, row = [], 0
    for b, (start, count) in enumerate(chunks):
        tiles += [(row + at, min(tokens, count - at), start + at, b) for at in range(0, count, tokens)]
        row += count
    return tiles


def meaning(
    q: Tensor, kv: Paged, table: Tensor, chunks: list[tuple[int, int]], *, scale: float, window: int = 0
) -> Tensor:
    """Float64 [T, Hq, D]: each chunk (position, tokens) as that many new tokens of its sequence."""
    parts, row = [], 0
    for b, (start, count) in enumerate(chunks):
        new = q[None, row : row + count]
        length = torch.tensor([start + count])
        parts.append(paged_decode.meaning(new, kv, table[b : b + 1], length, scale=scale, window=window)[0])
        row += count
    return torch.cat(parts)


def samples(size: Size) -> list[Sample]:
    """Chunks at the start and in the middle of a context, a single token among them; a window; e4m3 KV."""
    shapes = {"gqa": (4, 0, torch.bfloat16), "window": (4, 24, torch.bfloat16), "e4m3": (4, 0, torch.float8_e4m3fn)}
    d = 32 if size == "tiny" else 128
    made = [_sample(name, size, *shape, d) for name, shape in shapes.items()]
    if size == "real":
        others = {"group-7": (7, 64), "group-24": (24, 128), "heads-of-256": (4, 256)}
        made += [_sample(name, size, group, 0, torch.bfloat16, d) for name, (group, d) in others.items()]
    return made


def _sample(name: str, size: Size, group: int, window: int, dtype: torch.dtype, d: int) -> Sample:
    heads = 1 if size == "tiny" else 8
    chunks = [(0, 19), (37, 9), (50, 1)] if size == "tiny" else [(0, 200), (300, 77), (511, 1)]
    kv, table, length = poisoned([start + count for start, count in chunks], heads, d, 16, dtype)
    q = torch.randn(sum(count for _, count in chunks), heads * group, d).to(torch.bfloat16).to(length.device)
    out = torch.empty_like(q)
    tiles = torch.tensor(cut_tiles(chunks, tile_tokens(d, group)), dtype=torch.int32, device=q.device)

    def launch() -> None:
        paged_prefill(q, kv, table, tiles, out, scale=d**-0.5, window=window)

    def worst() -> float:
        launch()
        expected = meaning(q, kv, table, chunks, scale=d**-0.5, window=window)
        return float((out.cpu().double() - expected).abs().max())

    wants = {} if size == "tiny" else {
        "sm_80": ("mma.sync",), "sm_90": ("mma.sync",), "sm_100": ("mma.sync",), "gfx942": ("mfma",),
    }  # fmt: skip
    return Sample(name, launch, worst, 0.02, 0, wants)
