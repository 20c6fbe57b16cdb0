"""Activations times e4m3 weights, for any number of rows with the same tile.

x:       [M, K] bf16, fp16 or fp32 (w8a16), or e4m3 (w8a8); stride 1 within a row; K a multiple of 16
weight:  e4m3 [N, K], stride 1 within a row
scale:   fp32 [N], see `fp8`
x_scale: fp32 [M] where x is e4m3, None else
bias:    [N] or None
y:       [M, N], any float type; y = (x * x_scale) @ (weight * scale).T + bias

Weights are the left factor, so that a tile of 16 rows of x is the short side of the matrix instruction. Tile and order
of K are the same for every M: the bits of a row do not depend on the other rows. Products of two e4m3 are summed by the
matrix instruction for one tile of K at most, as its own sums are narrower than fp32 (DeepSeek-V3, 2024, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.errors import UnsupportedShape
from engine.kernels.fp8 import as_taken, native, quantise_fp8, widened
from engine.kernels.int4_gemm import WIDE_FROM, matrix_wants
from engine.kernels.sample import Sample, Size
from engine.kernels.target import Config, device, pick

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Fp8GemmConfig(Config):
    """block_n: weight rows of one program; block_k: of one iteration; block_m: activation rows."""

    block_n: int
    block_k: int = 128
    block_m: int = 16


# The key is whether the matrix has enough rows to keep a GPU busy with wide tiles.
CONFIGS: dict[tuple[str, object], Fp8GemmConfig] = {
    ("*", "narrow"): Fp8GemmConfig(block_n=32, num_warps=4, num_stages=4),
    ("*", "wide"): Fp8GemmConfig(block_n=64, num_warps=4, num_stages=4),
    ("gfx942", "*"): Fp8GemmConfig(block_n=32, num_warps=4, num_stages=2),
    ("interpreter", "*"): Fp8GemmConfig(block_n=32, block_k=64),
}


@triton.jit(do_not_specialize=["m_count"])
def _kernel(
    x_ptr, weight_ptr, scale_ptr, x_scale_ptr, bias_ptr, y_ptr, m_count, n_count, k_count, x_row, weight_row, y_row,
    NATIVE: tl.constexpr, A8: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    live_m = m < m_count
    live_n = n < n_count
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, k_count, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        seen_x = live_m[None, :]
        seen_w = live_n[:, None]
        if RAGGED:
            seen_x = seen_x & (k < k_count)[:, None]
            seen_w = seen_w & (k < k_count)[None, :]
        x = tl.load(x_ptr + m[None, :] * x_row + k[:, None], mask=seen_x, other=0.0)  # [BLOCK_K, BLOCK_M]
        weight = tl.load(
            weight_ptr + n[:, None] * weight_row + k[None, :], mask=seen_w, other=0.0
        )  # [BLOCK_N, BLOCK_K]
        if A8 and NATIVE:
            acc = tl.dot(weight, x, acc, max_num_imprecise_acc=BLOCK_K)
        elif A8:
            acc = tl.dot(widened(weight, KIND, NATIVE), widened(x, KIND, NATIVE), acc)
        else:
            acc = tl.dot(widened(weight, KIND, NATIVE), x, acc, input_precision="ieee")
    acc *= tl.load(scale_ptr + n, mask=live_n, other=0.0)[:, None]
    if A8:
        acc *= tl.load(x_scale_ptr + m, mask=live_m, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=live_n, other=0.0).to(tl.float32)[:, None]
    y = tl.trans(acc).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + m[:, None] * y_row + n[None, :], y, mask=live_m[:, None] & live_n[None, :])


_KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, E4M3: tl.float16}


def fp8_gemm(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, y: torch.Tensor, *,
    x_scale: torch.Tensor | None = None, bias: torch.Tensor | None = None, natively: bool | None = None,
) -> None:  # fmt: skip
    """Fill y. `natively` is for tests: whether the hardware converts. Raises UnsupportedShape."""
    m, k = x.shape
    n = weight.shape[0]
    check_fp8(x, weight, y)
    assert (x.dtype == E4M3) == (x_scale is not None)
    hardware = native() if natively is None else natively
    config = pick(CONFIGS, "wide" if n >= WIDE_FROM else "narrow")
    _kernel[(triton.cdiv(m, config.block_m), triton.cdiv(n, config.block_n))](
        as_taken(x, hardware) if x_scale is not None else x, as_taken(weight, hardware), scale,
        scale if x_scale is None else x_scale, scale if bias is None else bias, y,
        m, n, k, x.stride(0), weight.stride(0), y.stride(0),
        NATIVE=hardware, A8=x_scale is not None, KIND=_KINDS[x.dtype], HAS_BIAS=bias is not None,
        RAGGED=k % config.block_k != 0, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


def check_fp8(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    """What both fp8 kernels need of their tensors. Raises UnsupportedShape."""
    k = x.shape[1]
    if k % 16:
        raise UnsupportedShape(
            f"rows of {k} weights are not a multiple of 16 for the fp8 kernels; "
            "serve these weights in bf16: TENUTO_ENGINE_DTYPE = bf16"
        )
    assert weight.dtype == E4M3
    assert weight.shape[1] == k
    assert y.shape == (x.shape[0], weight.shape[0])
    assert x.stride(1) == weight.stride(1) == y.stride(1) == 1


def meaning(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *,
    x_scale: torch.Tensor | None = None, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """y [M, N] in float64."""
    wide = x.double() if x_scale is None else x.float().double() * x_scale.double()[:, None]
    y = wide @ (weight.float().double() * scale.double()[:, None]).T
    return y if bias is None else y + bias.double()


def samples(size: Size) -> list[Sample]:
    """One row, a batch, and e4m3 activations; in production a projection of 4,096 and a wide one."""
    if size == "tiny":
        return [
            _sample("one row", 1, 64, 256, False),
            _sample("a ragged batch", 19, 40, 80, False),
            _sample("e4m3 activations", 19, 40, 144, True),
        ]
    return [
        _sample("one row", 1, 4096, 4096, False),
        _sample("16 rows, wide", 16, 28672, 2048, False),
        _sample("e4m3 activations", 16, 4096, 4096, True),
        _sample("e4m3 activations, wide", 16, 28672, 2048, True),
    ]


def _sample(name: str, m: int, n: int, k: int, a8: bool) -> Sample:
    generator = torch.Generator().manual_seed(13)
    here = device()
    weight, scale = (part.to(here) for part in quantise_fp8(torch.randn(n, k, generator=generator) * k**-0.5))
    x = torch.randn(m, k, generator=generator).to(torch.bfloat16).to(here)
    x_scale = None
    if a8:
        x, x_scale = quantise_fp8(x)
    bias = torch.randn(n, generator=generator).to(torch.bfloat16).to(here)
    y = torch.zeros(m, n, device=here)

    def launch() -> None:
        fp8_gemm(x, weight, scale, y, x_scale=x_scale, bias=bias)

    def worst() -> float:
        launch()
        return float((y.double() - meaning(x, weight, scale, x_scale=x_scale, bias=bias)).abs().max())

    moved = weight.numel() + 4 * n + x.numel() * x.element_size() + 4 * y.numel()
    return Sample(name, launch, worst, 2e-3 if a8 else 1e-4, moved, matrix_wants(n >= WIDE_FROM))
