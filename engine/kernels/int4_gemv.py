"""A few vectors times 4-bit weights, without matrix instructions: each weight is read once a vector.

x:      [M, K], any float type, stride 1 within a row; meant for M of one or two
packed: uint8 [N, K / 2], see `int4`
scale:  bf16 [N, K / 128]
y:      [M, N], any float type; y = x @ weight.T

Every sum is in fp32 and in one order. Not the bits of `int4_gemm`: use one of them for all rows that must agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels import int4_gemm
from engine.kernels.int4 import GROUP, HALF, check_width, pack_int4, unpacked
from engine.kernels.sample import Sample, Size
from engine.kernels.target import Config, device, pick


@dataclass(frozen=True, kw_only=True)
class Int4GemvConfig(Config):
    """block_n: weight rows of one program; block_g: groups of one iteration."""

    block_n: int
    block_g: int


CONFIGS: dict[tuple[str, object], Int4GemvConfig] = {
    ("*", "*"): Int4GemvConfig(block_n=8, block_g=4, num_warps=4),
    ("interpreter", "*"): Int4GemvConfig(block_n=16, block_g=2),
}

meaning = int4_gemm.meaning


@triton.jit
def _kernel(
    x_ptr, packed_ptr, scale_ptr, y_ptr, n_count, groups, x_row, packed_row, scale_row, y_row,
    GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    m = tl.program_id(1).to(tl.int64)
    live_n = n < n_count
    j = tl.arange(0, HALF)
    acc = tl.zeros([BLOCK_N, BLOCK_G, HALF], tl.float32)
    for start in range(0, groups, BLOCK_G):
        group = start + tl.arange(0, BLOCK_G)
        live = group < groups
        both = live_n[:, None] & live[None, :]
        scale = tl.load(scale_ptr + n[:, None] * scale_row + group[None, :], mask=both, other=0.0).to(tl.float32)
        packed_at = packed_ptr + n[:, None, None] * packed_row + group[None, :, None] * HALF + j[None, None, :]
        byte = tl.load(packed_at, mask=both[:, :, None], other=0)
        x_at = x_ptr + m * x_row + group[:, None] * GROUP + j[None, :]  # [BLOCK_G, HALF]
        x_low = tl.load(x_at, mask=live[:, None], other=0.0).to(tl.float32)
        x_high = tl.load(x_at + HALF, mask=live[:, None], other=0.0).to(tl.float32)
        low = unpacked(byte & 0xF, tl.float32) * x_low[None, :, :]
        acc += (low + unpacked(byte >> 4, tl.float32) * x_high[None, :, :]) * scale[:, :, None]
    y = tl.sum(tl.sum(acc, 2), 1)
    tl.store(y_ptr + m * y_row + n, y.to(y_ptr.dtype.element_ty), mask=live_n)


def int4_gemv(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> None:
    """Fill y. Raises UnsupportedShape where K is not whole groups."""
    m, k = x.shape
    n = packed.shape[0]
    check_width(k)
    assert packed.shape == (n, k // 2)
    assert scale.shape == (n, k // GROUP)
    assert y.shape == (m, n)
    assert x.stride(1) == packed.stride(1) == scale.stride(1) == y.stride(1) == 1
    config = pick(CONFIGS, n)
    _kernel[(triton.cdiv(n, config.block_n), m)](
        x, packed, scale, y, n, k // GROUP, x.stride(0), packed.stride(0), scale.stride(0), y.stride(0),
        GROUP=GROUP, HALF=HALF, BLOCK_N=config.block_n, BLOCK_G=config.block_g,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


def samples(size: Size) -> list[Sample]:
    """Square, and with rows and groups that do not fill the last tile."""
    if size == "tiny":
        return [_sample("two vectors, ragged", 2, 40, 384)]
    return [_sample("one vector", 1, 4096, 4096), _sample("a down projection", 1, 4096, 14336)]


def _sample(name: str, m: int, n: int, k: int) -> Sample:
    generator = torch.Generator().manual_seed(12)
    here = device()
    packed, scale = (part.to(here) for part in pack_int4(torch.randn(n, k, generator=generator) * k**-0.5))
    x = torch.randn(m, k, generator=generator).to(torch.bfloat16).to(here)
    y = torch.zeros(m, n, device=here)

    def launch() -> None:
        int4_gemv(x, packed, scale, y)

    def worst() -> float:
        launch()
        return float((y.double() - meaning(x, packed, scale)).abs().max())

    return Sample(name, launch, worst, 1e-4, packed.numel() + 2 * scale.numel() + 2 * x.numel() + 4 * y.numel())
