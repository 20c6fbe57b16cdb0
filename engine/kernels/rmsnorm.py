"""RMS norm of a residual stream, after what the layer before gave has been added to it.

    delta     fp32 [T, H] or None   added to the residual first
    residual  fp32 [T, H]           in place; not written where delta is None
    weight    fp32 [H]
    out       [T, H]                any float dtype: residual / sqrt(mean(residual^2) + eps) * weight

Rows of all arguments may be strided; their elements are contiguous. Zhang and Sennrich, "Root Mean Square Layer
Normalization", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import UnsupportedShape
from engine.kernels.sample import Sample, Size
from engine.kernels.target import Config, device, pick


@dataclass(frozen=True, kw_only=True)
class NormConfig(Config):
    """`rows` of one program."""

    rows: int = 1


CONFIGS: dict[tuple[str, object], NormConfig] = {
    ("interpreter", 1024): NormConfig(rows=16),
    ("*", 1024): NormConfig(num_warps=4),
    ("*", "*"): NormConfig(num_warps=8),
}
_MAX = 65_536


@triton.jit
def _kernel(
    delta_ptr, residual_ptr, weight_ptr, out_ptr, rows, width, eps, delta_t, residual_t, out_t,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T / ROWS),)."""
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    there = (t < rows) & (column < width)
    x = tl.load(residual_ptr + t * residual_t + column, mask=there, other=0.0)
    if ADD:
        x += tl.load(delta_ptr + t * delta_t + column, mask=there, other=0.0)
        tl.store(residual_ptr + t * residual_t + column, x, mask=there)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0)
    tl.store(out_ptr + t * out_t + column, (x * scale[:, None] * weight).to(out_ptr.dtype.element_ty), mask=there)


def rmsnorm(delta: Tensor | None, residual: Tensor, weight: Tensor, out: Tensor, *, eps: float) -> None:
    """See the module. Raises UnsupportedShape."""
    rows, width = residual.shape
    if width > _MAX:
        raise UnsupportedShape(f"a norm over {width} numbers; {_MAX} are possible")
    block = triton.next_power_of_2(width)
    config = pick(CONFIGS, 1024 if block <= 1024 else block)
    _kernel[(triton.cdiv(rows, config.rows),)](
        residual if delta is None else delta, residual, weight, out, rows, width, eps,
        residual.stride(0) if delta is None else delta.stride(0), residual.stride(0), out.stride(0),
        ADD=delta is not None, ROWS=config.rows, BLOCK=block, num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def meaning(delta: Tensor | None, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Float64 (residual, out)."""
    x = residual.cpu().double() + (0 if delta is None else delta.cpu().double())
    return x, x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.cpu().double()


def samples(size: Size) -> list[Sample]:
    rows, width = (3, 72) if size == "tiny" else (256, 4096)
    return [_sample(name, rows, width, add) for name, add in (("add", True), ("alone", False))]


def _sample(name: str, rows: int, width: int, add: bool) -> Sample:
    generator = torch.Generator().manual_seed(2)
    first, delta = (torch.randn(rows, width, generator=generator).to(device()) for _ in range(2))
    weight = torch.randn(width, generator=generator).to(device())
    residual, out = first.clone(), torch.empty(rows, width, dtype=torch.bfloat16, device=device())

    def launch() -> None:
        rmsnorm(delta if add else None, residual, weight, out, eps=1e-5)

    def worst() -> float:
        residual.copy_(first)
        launch()
        expected, normed = meaning(delta if add else None, first, weight, eps=1e-5)
        off = ((out.cpu().double() - normed).abs() / normed.abs().clamp(min=1)).max()
        return float(max(off, 1000 * (residual.cpu().double() - expected).abs().max()))

    return Sample(name, launch, worst, 0.005, rows * width * (4 * (3 if add else 1) + 2))
