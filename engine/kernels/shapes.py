"""Shapes that several kernels share, and the checks at their edge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import UnsupportedShape
from engine.kernels.target import arch, device

MIN_ROWS = 16  # what the matrix instructions of all targets take at least
PAGES = (16, 32, 64)
WITHOUT_E4M3 = ("sm_80", "sm_86", "sm_87")  # no conversion in hardware, and none by the compiler


@dataclass(frozen=True)
class Paged:
    """One layer's KV: k and v [blocks, Hkv, page, D] with the same strides; values are what is stored times a scale."""

    k: Tensor
    v: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


def rows_of(rows: int) -> int:
    """The tile that holds so many rows: a power of two, MIN_ROWS at least."""
    return max(MIN_ROWS, 1 << (rows - 1).bit_length())


def check_paged(q: Tensor, kv: Paged) -> int:
    """Query heads per KV head. q [..., Hq, D]. Raises UnsupportedShape."""
    heads, d = q.shape[-2:]
    _, kv_heads, page, kv_d = kv.k.shape
    if d & (d - 1) or not 16 <= d <= 256 or kv_d != d:
        raise UnsupportedShape(f"a head size of {d}; powers of two from 16 to 256 are supported on a GPU")
    if heads % kv_heads:
        raise UnsupportedShape(f"{heads} query heads over {kv_heads} KV heads; they must divide")
    if page not in PAGES:
        raise UnsupportedShape(f"pages of {page} tokens; {', '.join(map(str, PAGES))} are supported")
    if kv.k.stride() != kv.v.stride() or kv.k.stride(3) != 1 or q.stride(-1) != 1:
        raise UnsupportedShape("heads must be contiguous, and K and V must have the same strides")
    if kv.k.dtype != q.dtype and kv.k.dtype != torch.float8_e4m3fn:
        raise UnsupportedShape(f"KV in {kv.k.dtype} for queries in {q.dtype}; the same type or e4m3 is supported")
    if kv.k.dtype == torch.float8_e4m3fn and arch() in WITHOUT_E4M3:
        raise UnsupportedShape(f"KV in e4m3 needs sm_89 or newer, this is {arch()}: keep KV in the model's own type")
    return int(heads // kv_heads)


def poisoned(
    lengths: list[int], kv_heads: int, d: int, page: int, dtype: torch.dtype, scale: float = 0.5, seed: int = 0
) -> tuple[Paged, Tensor, Tensor]:
    """Random KV of sequences with these lengths: (kv, table, length). Pages nobody owns, the tail of each last page and
    what the table names beyond a context hold NaN: a kernel that looks there shows it."""
    generator = torch.Generator().manual_seed(seed)
    pages = [max(1, -(-n // page)) for n in lengths]
    blocks = sum(pages) + 1
    order = (torch.randperm(blocks - 1, generator=generator) + 1).tolist()  # block 0 is nobody's
    table = torch.zeros(len(lengths), max(pages) + 1, dtype=torch.int32)
    k, v = (torch.randn(blocks, kv_heads, page, d, generator=generator) for _ in "kv")
    nothing = float("nan")
    k[0] = v[0] = nothing
    for b, n in enumerate(lengths):
        for at in range(pages[b]):
            block = table[b, at] = order.pop()
            k[block, :, max(0, n - at * page) :] = nothing
            v[block, :, max(0, n - at * page) :] = nothing
    fp8 = dtype == torch.float8_e4m3fn
    k, v = ((x / scale if fp8 else x).to(dtype).to(device()) for x in (k, v))
    kv = Paged(k, v, scale, scale) if fp8 else Paged(k, v)
    return kv, table.to(device()), torch.tensor(lengths, dtype=torch.int32, device=device())
