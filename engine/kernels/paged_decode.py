"""Attention of a few new tokens per sequence over paged KV, the KV dimension split across programs.

    q       [B, Q, Hq, D]            the last Q tokens of each sequence: 1, or more where drafts are verified
    k, v    [blocks, Hkv, page, D]   any strides but 1 for D: one layer of a pool; dtype of q, or e4m3 with scales
    table   int32 [B, pages]         block of each page; entries beyond a context are not read
    length  int32 [B]                tokens of the context, the Q new ones included; 0 is a padding row
    part    fp32 [B, Q*Hq, S, D]     out: of each split, see `softmax`; splits beyond the context are not written
    lse     fp32 [B, Q*Hq, S]        out

`merge` makes one result of the splits. A split is always the same number of tokens (`split_tokens`), from position 0
on, so what a row gives depends on its own context alone. Rows of one KV head share a program: GQA, MQA and MHA.
`window` > 0: a token sees itself and the window-1 before it. After Dao et al., "Flash-Decoding", 2023, and Kwon et al.,
"PagedAttention", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import UnsupportedShape
from engine.kernels import merge
from engine.kernels.sample import Sample, Size
from engine.kernels.shapes import Paged, check_paged, poisoned, rows_of
from engine.kernels.softmax import LOG2_E, attend_split
from engine.kernels.target import Config, pick


@dataclass(frozen=True)
class DecodeConfig(Config):
    """`split`: tokens of the KV dimension per program; `block_n`: keys per tile, divides it."""

    split: int = 512
    block_n: int = 64


CONFIGS: dict[tuple[str, object], DecodeConfig] = {
    ("interpreter", "*"): DecodeConfig(split=32, block_n=32),
    ("gfx942", "*"): DecodeConfig(num_stages=1),
    ("sm_80", 256): DecodeConfig(num_stages=2, block_n=32),
    ("*", 256): DecodeConfig(num_stages=2, block_n=32),
    ("*", "*"): DecodeConfig(num_stages=3),
}


@triton.jit
def _kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, part_ptr, lse_ptr,
    scale_log2, k_scale, v_scale, window,
    q_b, q_t, q_h, kv_block, kv_head, kv_row, table_b, part_b, part_r, part_s, lse_b, lse_r,
    HEADS: tl.constexpr, GROUP: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Grid (B, Hkv, S)."""
    b = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(length_ptr + b)
    first_seen = tl.maximum(length - Q - window + 1, 0)  # by the earliest of the new tokens
    if (split * SPLIT < length) & ((split + 1) * SPLIT > first_seen):
        row = tl.arange(0, ROWS)
        live = row < Q * GROUP
        token = row // GROUP
        q_head = head * GROUP + row % GROUP
        d = tl.arange(0, D)
        q_at = q_ptr + b * q_b + token * q_t + q_head * q_h
        q = tl.load(q_at[:, None] + d[None, :], mask=live[:, None], other=0.0)
        position = length - Q + token
        partial, lse = attend_split(
            q, k_ptr + head * kv_head, v_ptr + head * kv_head, table_ptr + b * table_b, kv_block, kv_row,
            position, window, first_seen, split, length, scale_log2, k_scale, v_scale,
            SPLIT=SPLIT, BLOCK_N=BLOCK_N, PAGE=PAGE, CAST=CAST,
        )  # fmt: skip
        out_row = token * HEADS + q_head
        part_at = part_ptr + b * part_b + out_row * part_r + split * part_s
        tl.store(part_at[:, None] + d[None, :], partial, mask=live[:, None])
        tl.store(lse_ptr + b * lse_b + out_row * lse_r + split, lse, mask=live)


def split_tokens(head_size: int) -> int:
    """Tokens per split on this arch, for any batch."""
    return pick(CONFIGS, head_size).split


def paged_decode(
    q: Tensor, kv: Paged, table: Tensor, length: Tensor, part: Tensor, lse: Tensor, *, scale: float, window: int = 0
) -> None:
    """See the module. S = part.shape[2] must cover the longest context. Raises UnsupportedShape."""
    batch, new, heads, d = q.shape
    group = check_paged(q, kv)
    config = pick(CONFIGS, d)
    rows = rows_of(new * group)
    if rows > 128:
        raise UnsupportedShape(
            f"{new} tokens of {group} heads a KV head at once; {128 // group} are possible: draft fewer tokens"
        )
    _kernel[(batch, kv.k.shape[1], part.shape[2])](
        q, kv.k, kv.v, table, length, part, lse,
        scale * LOG2_E, kv.k_scale, kv.v_scale, window or 1 << 30,
        q.stride(0), q.stride(1), q.stride(2), kv.k.stride(0), kv.k.stride(1), kv.k.stride(2), table.stride(0),
        part.stride(0), part.stride(1), part.stride(2), lse.stride(0), lse.stride(1),
        HEADS=heads, GROUP=group, Q=new, ROWS=rows, D=d, PAGE=kv.k.shape[2], SPLIT=config.split,
        BLOCK_N=config.block_n, CAST=kv.k.dtype != q.dtype,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip


def meaning(q: Tensor, kv: Paged, table: Tensor, length: Tensor, *, scale: float, window: int = 0) -> Tensor:
    """Float64 [B, Q, Hq, D]: softmax(q k^T * scale) v over each context, whole."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    new, group, page = q.shape[1], q.shape[2] // kv.k.shape[1], kv.k.shape[2]
    for b, n in enumerate(length.tolist()):
        if n == 0:
            continue
        blocks = table[b, : -(-n // page)].long().cpu()
        k, v = (
            x.cpu()[blocks].double().transpose(1, 2).flatten(0, 1)[:n].repeat_interleave(group, 1) * s
            for x, s in ((kv.k, kv.k_scale), (kv.v, kv.v_scale))
        )  # each [n, Hq, D]
        scores = torch.einsum("qhd,nhd->hqn", q[b].cpu().double(), k) * scale
        ahead = torch.arange(n)[None, :] - (n - new + torch.arange(new))[:, None]  # [Q, n]
        hidden = (ahead > 0) | (ahead <= -window if window else torch.zeros(()).bool())
        weights = torch.nan_to_num(scores.masked_fill(hidden, float("-inf")).softmax(-1))
        out[b] = torch.einsum("hqn,nhd->qhd", weights, v)
    return out


def decode_and_merge(
    q: Tensor, kv: Paged, table: Tensor, length: Tensor, *, scale: float, window: int = 0, splits: int | None = None
) -> Tensor:
    """With scratch of its own, for tests and benches: [B, Q, Hq, D] in q's dtype."""
    batch, new, heads, d = q.shape
    split = split_tokens(d)
    splits = splits or max(1, -(-int(table.shape[1]) * kv.k.shape[2] // split))
    part = torch.full((batch, new * heads, splits, d), float("nan"), device=q.device)
    lse = torch.full((batch, new * heads, splits), float("nan"), device=q.device)
    out = torch.empty(batch, new * heads, d, dtype=q.dtype, device=q.device)
    paged_decode(q, kv, table, length, part, lse, scale=scale, window=window)
    merge.merge(part, lse, length, out, split=split, new=new, window=window)
    return out.view(q.shape)


def samples(size: Size) -> list[Sample]:
    """GQA, MHA with a page of 64, verify rows with a window, and e4m3 KV."""
    tiny = size == "tiny"
    d, kv_heads, pages = (32, 1, 5) if tiny else (128, 8, 64)
    shapes = {
        "gqa": (kv_heads, 4, d, 16, 1, 0, torch.bfloat16),
        "mha": (1 if tiny else 16, 1, d if tiny else 64, 64, 1, 0, torch.bfloat16),
        "verify-window": (kv_heads, 4, d, 16, 3, 24, torch.bfloat16),
        "e4m3": (kv_heads, 4, d, 16, 1, 0, torch.float8_e4m3fn),
    }
    if not tiny:
        shapes["heads-of-256"] = (kv_heads, 4, 256, 16, 1, 0, torch.bfloat16)
        shapes["group-24"] = (kv_heads, 24, 128, 16, 1, 0, torch.bfloat16)
    return [_sample(name, size, pages, *shape) for name, shape in shapes.items()]


def _sample(
    name: str, size: Size, pages: int, heads: int, group: int, d: int, page: int, new: int, window: int,
    dtype: torch.dtype,
) -> Sample:  # fmt: skip
    batch = 2 if size == "tiny" else 16
    lengths = [pages * page - 3, page + 1] if size == "tiny" else [pages * page] * batch
    kv, table, length = poisoned(lengths, heads, d, page, dtype)
    q = torch.randn(batch, new, heads * group, d, device=length.device).to(torch.bfloat16)
    scratch: dict[str, Tensor] = {}
    split = split_tokens(d)
    splits = -(-max(lengths) // split)

    def launch() -> None:
        if not scratch:
            scratch["part"] = torch.empty(batch, new * heads * group, splits, d, device=q.device)
            scratch["lse"] = torch.empty(batch, new * heads * group, splits, device=q.device)
            scratch["out"] = torch.empty(batch, new * heads * group, d, dtype=q.dtype, device=q.device)
        paged_decode(q, kv, table, length, scratch["part"], scratch["lse"], scale=d**-0.5, window=window)
        merge.merge(scratch["part"], scratch["lse"], length, scratch["out"], split=split, new=new, window=window)

    def worst() -> float:
        launch()
        expected = meaning(q, kv, table, length, scale=d**-0.5, window=window)
        return float((scratch["out"].view(q.shape).cpu().double() - expected).abs().max())

    moved = 2 * sum(lengths) * heads * d * kv.k.element_size()
    wants = {} if size == "tiny" else {
        "sm_80": ("mma.sync", "cp.async"), "sm_90": ("mma.sync", "cp.async"),
        "sm_100": ("mma.sync", "cp.async"), "gfx942": ("mfma",),
    }  # fmt: skip
    return Sample(name, launch, worst, 0.02, moved, wants)


__all__ = ["CONFIGS", "decode_and_merge", "meaning", "paged_decode", "samples", "split_tokens"]
