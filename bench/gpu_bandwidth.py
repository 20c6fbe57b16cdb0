"""Kernels that only move bytes, at sizes where launching them does not count: each as a fraction of a plain copy.

Contents do not matter here, the samples of `engine.kernels` say what is right. Dry, everything is tiny.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu_course import Course
from engine.kernels.copy_pages import PageShape, copy_pages
from engine.kernels.fp8_gemm import fp8_gemm
from engine.kernels.int4_gemm import int4_gemm
from engine.kernels.linear import linear, scratch_elements
from engine.kernels.merge import merge
from engine.kernels.mla_decode import config_for, mla_decode
from engine.kernels.paged_decode import paged_decode, split_tokens
from engine.kernels.rmsnorm import rmsnorm
from engine.kernels.shapes import Paged
from engine.kernels.swiglu import swiglu

_CASE_S = 3.0
PAGE = 16


@dataclass(frozen=True)
class Case:
    """`moved_bytes`: what a call must read and write at least."""

    kernel: str
    name: str
    moved_bytes: int
    launch: Callable[[], None]


def bandwidth(course: Course) -> None:
    for make in (attention, latent, pages, weights, rows):
        course.part(make.__name__, 0.0, lambda make=make: _measure(course, make(course)))  # type: ignore[misc]


def _measure(course: Course, cases: Iterator[Case]) -> None:
    for case in cases:  # one at a time: the tensors of each are gone before the next
        if course.enough_time(f"{case.kernel} {case.name}", _CASE_S):
            seconds = course.timed(case.launch)
            course.say("moved", kernel=case.kernel, case=case.name, bytes=case.moved_bytes, seconds=seconds)


def attention(course: Course) -> Iterator[Case]:
    """Decode of (sequences, tokens each), 8 KV heads of 128 with 4 query heads each."""
    sizes = [(2, 40)] if course.dry else [(1, 32_768), (16, 8192), (64, 4096)]
    heads, group, d = (1, 2, 32) if course.dry else (8, 4, 128)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for batch, tokens in sizes:
            blocks = batch * -(-tokens // PAGE)
            k, v = (torch.zeros(blocks, heads, PAGE, d, device=course.device).to(dtype) for _ in "kv")
            table = torch.randperm(blocks, device=course.device).int().view(batch, -1)
            length = torch.full((batch,), tokens, dtype=torch.int32, device=course.device)
            q = torch.zeros(batch, 1, heads * group, d, dtype=torch.bfloat16, device=course.device)
            splits = -(-tokens // split_tokens(d))
            part = torch.empty(batch, heads * group, splits, d, device=course.device)
            lse = torch.empty(batch, heads * group, splits, device=course.device)
            out = torch.empty(batch, heads * group, d, dtype=q.dtype, device=course.device)
            kv = Paged(k, v)

            def launch(
                q: Tensor = q, kv: Paged = kv, table: Tensor = table, length: Tensor = length, part: Tensor = part,
                lse: Tensor = lse, out: Tensor = out,
            ) -> None:  # fmt: skip
                paged_decode(q, kv, table, length, part, lse, scale=0.1)
                merge(part, lse, length, out, split=split_tokens(d))

            moved = 2 * batch * tokens * heads * d * dtype.itemsize
            yield Case("paged_decode", f"{_named(dtype)} {batch} x {tokens}", moved, launch)


def latent(course: Course) -> Iterator[Case]:
    batch, tokens, heads, dc, dr = (2, 40, 4, 32, 16) if course.dry else (32, 8192, 128, 512, 64)
    blocks = batch * -(-tokens // PAGE)
    cache = torch.zeros(blocks, PAGE, dc + dr, dtype=torch.bfloat16, device=course.device)
    table = torch.randperm(blocks, device=course.device).int().view(batch, -1)
    row = torch.arange(batch, device=course.device).int()
    length = torch.full((batch,), tokens, dtype=torch.int32, device=course.device)
    q = torch.zeros(batch, heads, dc + dr, dtype=torch.bfloat16, device=course.device)
    splits = -(-tokens // config_for(heads).split_tokens)
    part = torch.empty(batch, heads, splits, dc, device=course.device)
    lse = torch.empty(batch, heads, splits, device=course.device)
    moved = batch * tokens * (dc + dr) * 2
    yield Case(
        "mla_decode", f"{batch} x {tokens}", moved,
        lambda: mla_decode(q, cache, table, row, length, part, lse, scale=0.1),
    )  # fmt: skip


def pages(course: Course) -> Iterator[Case]:
    """Half of a pool of pages of 512 KiB, in a random order."""
    count, words = (8, 512) if course.dry else (8192, 65_536)
    pool = torch.zeros(count, words, dtype=torch.int64, device=course.device)
    staging = torch.zeros(count // 2, words, dtype=torch.int64, device=course.device)
    order = torch.randperm(count, device=course.device).int()
    one, other = order[: count // 2], order[count // 2 :]
    full = torch.full((count // 2,), PAGE, dtype=torch.int32, device=course.device)
    shape = PageShape(32, PAGE)
    moved = 2 * staging.numel() * 8
    yield Case("copy_pages", "gather", moved, lambda: copy_pages(pool, staging, one, None, full, shape=shape))
    yield Case("copy_pages", "scatter", moved, lambda: copy_pages(staging, pool, None, one, shape=shape))
    yield Case("copy_pages", "copy-on-write", moved, lambda: copy_pages(pool, pool, one, other, full, shape=shape))


def weights(course: Course) -> Iterator[Case]:
    """One token's product with a matrix [N, K]."""
    k = 256 if course.dry else 8192
    x = torch.zeros(1, k, dtype=torch.bfloat16, device=course.device)
    for n in (64,) if course.dry else (8192, 28_672):
        y = torch.empty(1, n, device=course.device)
        scratch = torch.empty(max(1, scratch_elements(1, n)), device=course.device)
        plain = torch.zeros(n, k, dtype=torch.bfloat16, device=course.device)
        yield Case(
            "linear", f"bf16 {n} x {k}", 2 * n * k,
            lambda plain=plain, y=y, scratch=scratch: linear(x, plain, y, None, scratch),  # type: ignore[misc]
        )  # fmt: skip
        packed = torch.zeros(n, k // 2, dtype=torch.uint8, device=course.device)
        groups = torch.ones(n, k // 128, dtype=torch.bfloat16, device=course.device)
        yield Case(
            "int4_gemm", f"{n} x {k}", n * k // 2 + groups.numel() * 2,
            lambda packed=packed, groups=groups, y=y: int4_gemm(x, packed, groups, y),  # type: ignore[misc]
        )  # fmt: skip
        small = torch.zeros(n, k, device=course.device).to(torch.float8_e4m3fn)
        scale = torch.ones(n, device=course.device)
        yield Case(
            "fp8_gemm", f"{n} x {k}", n * k,
            lambda small=small, scale=scale, y=y: fp8_gemm(x, small, scale, y),  # type: ignore[misc]
        )  # fmt: skip


def rows(course: Course) -> Iterator[Case]:
    """Norms and gates of a long prompt."""
    tokens, width = (4, 64) if course.dry else (16_384, 4096)
    delta, residual = (torch.zeros(tokens, width, device=course.device) for _ in range(2))
    weight = torch.ones(width, device=course.device)
    out = torch.empty(tokens, width, dtype=torch.bfloat16, device=course.device)
    moved = tokens * width * 14
    yield Case("rmsnorm", f"{tokens} x {width}", moved, lambda: rmsnorm(delta, residual, weight, out, eps=1e-5))
    both = torch.zeros(tokens, 2 * width, device=course.device)
    yield Case("swiglu", f"{tokens} x {width}", tokens * width * 10, lambda: swiglu(both, out))


def _named(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "e4m3"
