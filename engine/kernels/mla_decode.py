"""Attention over the latent cache of a multi-head latent attention model, in splits of a constant number of tokens.

q:           [R, heads, DC + DR], the query absorbed into the latent space and its rotary part; any strides, last one 1
latent:      [blocks, page, DC + DR], what a token leaves in the cache: DC latents, which are key and value of every
             head, and the DR rotated dimensions that the heads' keys share; any strides, last one 1
block_table: int32 [sequences, max_pages]
row_table:   int32 [R], the sequence's row of block_table, -1 for a padding row
row_len:     int32 [R], how many tokens of the sequence the row sees. A decode step has a row for each sequence; a
             chunk of a prompt has one for each of its positions, each seeing one token more than the one before
part:        fp32 [R, heads, S, DC], the attention within each split; not written where the split is empty
lse:         fp32 [R, heads, S], log2 of the sum of exponentials, -inf where the split is empty

Split s holds positions s * split_tokens up to (s + 1) * split_tokens, so a row's bits do not depend on how many splits
the launch has. `merge` makes one of them. Absorption: DeepSeek-V2 (2024), section 2.1 and appendix C.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.errors import UnsupportedShape
from engine.kernels.sample import Sample, Size
from engine.kernels.softmax import LOG2_E
from engine.kernels.target import Config, device, pick


@dataclass(frozen=True, kw_only=True)
class MlaConfig(Config):
    """block_heads: heads of one program; block_tokens: cached tokens of one iteration; split_tokens: of one program."""

    block_heads: int
    block_tokens: int
    split_tokens: int = 256


# The key is the class of head count: up to 16 heads a rank, or more. A split leaves heads * DC fp32, which for many
# heads is as much as hundreds of tokens: theirs are longer.
CONFIGS: dict[tuple[str, object], MlaConfig] = {
    ("*", 16): MlaConfig(block_heads=16, block_tokens=32),
    ("*", 64): MlaConfig(block_heads=16, block_tokens=32, split_tokens=1024),
    ("sm_80", 64): MlaConfig(block_heads=32, block_tokens=32, split_tokens=1024, num_warps=8),
    ("sm_90", 64): MlaConfig(block_heads=32, block_tokens=32, split_tokens=1024, num_warps=8),
    ("sm_100", 64): MlaConfig(block_heads=32, block_tokens=32, split_tokens=1024, num_warps=8),
    ("interpreter", 16): MlaConfig(block_heads=16, block_tokens=32, split_tokens=64),
    ("interpreter", 64): MlaConfig(block_heads=64, block_tokens=32, split_tokens=64),
}


@triton.jit
def _kernel(
    q_ptr, latent_ptr, table_ptr, row_table_ptr, row_len_ptr, part_ptr, lse_ptr, scale_log2, heads,
    q_row, q_head, latent_block, latent_token, table_row, part_row, part_head, part_split, lse_row, lse_head,
    BLOCK_H: tl.constexpr, DC: tl.constexpr, DR: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(2)
    live = h < heads
    sequence = tl.load(row_table_ptr + row).to(tl.int64)
    length = tl.where(sequence >= 0, tl.load(row_len_ptr + row), 0)
    low = split * SPLIT
    high = tl.minimum(low + SPLIT, length)
    lse_at = lse_ptr + row * lse_row + h * lse_head + split
    if low >= high:
        tl.store(lse_at, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=live)
    else:
        dc = tl.arange(0, DC)
        dr = tl.arange(0, DR)
        q_at = q_ptr + row * q_row + h[:, None] * q_head
        q_latent = tl.load(q_at + dc[None, :], mask=live[:, None], other=0.0)  # [BLOCK_H, DC]
        q_rope = tl.load(q_at + DC + dr[None, :], mask=live[:, None], other=0.0)  # [BLOCK_H, DR]
        most = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, DC], tl.float32)
        for start in range(low, high, BLOCK_N):
            position = start + tl.arange(0, BLOCK_N)
            seen = position < high
            block = tl.load(table_ptr + sequence * table_row + position // PAGE, mask=seen, other=0).to(tl.int64)
            at = latent_ptr + (block * latent_block + (position % PAGE) * latent_token)[:, None]
            c = tl.load(at + dc[None, :], mask=seen[:, None], other=0.0)  # [BLOCK_N, DC]
            k_rope = tl.load(at + DC + dr[None, :], mask=seen[:, None], other=0.0)  # [BLOCK_N, DR]
            score = tl.dot(q_latent, tl.trans(c), input_precision="ieee")
            score = tl.dot(q_rope, tl.trans(k_rope), score, input_precision="ieee")
            score = tl.where(seen[None, :], score * scale_log2, float("-inf"))
            new_most = tl.maximum(most, tl.max(score, 1))
            p = tl.exp2(score - new_most[:, None])
            shrink = tl.exp2(most - new_most)
            total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(c.dtype), c, acc * shrink[:, None], input_precision="ieee")
            most = new_most
        part_at = part_ptr + row * part_row + h[:, None] * part_head + split * part_split
        tl.store(part_at + dc[None, :], acc / total[:, None], mask=live[:, None])
        tl.store(lse_at, most + tl.log2(total), mask=live)


def config_for(heads: int) -> MlaConfig:
    """What a launch over so many heads takes; its `split_tokens` says how many splits a context needs."""
    return pick(CONFIGS, 16 if heads <= 16 else 64)


def mla_decode(
    q: torch.Tensor, latent: torch.Tensor, block_table: torch.Tensor, row_table: torch.Tensor, row_len: torch.Tensor,
    part: torch.Tensor, lse: torch.Tensor, *, scale: float, config: MlaConfig | None = None,
) -> None:  # fmt: skip
    """Fill `part` and `lse`. Raises UnsupportedShape where the kernel does not take these shapes."""
    rows, heads, width = q.shape
    _, page, latent_width = latent.shape
    dc = part.shape[3]
    dr = width - dc
    taken = config or config_for(heads)
    splits = part.shape[2]
    _check(dc, dr, latent_width, page)
    if splits * taken.split_tokens < block_table.shape[1] * page:
        raise UnsupportedShape(
            f"{splits} splits of {taken.split_tokens} tokens do not cover {block_table.shape[1]} pages of {page}; "
            "give the launch more splits or a narrower block table"
        )
    assert part.shape == (rows, heads, splits, dc)
    assert lse.shape == (rows, heads, splits)
    assert q.stride(2) == latent.stride(2) == part.stride(3) == lse.stride(2) == block_table.stride(1) == 1
    grid = (rows, triton.cdiv(heads, taken.block_heads), splits)
    _kernel[grid](
        q, latent, block_table, row_table, row_len, part, lse, scale * LOG2_E, heads,
        *q.stride()[:2], *latent.stride()[:2], block_table.stride(0), *part.stride()[:3], *lse.stride()[:2],
        BLOCK_H=taken.block_heads, DC=dc, DR=dr, PAGE=page, BLOCK_N=taken.block_tokens, SPLIT=taken.split_tokens,
        num_warps=taken.num_warps, num_stages=taken.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


def _check(dc: int, dr: int, latent_width: int, page: int) -> None:
    if dc + dr != latent_width:
        raise UnsupportedShape(f"queries of {dc + dr} dimensions do not fit a latent cache of {latent_width}")
    if any(size < 16 or size & (size - 1) for size in (dc, dr)):
        raise UnsupportedShape(
            f"kv_lora_rank {dc} and qk_rope_head_dim {dr} must be powers of two from 16 on for the MLA kernel; "
            "the CPU backend takes any: backend = cpu"
        )
    if page not in (16, 32, 64):
        raise UnsupportedShape(f"a page of {page} tokens: the MLA kernel reads pages of 16, 32 or 64")


def meaning(
    q: torch.Tensor, latent: torch.Tensor, block_table: torch.Tensor, row_table: torch.Tensor, row_len: torch.Tensor,
    *, scale: float, dc: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention [R, heads, DC] and log2 of its sum [R, heads] in float64: zeros and -inf for rows that see nothing."""
    rows, heads, _ = q.shape
    page = latent.shape[1]
    out = torch.zeros(rows, heads, dc, dtype=torch.float64, device=q.device)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float64, device=q.device)
    for row, (sequence, length) in enumerate(zip(row_table.tolist(), row_len.tolist(), strict=True)):
        if sequence < 0 or length == 0:
            continue
        blocks = block_table[sequence, : -(-length // page)].long()
        seen = latent[blocks].double().flatten(0, 1)[:length]  # [length, DC + DR]
        score = q[row].double() @ seen.T * scale
        out[row] = score.softmax(-1) @ seen[:, :dc]
        lse[row] = score.logsumexp(-1) * LOG2_E
    return out, lse


def merged(part: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The splits of a launch as one attention and one log2 of a sum, in float64."""
    total = (lse.double() / LOG2_E).logsumexp(-1) * LOG2_E
    weight = (lse.double() - total[..., None]).exp2().nan_to_num(0.0)[..., None]
    return (torch.where(weight > 0.0, part.double(), 0.0) * weight).sum(-2), total


def samples(size: Size) -> list[Sample]:
    """Decode of one rank's 16 heads and of a whole model's 128, and a chunk of a prompt."""
    if size == "tiny":
        return [
            _sample("decode of 16 heads", 16, (32, 16), (40, 0, 1), (0, 1, 2)),
            _sample("a chunk of a prompt", 4, (32, 16), (50, 51, 52), (0, 0, 0)),
        ]
    return [
        _sample("decode of 16 heads", 16, (512, 64), (4096,) * 4, range(4)),
        _sample("decode of 128 heads", 128, (512, 64), (4096,) * 4, range(4)),
    ]


def _sample(
    name: str, heads: int, width: tuple[int, int], lengths: Sequence[int], sequences: Sequence[int], page: int = 16
) -> Sample:
    dc, dr = width
    dtype = torch.float16 if dc < 512 else torch.bfloat16
    generator = torch.Generator().manual_seed(7)
    pages = -(-max(lengths) // page)
    count = max(sequences) + 1
    here = device()
    latent = torch.randn(count * pages, page, dc + dr, generator=generator).to(dtype).to(here)
    order = torch.randperm(count * pages, generator=generator)
    table = order.reshape(count, pages).to(torch.int32).to(here)
    q = torch.randn(len(lengths), heads, dc + dr, generator=generator).to(dtype).to(here)
    rows = torch.tensor(list(sequences), dtype=torch.int32, device=here)
    seen = torch.tensor(list(lengths), dtype=torch.int32, device=here)
    splits = triton.cdiv(pages * page, config_for(heads).split_tokens)
    part = torch.zeros(len(lengths), heads, splits, dc, device=here)
    lse = torch.zeros(len(lengths), heads, splits, device=here)
    scale = (dc + dr) ** -0.5

    def launch() -> None:
        mla_decode(q, latent, table, rows, seen, part, lse, scale=scale)

    def worst() -> float:
        launch()
        out, _ = merged(part, lse)
        wanted, _ = meaning(q, latent, table, rows, seen, scale=scale, dc=dc)
        return float((out - wanted).abs().max())

    moved = latent.numel() * latent.element_size() + q.numel() * q.element_size() + 4 * part.numel()
    tensor = ("mma.sync", "cp.async")
    wants = {"sm_80": tensor, "sm_90": tensor, "sm_100": tensor, "gfx942": ("v_mfma",)}
    return Sample(name, launch, worst, 2e-2, moved, wants)
