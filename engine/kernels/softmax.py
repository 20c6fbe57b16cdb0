"""Softmax in pieces: the arithmetic that decode, prefill and merge share, so that they round alike.

Two levels. Within a split of the KV dimension a running softmax goes over tiles of keys (`attend_split`). A finished
split is a normalised partial result with its log-sum-exp, base 2, minus infinity where it saw nothing (`finish`).
Splits are merged one after the other in position order (`join`), in fp32: Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018; Dao et al., "Flash-Decoding", 2023.

A tile or a split of which a row sees nothing leaves its state as it is, bit for bit: so rows with different contexts
can share a program. Launch with `enable_fp_fusion=False`, or two kernels may contract the same products differently.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def attend(q, k, v, seen, scale_log2, top, total, mixed):
    """One tile of keys: q [M, D], k and v [N, D], seen [M, N] -> the state (top [M], total [M], mixed [M, D])."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - safe[:, None])
    kept = tl.exp2(top - safe)
    taken = weights.to(v.dtype)  # what is summed is what the values are weighted by
    total = total * kept + _row_sums(taken)
    mixed = mixed * kept[:, None] + tl.dot(taken, v, input_precision="ieee")
    return new_top, total, mixed


@triton.jit
def _row_sums(x):
    """Of x [M, N], fp32 [M]. A product sums along N in one order; a reduction's order follows from how the tile lies in
    the warps, which is another one for a tile with more rows."""
    first = (tl.arange(0, 16)[None, :] == 0) & (tl.arange(0, x.shape[1])[:, None] >= 0)  # [N, 16]
    return tl.sum(tl.dot(x, first.to(x.dtype), input_precision="ieee"), 1)  # of one number and zeros


@triton.jit
def attend_split(
    q, k_ptr, v_ptr, table_ptr, kv_block, kv_row, position, window, first_seen, split, length,
    scale_log2, k_scale, v_scale, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """One split of a context: q [M, D] at `position` [M] -> (partial [M, D], lse [M]). The pointers are of one KV
    head's first row and of one sequence's table; no row sees a token before `first_seen`, or at `length` and beyond."""
    ROWS: tl.constexpr = q.shape[0]
    D: tl.constexpr = q.shape[1]
    d = tl.arange(0, D)
    n = tl.arange(0, BLOCK_N)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D], tl.float32)
    low = tl.maximum(split * SPLIT, first_seen // BLOCK_N * BLOCK_N)
    for start in range(low, tl.minimum((split + 1) * SPLIT, length), BLOCK_N):
        at = start + n
        there = at < length
        block = tl.load(table_ptr + at // PAGE, mask=there, other=0).to(tl.int64)
        offset = block * kv_block + (at % PAGE) * kv_row
        k = tl.load(k_ptr + offset[:, None] + d[None, :], mask=there[:, None], other=0.0)
        v = tl.load(v_ptr + offset[:, None] + d[None, :], mask=there[:, None], other=0.0)
        if CAST:
            k = k.to(q.dtype)
            v = v.to(q.dtype)
        seen = there[None, :] & (at[None, :] <= position[:, None]) & (at[None, :] > (position - window)[:, None])
        top, total, mixed = attend(q, k, v, seen, scale_log2 * k_scale, top, total, mixed)
    return finish(top, total, mixed, v_scale)


@triton.jit
def finish(top, total, mixed, v_scale):
    """A split's state as (partial [M, D], lse [M])."""
    empty = total == 0.0
    whole = tl.where(empty, 1.0, total)
    partial = mixed * (v_scale / whole)[:, None]
    return partial, tl.where(empty, float("-inf"), top + tl.log2(whole))


@triton.jit
def join(partial, lse, peak, weight, merged):
    """The next split: partial [M, D], lse [M] -> the state (peak [M], weight [M], merged [M, D])."""
    new_peak = tl.maximum(peak, lse)
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    before = tl.exp2(peak - safe)
    now = tl.exp2(lse - safe)
    return new_peak, weight * before + now, merged * before[:, None] + partial * now[:, None]


@triton.jit
def settle(peak, weight, merged):
    """All splits joined: (result [M, D], lse [M]); zeros and minus infinity where nothing was seen."""
    empty = weight == 0.0
    whole = tl.where(empty, 1.0, weight)
    return merged / whole[:, None], tl.where(empty, float("-inf"), peak + tl.log2(whole))
