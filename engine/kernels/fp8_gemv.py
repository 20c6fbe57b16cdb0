"""A few vectors times e4m3 weights, without matrix instructions: each weight is read once a vector.

x:      [M, K] bf16, fp16 or fp32, stride 1 within a row; meant for M of one or two; K a multiple of 16
weight: e4m3 [N, K], stride 1 within a row
scale:  fp32 [N], see `fp8`
y:      [M, N], any float type; y = x @ (weight * scale).T

Every sum is in fp32 and in one order. Not the bits of `fp8_gemm`: use one of them for all rows that must agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels import fp8_gemm
from engine.kernels.fp8 import as_taken, native, quantise_fp8, widened
from engine.kernels.sample import Sample, Size
from engine.kernels.target import Config, device, pick


@dataclass(frozen=True, kw_only=True)
class Fp8GemvConfig(Config):
    """block_n: weight rows of one program; block_k: weights of a row in one iteration."""

    block_n: int
    block_k: int


CONFIGS: dict[tuple[str, object], Fp8GemvConfig] = {
    ("*", "*"): Fp8GemvConfig(block_n=8, block_k=512, num_warps=4),
    ("interpreter", "*"): Fp8GemvConfig(block_n=16, block_k=256),
}

meaning = fp8_gemm.meaning


@triton.jit
def _kernel(
    x_ptr, weight_ptr, scale_ptr, y_ptr, n_count, k_count, x_row, weight_row, y_row,
    NATIVE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    m = tl.program_id(1).to(tl.int64)
    live = n < n_count
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, k_count, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < k_count
        weight_at = weight_ptr + n[:, None] * weight_row + k[None, :]
        weight = tl.load(weight_at, mask=live[:, None] & inside[None, :], other=0.0)
        x = tl.load(x_ptr + m * x_row + k, mask=inside, other=0.0).to(tl.float32)
        acc += widened(weight, tl.float32, NATIVE) * x[None, :]
    y = tl.sum(acc, 1) * tl.load(scale_ptr + n, mask=live, other=0.0)
    tl.store(y_ptr + m * y_row + n, y.to(y_ptr.dtype.element_ty), mask=live)


def fp8_gemv(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, y: torch.Tensor, *, natively: bool | None = None
) -> None:
    """Fill y. `natively` is for tests: whether the hardware converts. Raises UnsupportedShape."""
    m, k = x.shape
    n = weight.shape[0]
    fp8_gemm.check_fp8(x, weight, y)
    hardware = native() if natively is None else natively
    config = pick(CONFIGS, n)
    _kernel[(triton.cdiv(n, config.block_n), m)](
        x, as_taken(weight, hardware), scale, y, n, k, x.stride(0), weight.stride(0), y.stride(0),
        NATIVE=hardware, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


def samples(size: Size) -> list[Sample]:
    """Square, and with rows that do not fill the last tile."""
    if size == "tiny":
        return [_sample("two vectors, ragged", 2, 40, 400)]
    return [_sample("one vector", 1, 4096, 4096), _sample("a down projection", 1, 4096, 14336)]


def _sample(name: str, m: int, n: int, k: int) -> Sample:
    generator = torch.Generator().manual_seed(14)
    here = device()
    weight, scale = (part.to(here) for part in quantise_fp8(torch.randn(n, k, generator=generator) * k**-0.5))
    x = torch.randn(m, k, generator=generator).to(torch.bfloat16).to(here)
    y = torch.zeros(m, n, device=here)

    def launch() -> None:
        fp8_gemv(x, weight, scale, y)

    def worst() -> float:
        launch()
        return float((y.double() - meaning(x, weight, scale)).abs().max())

    return Sample(name, launch, worst, 1e-4, weight.numel() + 4 * n + 2 * x.numel() + 4 * y.numel())
