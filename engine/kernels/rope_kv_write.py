"""Rotary embedding of queries and keys, and the write of keys and values into their pages.

    qkv     fp32 [T, (Hq + 2 Hkv) * D]  bias included
    cos, sin fp32 [positions, D / 2]    of each pair (i, i + D/2): halves are rotated
    position int32 [T]
    slot    int32 [T]                   block * page + row of the page; -1: a padding row, of which nothing is written
    q       [T, Hq, D]                  out
    k, v    [blocks, Hkv, page, D]      out: one layer of a pool, as in `paged_decode`; e4m3 is divided by its scale,
                                        and what is out of its range becomes the largest that is not
    q_norm, k_norm  fp32 [D] or None    RMS norm of each head before it is turned

Su et al., "RoFormer", 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import UnsupportedShape
from engine.kernels.sample import Sample, Size
from engine.kernels.shapes import Paged, check_paged
from engine.kernels.target import Config, device, pick


@dataclass(frozen=True, kw_only=True)
class RopeConfig(Config):
    """`tokens` of one program."""

    tokens: int = 1


CONFIGS: dict[tuple[str, object], RopeConfig] = {
    ("interpreter", "*"): RopeConfig(tokens=16),
    ("*", "*"): RopeConfig(num_warps=1),
}


@triton.jit
def _stored(values, KIND: tl.constexpr):
    if tl.float8e4nv == KIND:
        values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    return values.to(KIND)


@triton.jit
def _kernel(
    qkv_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, q_norm_ptr, k_norm_ptr, q_ptr, k_ptr, v_ptr,
    tokens, qkv_t, q_t, kv_block, kv_head, kv_row, inverse_k, inverse_v, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T / TOKENS), Hq + 2 Hkv)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    t = token.to(tl.int64)[:, None]
    live = there[:, None]
    head = tl.program_id(1)
    HALF: tl.constexpr = D // 2
    i = tl.arange(0, HALF)[None, :]
    a = tl.load(qkv_ptr + t * qkv_t + head * D + i, mask=live, other=0.0)
    b = tl.load(qkv_ptr + t * qkv_t + head * D + HALF + i, mask=live, other=0.0)
    slot = tl.load(slot_ptr + token, mask=there, other=-1).to(tl.int64)[:, None]
    page_at = slot // PAGE * kv_block + slot % PAGE * kv_row
    written = slot >= 0
    if head >= HEADS + KV_HEADS:
        v_at = v_ptr + page_at + (head - HEADS - KV_HEADS) * kv_head
        tl.store(v_at + i, _stored(a * inverse_v, v_ptr.dtype.element_ty), mask=written)
        tl.store(v_at + HALF + i, _stored(b * inverse_v, v_ptr.dtype.element_ty), mask=written)
    else:
        if NORM:
            scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)
            norm_ptr = q_norm_ptr if head < HEADS else k_norm_ptr
            a = a * scale[:, None] * tl.load(norm_ptr + i)
            b = b * scale[:, None] * tl.load(norm_ptr + HALF + i)
        position = tl.load(position_ptr + token, mask=there, other=0)[:, None]
        cos = tl.load(cos_ptr + position * HALF + i)
        sin = tl.load(sin_ptr + position * HALF + i)
        first = a * cos - b * sin
        second = b * cos + a * sin
        if head < HEADS:
            q_at = q_ptr + t * q_t + head * D
            tl.store(q_at + i, first.to(q_ptr.dtype.element_ty), mask=live)
            tl.store(q_at + HALF + i, second.to(q_ptr.dtype.element_ty), mask=live)
        else:
            k_at = k_ptr + page_at + (head - HEADS) * kv_head
            tl.store(k_at + i, _stored(first * inverse_k, k_ptr.dtype.element_ty), mask=written)
            tl.store(k_at + HALF + i, _stored(second * inverse_k, k_ptr.dtype.element_ty), mask=written)


def rope_kv_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, position: Tensor, slot: Tensor, q: Tensor, kv: Paged,
    norms: tuple[Tensor, Tensor] | None = None, *, eps: float = 0.0,
) -> None:  # fmt: skip
    """See the module; `norms`: (q_norm, k_norm), with `eps`. Raises UnsupportedShape."""
    rows, heads, d = q.shape
    check_paged(q, kv)
    kv_heads, page = kv.k.shape[1:3]
    if qkv.shape[1] != (heads + 2 * kv_heads) * d:
        raise UnsupportedShape(f"{qkv.shape[1]} numbers a token for {heads} + 2 * {kv_heads} heads of {d}")
    config = pick(CONFIGS, d)
    q_norm, k_norm = norms or (cos, cos)
    _kernel[(triton.cdiv(rows, config.tokens), heads + 2 * kv_heads)](
        qkv, cos, sin, position, slot, q_norm, k_norm, q, kv.k, kv.v,
        rows, qkv.stride(0), q.stride(0), kv.k.stride(0), kv.k.stride(1), kv.k.stride(2),
        1 / kv.k_scale, 1 / kv.v_scale, eps,
        HEADS=heads, KV_HEADS=kv_heads, D=d, PAGE=page, NORM=norms is not None,
        TOKENS=config.tokens, num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def meaning(
    qkv: Tensor, cos: Tensor, sin: Tensor, position: Tensor, heads: int, kv_heads: int,
    norms: tuple[Tensor, Tensor] | None = None, *, eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Float64 q [T, Hq, D], k and v [T, Hkv, D]."""
    x = qkv.cpu().double().view(qkv.shape[0], heads + 2 * kv_heads, -1)
    q, k, v = x.split([heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = (
            y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps) * w.cpu().double()
            for y, w in zip((q, k), norms, strict=True)
        )
    c, s = (table.cpu().double()[position.cpu().long()][:, None] for table in (cos, sin))

    def turned(y: Tensor) -> Tensor:
        a, b = y.chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    return turned(q), turned(k), v


def samples(size: Size) -> list[Sample]:
    shapes = {"plain": (False, torch.bfloat16), "norm": (True, torch.bfloat16), "e4m3": (False, torch.float8_e4m3fn)}
    return [_sample(name, size, *shape) for name, shape in shapes.items()]


def _sample(name: str, size: Size, norm: bool, dtype: torch.dtype) -> Sample:
    rows, heads, kv_heads, d, page, blocks = (5, 4, 1, 32, 16, 4) if size == "tiny" else (64, 32, 8, 128, 16, 16)
    generator = torch.Generator().manual_seed(3)
    here = device()
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * d, generator=generator).to(here)
    angles = torch.outer(torch.arange(64.0), 1e4 ** (-torch.arange(d // 2) / (d // 2)))
    cos, sin = angles.cos().to(here), angles.sin().to(here)
    position = (torch.arange(rows) * 7 % 64).int().to(here)
    slots = torch.randperm(blocks * page, generator=generator)[:rows].int()
    slots[1] = -1
    slot = slots.to(here)
    norms = tuple(torch.rand(d, generator=generator).to(here) for _ in range(2)) if norm else None
    q = torch.empty(rows, heads, d, dtype=torch.bfloat16, device=here)
    scale = 0.25 if dtype == torch.float8_e4m3fn else 1.0
    k, v = (torch.zeros(blocks, kv_heads, page, d, dtype=dtype, device=here) for _ in range(2))
    kv = Paged(k, v, scale, scale)

    def launch() -> None:
        rope_kv_write(qkv, cos, sin, position, slot, q, kv, norms, eps=1e-6)  # type: ignore[arg-type]

    def worst() -> float:
        launch()
        expected = meaning(qkv, cos, sin, position, heads, kv_heads, norms, eps=1e-6)  # type: ignore[arg-type]
        pages = [x.cpu().double().transpose(1, 2).reshape(-1, kv_heads, d) * scale for x in (k, v)]
        live = slots >= 0
        written = [page[slots[live].long()] for page in pages]
        left = torch.ones(blocks * page, dtype=torch.bool)
        left[slots[live].long()] = False
        touched = max(float(page[left].abs().max()) for page in pages)
        found = [q.cpu().double(), *written]
        wanted = [expected[0], expected[1][live], expected[2][live]]
        return max(touched, *(float((f - w).abs().max()) for f, w in zip(found, wanted, strict=True)))

    bound = 0.02 if scale == 1.0 else 0.13
    return Sample(
        name, launch, worst, bound, qkv.numel() * 4 + q.numel() * 2 + 2 * rows * kv_heads * d * k.element_size()
    )
