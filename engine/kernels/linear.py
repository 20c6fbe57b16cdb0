"""Products with weights: y = x w^T + bias, one tile and one order of K for every number of rows.

    x     [G, M, K] or [M, K]   rows strided, K contiguous
    w     [G, N, K] or [N, K]   K contiguous; dtype of x
    bias  fp32 [N] or None
    y     [G, M, N] or [M, N]   any float dtype, N contiguous

K is summed in `splits` ranges of equal length, each in fp32 in steps of `block_k`, then range by range in order. Where
rows are few the ranges are programs of their own, which leave their sums in `scratch` (fp32 [splits, G, M, N]) to a
second kernel; where they are many, one program goes over them: the same sums in the same order. Rows beyond M are
computed as zeros and not stored. So a row's bits do not depend on how many others there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import UnsupportedShape
from engine.kernels.sample import Sample, Size
from engine.kernels.target import INTERPRETED, Config, device, pick

FEW_ROWS = 64  # up to here the ranges of K are programs of their own
_REDUCE = 1024


@dataclass(frozen=True)
class LinearConfig(Config):
    block_m: int = 64
    block_n: int = 64
    block_k: int = 64
    splits: int = 1


# Keyed by whether N is narrow: then ranges of K make up for the programs that N does not give.
CONFIGS: dict[tuple[str, object], LinearConfig] = {
    ("interpreter", "narrow"): LinearConfig(splits=2, block_k=32),
    ("interpreter", "wide"): LinearConfig(),
    ("sm_80", "narrow"): LinearConfig(splits=4, num_stages=4, num_warps=8),  # four warps spill the second accumulator
    ("sm_80", "wide"): LinearConfig(num_stages=4, num_warps=8),
    ("sm_100", "narrow"): LinearConfig(splits=4, num_stages=4, num_warps=8),
    ("sm_100", "wide"): LinearConfig(num_stages=4, num_warps=8),
    ("gfx942", "narrow"): LinearConfig(splits=4, num_stages=2),
    ("gfx942", "wide"): LinearConfig(num_stages=2),
    ("*", "narrow"): LinearConfig(splits=4, num_stages=4),
    ("*", "wide"): LinearConfig(num_stages=4),
}
_NARROW, _NARROW_INTERPRETED = 8192, 128


@triton.jit
def _kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, rows, columns, depth, range_k,
    x_g, x_m, w_g, w_n, y_s, y_g, y_m,
    SPLITS: tl.constexpr, LOOP: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(M / BLOCK_M) * ceil(N / BLOCK_N), G, 1 or SPLITS): neighbours share columns of w."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    m = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    g = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + g * x_g + m[:, None].to(tl.int64) * x_m
    w_at = w_ptr + g * w_g + n[:, None].to(tl.int64) * w_n
    row_there = (m < rows)[:, None]
    column_there = (n < columns)[:, None]
    whole = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first = 0 if LOOP else tl.program_id(2)
    last = SPLITS if LOOP else first + 1
    for split in range(first, last):
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(split * range_k, tl.minimum((split + 1) * range_k, depth), BLOCK_K):
            k_there = (start + k < depth)[None, :]
            x = tl.load(x_at + start + k[None, :], mask=row_there & k_there, other=0.0)
            w = tl.load(w_at + start + k[None, :], mask=column_there & k_there, other=0.0)
            total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
        whole = whole + total
    if BIAS:
        whole += tl.load(bias_ptr + n, mask=n < columns, other=0.0)[None, :]
    y_at = y_ptr + tl.program_id(2).to(tl.int64) * y_s + g * y_g + m[:, None].to(tl.int64) * y_m + n[None, :]
    tl.store(y_at, whole.to(y_ptr.dtype.element_ty), mask=row_there & (n < columns)[None, :])


@triton.jit
def _reduce(
    scratch_ptr, bias_ptr, y_ptr, columns, s_s, s_g, s_m, y_g, y_m,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (M, ceil(N / BLOCK), G)."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.program_id(2).to(tl.int64)
    there = n < columns
    whole = tl.zeros([BLOCK], tl.float32)
    for split in range(SPLITS):
        whole = whole + tl.load(scratch_ptr + split * s_s + g * s_g + m * s_m + n, mask=there, other=0.0)
    if BIAS:
        whole += tl.load(bias_ptr + n, mask=there, other=0.0)
    tl.store(y_ptr + g * y_g + m * y_m + n, whole.to(y_ptr.dtype.element_ty), mask=there)


def config_for(columns: int) -> LinearConfig:
    """The configuration of a weight with so many rows, for any number of tokens."""
    narrow = _NARROW_INTERPRETED if INTERPRETED else _NARROW
    return pick(CONFIGS, "narrow" if columns <= narrow else "wide")


def scratch_elements(rows: int, columns: int, groups: int = 1) -> int:
    """fp32 numbers of scratch that a product with so few rows needs; 0 where it needs none."""
    splits = config_for(columns).splits
    return splits * groups * rows * columns if rows <= FEW_ROWS and splits > 1 else 0


def linear(x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> None:
    """See the module; `scratch`: flat fp32 of `scratch_elements`. Raises UnsupportedShape."""
    if x.dim() == 2:
        x, w, y = x[None], w[None], y[None]
    groups, rows, depth = x.shape
    columns = w.shape[1]
    if w.shape[2] != depth or y.shape != (groups, rows, columns):
        raise UnsupportedShape(f"x {list(x.shape)} times w {list(w.shape)} is not y {list(y.shape)}")
    if x.dtype != w.dtype or x.stride(2) != 1 or w.stride(2) != 1 or y.stride(2) != 1:
        raise UnsupportedShape(f"x in {x.dtype} and w in {w.dtype}: one type, and contiguous rows, are supported")
    config = config_for(columns)
    apart = scratch_elements(rows, columns, groups)
    if apart and (scratch is None or scratch.numel() < apart):
        raise UnsupportedShape(f"{apart} numbers of scratch are needed for {rows} rows of {columns}")
    target = scratch[:apart].view(config.splits, groups, rows, columns) if apart and scratch is not None else y[None]
    blocks_k = triton.cdiv(triton.cdiv(depth, config.splits), config.block_k)
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(columns, config.block_n)
    _kernel[(tiles, groups, config.splits if apart else 1)](
        x, w, w if bias is None else bias, target, rows, columns, depth, blocks_k * config.block_k,
        x.stride(0), x.stride(1), w.stride(0), w.stride(1), target.stride(0), target.stride(1), target.stride(2),
        SPLITS=config.splits, LOOP=not apart, BIAS=bias is not None and not apart,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    if apart:
        _reduce[(rows, triton.cdiv(columns, _REDUCE), groups)](
            target, w if bias is None else bias, y, columns,
            target.stride(0), target.stride(1), target.stride(2), y.stride(0), y.stride(1),
            SPLITS=config.splits, BIAS=bias is not None, BLOCK=_REDUCE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def meaning(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Float64 y."""
    y = x.cpu().double() @ w.cpu().double().transpose(-1, -2)
    return y if bias is None else y + bias.cpu().double()


def samples(size: Size) -> list[Sample]:
    """One row and many, a narrow weight with bias and a wide one, and per-head groups as in MLA."""
    tiny = size == "tiny"
    narrow, wide, depth = (72, 200, 96) if tiny else (4096, 14_336, 4096)
    shapes = {
        "one": (1, 1, narrow, depth, True),
        "many": (1, 80 if tiny else 300, narrow, depth, True),
        "wide": (1, 3, wide, depth, False),
        "heads": (2 if tiny else 16, 5, 64 if tiny else 512, 32 if tiny else 128, False),
    }
    return [_sample(name, size, *shape) for name, shape in shapes.items()]


def _sample(name: str, size: Size, groups: int, rows: int, columns: int, depth: int, with_bias: bool) -> Sample:
    generator = torch.Generator().manual_seed(6)
    here = device()
    x, w = (torch.randn(groups, n, depth, generator=generator).to(torch.bfloat16).to(here) for n in (rows, columns))
    bias = torch.randn(columns, generator=generator).to(here) if with_bias else None
    y = torch.empty(groups, rows, columns, device=here)
    scratch: list[Tensor] = []

    def launch() -> None:
        if not scratch:
            scratch.append(torch.empty(max(1, scratch_elements(rows, columns, groups)), device=here))
        linear(x, w, y, bias, scratch[0])

    def worst() -> float:
        launch()
        return float((y.cpu().double() - meaning(x, w, bias)).abs().max() / depth**0.5)

    wants = {} if size == "tiny" else {
        "sm_80": ("mma.sync", "cp.async"), "sm_90": ("wgmma", "cp.async"), "sm_100": ("tcgen05",), "gfx942": ("mfma",),
    }  # fmt: skip
    return Sample(name, launch, worst, 1e-4, w.numel() * 2 if rows <= FEW_ROWS else 0, wants)
