"""silu(gate) * up, of both side by side.

    both  fp32 [T, 2 F]   gate, then up
    out   [T, F]          any float dtype

Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sample import Sample, Size
from engine.kernels.target import Config, device, pick


@dataclass(frozen=True, kw_only=True)
class SwigluConfig(Config):
    """`rows` and columns (`block`) of one program."""

    rows: int = 1
    block: int = 1024


CONFIGS: dict[tuple[str, object], SwigluConfig] = {
    ("interpreter", "*"): SwigluConfig(rows=16),
    ("*", "*"): SwigluConfig(num_warps=4),
}


@triton.jit
def _kernel(both_ptr, out_ptr, rows, width, both_t, out_t, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (ceil(T / ROWS), ceil(F / BLOCK))."""
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    there = (t < rows) & (column < width)
    gate = tl.load(both_ptr + t * both_t + column, mask=there, other=0.0)
    up = tl.load(both_ptr + t * both_t + width + column, mask=there, other=0.0)
    tl.store(out_ptr + t * out_t + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=there)


def swiglu(both: Tensor, out: Tensor) -> None:
    """See the module."""
    rows, width = out.shape
    config = pick(CONFIGS, "*")
    _kernel[(triton.cdiv(rows, config.rows), triton.cdiv(width, config.block))](
        both, out, rows, width, both.stride(0), out.stride(0),
        ROWS=config.rows, BLOCK=config.block, num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def meaning(both: Tensor) -> Tensor:
    """Float64 [T, F]."""
    gate, up = both.cpu().double().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def samples(size: Size) -> list[Sample]:
    rows, width = (3, 80) if size == "tiny" else (256, 14_336)
    both = (3 * torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(4))).to(device())
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=device())

    def worst() -> float:
        swiglu(both, out)
        expected = meaning(both)
        return float(((out.cpu().double() - expected).abs() / expected.abs().clamp(min=1)).max())

    return [Sample("halves", lambda: swiglu(both, out), worst, 0.005, both.numel() * 4 + out.numel() * 2)]
