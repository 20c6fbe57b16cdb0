"""Activations times 4-bit weights, for any number of rows with the same tile.

x:      [M, K] bf16, fp16 or fp32; stride 1 within a row
packed: uint8 [N, K / 2], see `int4`
scale:  bf16 [N, K / 128]
bias:   [N] or None
y:      [M, N], any float type; y = x @ weight.T + bias

Weights are the left factor, so that a tile of 16 rows of x is the short side of the matrix instruction. Tile and order
of K are the same for every M: the bits of a row do not depend on the other rows. A group's products are summed in fp32
and then scaled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.int4 import GROUP, HALF, check_width, pack_int4, unpack_int4, unpacked
from engine.kernels.sample import Sample, Size
from engine.kernels.target import Config, device, pick


@dataclass(frozen=True, kw_only=True)
class Int4GemmConfig(Config):
    """block_n: weight rows of one program; block_m: activation rows."""

    block_n: int
    block_m: int = 16


# The key is whether the matrix has enough rows to keep a GPU busy with wide tiles.
CONFIGS: dict[tuple[str, object], Int4GemmConfig] = {
    ("*", "narrow"): Int4GemmConfig(block_n=32, num_warps=4, num_stages=8),
    ("*", "wide"): Int4GemmConfig(block_n=64, num_warps=4, num_stages=4),
    ("gfx942", "narrow"): Int4GemmConfig(block_n=32, num_warps=4, num_stages=2),
    ("interpreter", "*"): Int4GemmConfig(block_n=32),
}
WIDE_FROM = 16384


@triton.jit(do_not_specialize=["m_count"])
def _kernel(
    x_ptr, packed_ptr, scale_ptr, bias_ptr, y_ptr, m_count, n_count, groups, x_row, packed_row, scale_row, y_row,
    GROUP: tl.constexpr, HALF: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    live_m = m < m_count
    live_n = n < n_count
    j = tl.arange(0, HALF)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    x_at = x_ptr + m[None, :] * x_row + j[:, None]  # [HALF, BLOCK_M]
    packed_at = packed_ptr + n[:, None] * packed_row + j[None, :]  # [BLOCK_N, HALF]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for group in range(groups):
        byte = tl.load(packed_at + group * HALF, mask=live_n[:, None], other=0)
        x_low = tl.load(x_at + group * GROUP, mask=live_m[None, :], other=0.0)
        x_high = tl.load(x_at + group * GROUP + HALF, mask=live_m[None, :], other=0.0)
        scale = tl.load(scale_ptr + n * scale_row + group, mask=live_n, other=0.0).to(tl.float32)
        part = tl.dot(unpacked(byte & 0xF, kind), x_low, input_precision="ieee")
        part = tl.dot(unpacked(byte >> 4, kind), x_high, part, input_precision="ieee")
        acc += part * scale[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=live_n, other=0.0).to(tl.float32)[:, None]
    y = tl.trans(acc).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + m[:, None] * y_row + n[None, :], y, mask=live_m[:, None] & live_n[None, :])


def int4_gemm(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Fill y. Raises UnsupportedShape where K is not whole groups."""
    m, k = x.shape
    n = packed.shape[0]
    check_width(k)
    assert packed.shape == (n, k // 2)
    assert scale.shape == (n, k // GROUP)
    assert y.shape == (m, n)
    assert x.stride(1) == packed.stride(1) == scale.stride(1) == y.stride(1) == 1
    config = pick(CONFIGS, "wide" if n >= WIDE_FROM else "narrow")
    grid = (triton.cdiv(m, config.block_m), triton.cdiv(n, config.block_n))
    _kernel[grid](
        x, packed, scale, y if bias is None else bias, y, m, n, k // GROUP,
        x.stride(0), packed.stride(0), scale.stride(0), y.stride(0),
        GROUP=GROUP, HALF=HALF, HAS_BIAS=bias is not None, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


def meaning(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y [M, N] in float64."""
    y = x.double() @ unpack_int4(packed, scale).T
    return y if bias is None else y + bias.double()


def matrix_wants(wide: bool) -> dict[str, tuple[str, ...]]:
    """Instruction classes that a product has on each target: those of a whole warp group from 64 weight rows on."""
    narrow = ("mma.sync", "cp.async")
    return {
        "sm_80": narrow,
        "sm_90": ("wgmma.mma_async", "cp.async") if wide else narrow,
        "sm_100": ("tcgen05.mma", "cp.async") if wide else narrow,
        "gfx942": ("v_mfma",),
    }


def samples(size: Size) -> list[Sample]:
    """One row and a batch; in production a projection of 4,096 and a wide one."""
    if size == "tiny":
        return [_sample("one row", 1, 64, 256), _sample("a ragged batch", 19, 40, 128)]
    return [_sample("one row", 1, 4096, 4096), _sample("16 rows, wide", 16, 28672, 4096)]


def _sample(name: str, m: int, n: int, k: int) -> Sample:
    generator = torch.Generator().manual_seed(11)
    here = device()
    packed, scale = (part.to(here) for part in pack_int4(torch.randn(n, k, generator=generator) * k**-0.5))
    x = torch.randn(m, k, generator=generator).to(torch.bfloat16).to(here)
    bias = torch.randn(n, generator=generator).to(torch.bfloat16).to(here)
    y = torch.zeros(m, n, device=here)

    def launch() -> None:
        int4_gemm(x, packed, scale, y, bias)

    def worst() -> float:
        launch()
        return float((y.double() - meaning(x, packed, scale, bias)).abs().max())

    moved = packed.numel() + 2 * scale.numel() + 2 * x.numel() + 4 * y.numel()
    return Sample(name, launch, worst, 1e-4, moved, matrix_wants(n >= WIDE_FROM))
