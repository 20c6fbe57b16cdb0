"""What a token leaves in the latent cache of an MLA model, and the rotary part of its queries.

    down      fp32 [T, DC + DR]      the latent before its norm, and the key that all heads share before it is turned
    norm      fp32 [DC]              weight of the latent's RMS norm
    query     fp32 [T, H, DN + DR]   queries; the last DR of each head are turned, the others are not looked at
    cos, sin  fp32 [positions, DR / 2]
    position  int32 [T]
    slot      int32 [T]              block * page + row; -1: a padding row, of which nothing is written
    latent    [blocks, page, DC + DR]  out: one layer of a pool
    turned    [T, H, DR]             out: any strides but 1 for the last, as a part of the absorbed queries

DeepSeek-V2 (2024), section 2.1.
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
class MlaWriteConfig(Config):
    """`tokens` of one program."""

    tokens: int = 1


CONFIGS: dict[tuple[str, object], MlaWriteConfig] = {
    ("interpreter", "*"): MlaWriteConfig(tokens=16),
    ("*", "*"): MlaWriteConfig(num_warps=2),
}


@triton.jit
def _kernel(
    down_ptr, norm_ptr, query_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, latent_ptr, turned_ptr, eps, tokens,
    down_t, query_t, query_h, latent_block, latent_row, turned_t, turned_h,
    DC: tl.constexpr, DN: tl.constexpr, DR: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T / TOKENS), 1 + H): the latent, then each head's query."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    t = token.to(tl.int64)[:, None]
    live = there[:, None]
    head = tl.program_id(1) - 1
    HALF: tl.constexpr = DR // 2
    i = tl.arange(0, HALF)[None, :]
    position = tl.load(position_ptr + token, mask=there, other=0)[:, None]
    cos = tl.load(cos_ptr + position * HALF + i)
    sin = tl.load(sin_ptr + position * HALF + i)
    if head < 0:  # noqa: SIM108 (pointers: both sides are built, one is taken)
        source = down_ptr + t * down_t + DC
    else:
        source = query_ptr + t * query_t + head * query_h + DN
    a = tl.load(source + i, mask=live, other=0.0)
    b = tl.load(source + HALF + i, mask=live, other=0.0)
    first = a * cos - b * sin
    second = b * cos + a * sin
    if head < 0:
        slot = tl.load(slot_ptr + token, mask=there, other=-1).to(tl.int64)[:, None]
        written = slot >= 0
        out = latent_ptr + slot // PAGE * latent_block + slot % PAGE * latent_row
        c = tl.arange(0, DC)[None, :]
        x = tl.load(down_ptr + t * down_t + c, mask=live, other=0.0)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / DC + eps)
        x = x * scale[:, None] * tl.load(norm_ptr + c)
        tl.store(out + c, x.to(latent_ptr.dtype.element_ty), mask=written)
        tl.store(out + DC + i, first.to(latent_ptr.dtype.element_ty), mask=written)
        tl.store(out + DC + HALF + i, second.to(latent_ptr.dtype.element_ty), mask=written)
    else:
        out = turned_ptr + t * turned_t + head * turned_h
        tl.store(out + i, first.to(turned_ptr.dtype.element_ty), mask=live)
        tl.store(out + HALF + i, second.to(turned_ptr.dtype.element_ty), mask=live)


def mla_write(
    down: Tensor, norm: Tensor, query: Tensor, cos: Tensor, sin: Tensor, position: Tensor, slot: Tensor,
    latent: Tensor, turned: Tensor, *, eps: float,
) -> None:  # fmt: skip
    """See the module. Raises UnsupportedShape."""
    rows, heads, dr = turned.shape
    dc, dn = down.shape[1] - dr, query.shape[2] - dr
    if dc & (dc - 1) or dr & (dr - 1) or dr < 2 or latent.shape[2] != dc + dr or norm.shape[0] != dc:
        raise UnsupportedShape(f"a latent of {dc} with {dr} rotated values; powers of two are supported on a GPU")
    config = pick(CONFIGS, dc)
    _kernel[(triton.cdiv(rows, config.tokens), 1 + heads)](
        down, norm, query, cos, sin, position, slot, latent, turned, eps, rows,
        down.stride(0), query.stride(0), query.stride(1), latent.stride(0), latent.stride(1),
        turned.stride(0), turned.stride(1),
        DC=dc, DN=dn, DR=dr, PAGE=latent.shape[1], TOKENS=config.tokens,
        num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def meaning(
    down: Tensor, norm: Tensor, query: Tensor, cos: Tensor, sin: Tensor, position: Tensor, dr: int, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Float64 (latent [T, DC + DR], turned [T, H, DR])."""
    c, s = (table.cpu().double()[position.cpu().long()] for table in (cos, sin))

    def turned(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    x, key = down.cpu().double().split([down.shape[1] - dr, dr], 1)
    normed = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * norm.cpu().double()
    return torch.cat([normed, turned(key, c, s)], 1), turned(query.cpu().double()[..., -dr:], c[:, None], s[:, None])


def samples(size: Size) -> list[Sample]:
    rows, heads, dc, dn, dr = (3, 2, 32, 16, 8) if size == "tiny" else (64, 16, 512, 128, 64)
    generator = torch.Generator().manual_seed(7)
    here, blocks, page = device(), 8, 16
    down = torch.randn(rows, dc + dr, generator=generator).to(here)
    query = torch.randn(rows, heads, dn + dr, generator=generator).to(here)
    norm = torch.rand(dc, generator=generator).to(here)
    angles = torch.outer(torch.arange(64.0), 1e4 ** (-torch.arange(dr // 2) / (dr // 2)))
    cos, sin = angles.cos().to(here), angles.sin().to(here)
    position = (torch.arange(rows) * 5 % 64).int().to(here)
    slots = torch.randperm(blocks * page, generator=generator)[:rows].int()
    slots[1] = -1
    slot = slots.to(here)
    latent = torch.zeros(blocks, page, dc + dr, dtype=torch.bfloat16, device=here)
    absorbed = torch.zeros(rows, heads, dc + dr, dtype=torch.bfloat16, device=here)

    def launch() -> None:
        mla_write(down, norm, query, cos, sin, position, slot, latent, absorbed[..., dc:], eps=1e-6)

    def worst() -> float:
        launch()
        wanted, turned = meaning(down, norm, query, cos, sin, position, dr, eps=1e-6)
        live = slots >= 0
        flat = latent.cpu().double().view(-1, dc + dr)
        off = (flat[slots[live].long()] - wanted[live]).abs().max()
        left = torch.ones(len(flat), dtype=torch.bool)
        left[slots[live].long()] = False
        return float(max(off, flat[left].abs().max(), (absorbed.cpu().double()[..., dc:] - turned).abs().max()))

    return [Sample("latent", launch, worst, 0.02, down.numel() * 4 + rows * (dc + dr) * 2 + rows * heads * dr * 6)]
