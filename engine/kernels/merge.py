"""One result of the partial results that attention left for the splits of a context, in position order.

    part    fp32 [B, R, S, D]   of each split, normalised by itself; see `softmax`
    lse     fp32 [B, R, S]      base 2
    length  int32 [B]           tokens; splits of `split` tokens from position 0 on, so ceil(length / split) are merged
    out     [B, R, D]           any float dtype; zeros where length is 0
    lse_out fp32 [B, R] or None

With `window`, splits that none of the `new` last tokens can see are left out. Shared prefixes are merged by the same
kernel: S = 2, of prefix and remainder, split = 1 and length = 2 (Ye et al., "Cascade Inference", 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import UnsupportedShape
from engine.kernels.sample import Sample, Size
from engine.kernels.softmax import join, settle
from engine.kernels.target import Config, device, pick


@dataclass(frozen=True)
class MergeConfig(Config):
    """`rows` of one sequence per program."""

    rows: int = 4


CONFIGS: dict[tuple[str, object], MergeConfig] = {
    ("interpreter", "*"): MergeConfig(rows=16),
    ("*", "*"): MergeConfig(num_warps=4, num_stages=2),
}


@triton.jit
def _kernel(
    part_ptr, lse_ptr, length_ptr, out_ptr, lse_out_ptr, rows, skipped,
    part_b, part_r, part_s, lse_b, lse_r, out_b, out_r,
    D: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, KEEP_LSE: tl.constexpr,
):  # fmt: skip
    """Grid (B, ceil(R / ROWS)). `skipped`: of the last so many tokens any may be seen."""
    b = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = r < rows
    d = tl.arange(0, D)
    length = tl.load(length_ptr + b)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, D], tl.float32)
    for split in range(tl.maximum(length - skipped, 0) // SPLIT, tl.cdiv(length, SPLIT)):
        lse = tl.load(lse_ptr + b * lse_b + r * lse_r + split, mask=live, other=float("-inf"))
        part_at = part_ptr + b * part_b + r * part_r + split * part_s
        partial = tl.load(part_at[:, None] + d[None, :], mask=live[:, None], other=0.0)
        peak, weight, merged = join(partial, lse, peak, weight, merged)
    result, lse = settle(peak, weight, merged)
    out_at = out_ptr + b * out_b + r * out_r
    tl.store(out_at[:, None] + d[None, :], result.to(out_ptr.dtype.element_ty), mask=live[:, None])
    if KEEP_LSE:
        tl.store(lse_out_ptr + b * rows + r, lse, mask=live)


def merge(
    part: Tensor, lse: Tensor, length: Tensor, out: Tensor, lse_out: Tensor | None = None, *, split: int,
    new: int = 1, window: int = 0,
) -> None:  # fmt: skip
    """See the module. Raises UnsupportedShape."""
    batch, rows, _, d = part.shape
    if d & (d - 1):
        raise UnsupportedShape(f"partial results of {d} numbers; a power of two is needed")
    config = pick(CONFIGS, d)
    _kernel[(batch, triton.cdiv(rows, config.rows))](
        part, lse, length, out, out if lse_out is None else lse_out, rows, new + window - 1 if window else 1 << 30,
        part.stride(0), part.stride(1), part.stride(2), lse.stride(0), lse.stride(1), out.stride(0), out.stride(1),
        D=d, SPLIT=split, ROWS=config.rows, KEEP_LSE=lse_out is not None,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip


def meaning(part: Tensor, lse: Tensor, length: Tensor, *, split: int) -> tuple[Tensor, Tensor]:
    """Float64 (out [B, R, D], lse [B, R]): the average of the splits, weighted by 2 ** lse."""
    counts = [-(-n // split) for n in length.tolist()]
    out = torch.zeros(part.shape[0], part.shape[1], part.shape[3], dtype=torch.float64)
    total = torch.full(out.shape[:2], float("-inf"), dtype=torch.float64)
    ln2 = torch.log(torch.tensor(2.0, dtype=torch.float64))
    for b, count in enumerate(counts):
        if count:
            natural = lse[b, :, :count].cpu().double() * ln2
            total[b] = torch.logsumexp(natural, -1) / ln2
            weights = torch.nan_to_num(torch.softmax(natural, -1))
            out[b] = torch.einsum("rs,rsd->rd", weights, torch.nan_to_num(part[b, :, :count].cpu().double()))
    return out, total


def samples(size: Size) -> list[Sample]:
    """Ragged splits, one of them empty, and the two of a shared prefix."""
    batch, rows, splits, d = (2, 4, 3, 32) if size == "tiny" else (16, 32, 16, 128)
    return [
        _sample("splits", batch, rows, splits, d, [splits * 8 - 3 - 8 * (b % splits) for b in range(batch)], 8),
        _sample("prefix", batch, rows, 2, d, [2] * batch, 1),
    ]


def _sample(name: str, batch: int, rows: int, splits: int, d: int, lengths: list[int], split: int) -> Sample:
    generator = torch.Generator().manual_seed(1)
    part = torch.randn(batch, rows, splits, d, generator=generator).to(device())
    lse = (4 * torch.randn(batch, rows, splits, generator=generator)).to(device())
    lse[:, 0, 0] = float("-inf")
    length = torch.tensor(lengths, dtype=torch.int32, device=device())
    out = torch.empty(batch, rows, d, dtype=torch.bfloat16, device=device())
    lse_out = torch.empty(batch, rows, device=device())

    def launch() -> None:
        merge(part, lse, length, out, lse_out, split=split)

    def worst() -> float:
        launch()
        expected, total = meaning(part, lse, length, split=split)
        off = (lse_out.cpu().double() - total).abs().nan_to_num(0.0).max()  # both minus infinity is no error
        return float(max((out.cpu().double() - expected).abs().max(), off))

    return Sample(name, launch, worst, 0.02, part.numel() * 4)
