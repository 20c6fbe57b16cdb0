"""Copies of whole pages, or of the first rows of them: gather, scatter and copy-on-write.

    source, target  int64 [pages, words]   8-byte words; the two may be one tensor if no page is both read and written
    source_at, target_at  int32 [N]        page i goes from source[source_at[i]] to target[target_at[i]]; -1: left out
    rows            int32 [N]              rows of the page that are copied; the ones after them become zero
    words           range                  of the page's words only these: a range of layers

None for source_at or target_at: page i itself, as in a staging buffer, so gather has only the one, scatter only the
other, and copy-on-write both. In a page, `row_words` words are a row and `page_rows` rows follow one another; that
repeats for every head, of keys, of values, and of every layer.
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


@dataclass(frozen=True)
class CopyConfig(Config):
    """`block`: words per program."""

    block: int = 2048


CONFIGS: dict[tuple[str, object], CopyConfig] = {
    ("interpreter", "*"): CopyConfig(block=1024),
    ("*", "*"): CopyConfig(num_warps=8),
}


@dataclass(frozen=True)
class PageShape:
    """Of a page as the kernel sees it."""

    row_words: int
    page_rows: int


@triton.jit
def _kernel(
    source_ptr, target_ptr, source_at_ptr, target_at_ptr, rows_ptr, begin, end, source_p, target_p,
    ROW: tl.constexpr, PAGE: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, PART: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (N, ceil((end - begin) / BLOCK))."""
    i = tl.program_id(0).to(tl.int64)
    word = begin + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = i
    target = i
    if GATHER:
        source = tl.load(source_at_ptr + i).to(tl.int64)
    if SCATTER:
        target = tl.load(target_at_ptr + i).to(tl.int64)
    there = (word < end) & (source >= 0) & (target >= 0)
    copied = there
    if PART:
        copied = there & (word // ROW % PAGE < tl.load(rows_ptr + i))
    value = tl.load(source_ptr + source * source_p + word, mask=copied, other=0)
    tl.store(target_ptr + target * target_p + word, value, mask=there)


def copy_pages(
    source: Tensor, target: Tensor, source_at: Tensor | None = None, target_at: Tensor | None = None,
    rows: Tensor | None = None, *, shape: PageShape, words: range | None = None,
) -> None:  # fmt: skip
    """See the module; `rows` None: all of them. Raises UnsupportedShape."""
    if source.dtype != torch.int64 or target.dtype != torch.int64:
        raise UnsupportedShape("pages are copied as 8-byte words; their bytes must be a multiple of 8")
    index = source_at if source_at is not None else target_at
    if index is None:
        raise UnsupportedShape("neither source nor target pages are named")
    words = range(min(source.shape[1], target.shape[1])) if words is None else words
    config = pick(CONFIGS, "*")
    _kernel[(index.shape[0], triton.cdiv(len(words), config.block))](
        source, target, index if source_at is None else source_at, index if target_at is None else target_at,
        index if rows is None else rows, words.start, words.stop, source.stride(0), target.stride(0),
        ROW=shape.row_words, PAGE=shape.page_rows, GATHER=source_at is not None, SCATTER=target_at is not None,
        PART=rows is not None, BLOCK=config.block, num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def meaning(
    source: Tensor, target: Tensor, source_at: list[int], target_at: list[int], rows: list[int], *, shape: PageShape,
    words: range | None = None,
) -> Tensor:  # fmt: skip
    """What `target` becomes."""
    result = target.cpu().clone()
    words = range(source.shape[1]) if words is None else words
    at = torch.arange(words.start, words.stop)
    row = at // shape.row_words % shape.page_rows
    for one, other, count in zip(source_at, target_at, rows, strict=True):
        if one >= 0 and other >= 0:
            result[other, at] = torch.where(row < count, source.cpu()[one, at], 0)
    return result


def samples(size: Size) -> list[Sample]:
    pages, words, count = (12, 2 * 3 * 16 * 8, 4) if size == "tiny" else (256, 8 * 2 * 8 * 16 * 32, 128)
    return [_sample(name, pages, words, count) for name in ("gather", "scatter", "copy-on-write")]


def _sample(name: str, pages: int, words: int, count: int) -> Sample:
    generator = torch.Generator().manual_seed(5)
    pool = torch.randint(-(2**62), 2**62, (pages, words), generator=generator).to(device())
    staging = torch.zeros(count, words, dtype=torch.int64, device=device())
    order = torch.randperm(pages, generator=generator).int()
    there, other = order[:count].clone(), order[count : 2 * count].clone()
    there[1] = -1
    rows = torch.full((count,), 16, dtype=torch.int32)
    rows[-1] = 5
    a, b, r = (x.to(device()) for x in (there, other, rows))
    shape = PageShape(8 if words < 4096 else 32, 16)
    one = list(range(count))
    calls = {
        "gather": (pool, staging, a, None, r, there.tolist(), one, rows.tolist()),
        "scatter": (staging, pool, None, a, None, one, there.tolist(), [16] * count),
        "copy-on-write": (pool, pool, a, b, r, there.tolist(), other.tolist(), rows.tolist()),
    }
    source, target, source_at, target_at, part, *plain = calls[name]

    def launch() -> None:
        copy_pages(source, target, source_at, target_at, part, shape=shape)

    def worst() -> float:
        expected = meaning(source, target, *plain, shape=shape)
        launch()
        return float((target.cpu() != expected).any())

    return Sample(name, launch, worst, 0.0, 2 * (count - 1) * words * 8)
