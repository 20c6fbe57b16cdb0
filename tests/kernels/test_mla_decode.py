"""Latent attention in the interpreter: against float64, over pages that hold NaN where nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from engine.errors import UnsupportedShape
from engine.kernels.merge import merge
from engine.kernels.mla_decode import MlaConfig, meaning, merged, mla_decode

DC, DR = 32, 16
SCALE = (DC + DR) ** -0.5
NAN = float("nan")


@dataclass(frozen=True)
class Cache:
    latent: torch.Tensor  # [blocks, page, DC + DR], block 0 nobody's
    table: torch.Tensor  # [sequences, pages + 1], naming block 0 where a context has no page


def cache_of(lengths: Sequence[int], page: int, dtype: torch.dtype = torch.float32, pages: int = 0) -> Cache:
    generator = torch.Generator().manual_seed(sum(lengths) + page)
    owned = [-(-length // page) for length in lengths]
    wide = max(*owned, pages)
    latent = torch.randn(sum(owned) + 1, page, DC + DR, generator=generator)
    table = torch.zeros(len(lengths), wide, dtype=torch.int32)
    order = (torch.randperm(sum(owned), generator=generator) + 1).tolist()
    latent[0] = NAN
    for row, length in enumerate(lengths):
        for at in range(owned[row]):
            table[row, at] = order.pop()
            latent[table[row, at], max(0, length - at * page) :] = NAN
    return Cache(latent.to(dtype), table)


def queries(rows: int, heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, heads, DC + DR, generator=torch.Generator().manual_seed(rows)).to(dtype)


def run(
    q: torch.Tensor, cache: Cache, rows: Sequence[int], seen: Sequence[int], splits: int, split_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results, NaN where the kernel wrote nothing."""
    part = torch.full((len(rows), q.shape[1], splits, DC), NAN)
    lse = torch.full((len(rows), q.shape[1], splits), NAN)
    config = MlaConfig(block_heads=16, block_tokens=min(16, split_tokens), split_tokens=split_tokens)
    table, length = torch.tensor(rows, dtype=torch.int32), torch.tensor(seen, dtype=torch.int32)
    mla_decode(q, cache.latent, cache.table, table, length, part, lse, scale=SCALE, config=config)
    return part, lse


def meant(q: torch.Tensor, cache: Cache, rows: Sequence[int], seen: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return meaning(q, cache.latent, cache.table, torch.tensor(rows), torch.tensor(seen), scale=SCALE, dc=DC)


@pytest.mark.parametrize(
    ("page", "splits", "split_tokens", "heads", "lengths", "dtype", "bound"),
    [
        (16, 4, 16, 1, (1, 0, 16, 17, 63), torch.float32, 1e-6),
        (32, 3, 32, 20, (33, 96, 5), torch.float16, 2e-3),
        (64, 1, 128, 16, (128, 127), torch.bfloat16, 2e-2),
        (16, 128, 16, 3, (300,), torch.float32, 1e-6),
    ],
)
def test_ragged_contexts_over_poisoned_pages_equal_float64(page, splits, split_tokens, heads, lengths, dtype, bound):
    cache = cache_of(lengths, page, dtype)
    q = queries(len(lengths), heads, dtype)
    part, lse = run(q, cache, range(len(lengths)), lengths, splits, split_tokens)
    out, total = merged(part, lse)
    wanted, wanted_total = meant(q, cache, range(len(lengths)), lengths)
    assert float((out - wanted).abs().max()) <= bound
    torch.testing.assert_close(total, wanted_total, atol=bound, rtol=0)


def test_an_empty_split_says_so_and_the_merge_kernel_leaves_it_out():
    lengths = (40, 0, 3)
    cache, q = cache_of(lengths, 16), queries(3, 4)
    part, lse = run(q, cache, (0, 1, 2), lengths, 5, 16)
    assert (lse == -torch.inf).sum((1, 2)).tolist() == [2 * 4, 5 * 4, 4 * 4]
    out = torch.empty(3, 4, DC)
    merge(part, lse, torch.tensor(lengths, dtype=torch.int32), out, split=16)
    assert float((out - meant(q, cache, (0, 1, 2), lengths)[0]).abs().max()) <= 1e-6


def test_a_padding_row_reads_nothing():
    cache, q = cache_of((20,), 16), queries(2, 4)
    _, lse = run(q, cache, (-1, 0), (20, 20), 2, 16)
    assert lse[0].eq(-torch.inf).all()
    assert lse[1].isfinite().all()


def test_a_chunk_of_a_prompt_has_the_bits_of_its_rows_decoded_one_by_one():
    cache, q = cache_of((9, 37), 16), queries(5, 6)
    rows, seen = (1, 1, 1, 0, 1), (34, 35, 36, 9, 37)
    part, lse = run(q, cache, rows, seen, 3, 16)
    for at in range(5):
        alone_part, alone_lse = run(q[at : at + 1], cache, rows[at : at + 1], seen[at : at + 1], 3, 16)
        torch.testing.assert_close(part[at], alone_part[0], atol=0, rtol=0, equal_nan=True)
        assert torch.equal(lse[at], alone_lse[0])


def test_the_bits_of_a_split_do_not_depend_on_how_many_there_are():
    cache, q = cache_of((37,), 16), queries(1, 4)
    few, _ = run(q, cache, (0,), (37,), 3, 16)
    many, _ = run(q, cache, (0,), (37,), 7, 16)
    assert torch.equal(few, many[:, :, :3])


@pytest.mark.parametrize(
    ("q", "latent", "dc", "splits", "said"),
    [
        ((1, 4, 48), (1, 16, 40), 32, 1, "queries of 48 dimensions do not fit a latent cache of 40"),
        (
            (1, 4, 72),
            (1, 16, 72),
            48,
            1,
            "kv_lora_rank 48 and qk_rope_head_dim 24 must be powers of two.*backend = cpu",
        ),
        ((1, 4, 48), (1, 8, 48), 32, 1, "a page of 8 tokens: the MLA kernel reads pages of 16, 32 or 64"),
        ((1, 4, 48), (9, 16, 48), 32, 1, "1 splits of 64 tokens do not cover 9 pages of 16"),
    ],
)
def test_a_shape_that_the_kernel_does_not_take_is_refused_in_a_sentence(q, latent, dc, splits, said):
    one, table = torch.ones(1, dtype=torch.int32), torch.zeros(1, latent[0], dtype=torch.int32)
    part, lse = torch.empty(1, 4, splits, dc), torch.empty(1, 4, splits)
    with pytest.raises(UnsupportedShape, match=said):
        mla_decode(torch.empty(q), torch.empty(latent), table, one, one, part, lse, scale=1.0)
