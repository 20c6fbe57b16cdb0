"""Paged attention in the interpreter: against float64, and the same bits however a context is cut."""

from __future__ import annotations

import pytest
import torch

from engine.errors import UnsupportedShape
from engine.kernels import merge, paged_decode, paged_prefill
from engine.kernels.paged_decode import decode_and_merge, split_tokens
from engine.kernels.paged_prefill import cut_tiles
from engine.kernels.shapes import Paged, poisoned
from tests.kernels.conftest import DTYPES

D = 32
SCALE = D**-0.5
FP8 = torch.float8_e4m3fn


def queries(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9)).to(dtype)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).abs().max())


@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_is_its_meaning_for_ragged_contexts_over_poisoned_pages(page: int, dtype: torch.dtype) -> None:
    kv, table, length = poisoned([0, 1, page - 1, page, page + 1, 3 * page + 5], 2, D, page, dtype)
    q = queries(6, 1, 4, D, dtype=dtype)
    found = decode_and_merge(q, kv, table, length, scale=SCALE)
    assert off(found, paged_decode.meaning(q, kv, table, length, scale=SCALE)) < DTYPES[dtype]
    assert not found[0].any()


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (1, 7), (1, 16)], ids=["mha-1", "mha-2", "gqa-7", "mqa-16"])
def test_any_number_of_query_heads_shares_a_kv_head(heads: tuple[int, int]) -> None:
    kv_heads, group = heads
    kv, table, length = poisoned([45], kv_heads, D, 16, torch.float32)
    q = queries(1, 1, kv_heads * group, D)
    found = decode_and_merge(q, kv, table, length, scale=SCALE)
    assert off(found, paged_decode.meaning(q, kv, table, length, scale=SCALE)) < 1e-5


@pytest.mark.parametrize("splits", [1, 2, 128])
def test_a_context_in_many_splits_is_merged_and_splits_beyond_it_are_not_looked_at(splits: int) -> None:
    length = splits * split_tokens(D) - 7
    kv, table, lengths = poisoned([length, 3], 1, D, 64, torch.float32)
    q = queries(2, 1, 2, D)
    found = decode_and_merge(q, kv, table, lengths, scale=SCALE, splits=splits)
    assert off(found, paged_decode.meaning(q, kv, table, lengths, scale=SCALE)) < 1e-5


@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize("new", [1, 2, 5])
def test_verified_rows_see_themselves_and_what_is_before_them_within_the_window(new: int, window: int) -> None:
    kv, table, length = poisoned([new, 77], 1, D, 16, torch.float32)
    q = queries(2, new, 3, D)
    found = decode_and_merge(q, kv, table, length, scale=SCALE, window=window)
    assert off(found, paged_decode.meaning(q, kv, table, length, scale=SCALE, window=window)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_kv_in_e4m3_is_read_with_its_scales(dtype: torch.dtype) -> None:
    kv, table, length = poisoned([33, 100], 1, D, 16, FP8)
    assert kv.k_scale != 1.0
    q = queries(2, 1, 4, D, dtype=dtype)
    found = decode_and_merge(q, kv, table, length, scale=SCALE)
    assert off(found, paged_decode.meaning(q, kv, table, length, scale=SCALE)) < DTYPES[dtype]


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_is_its_meaning_for_chunks_at_any_place(dtype: torch.dtype, window: int) -> None:
    chunks = [(0, 1), (0, 19), (37, 33), (64, 16)]
    kv, table, _ = poisoned([start + count for start, count in chunks], 2, D, 16, dtype)
    q = queries(sum(count for _, count in chunks), 6, D, dtype=dtype)
    found = prefill(q, kv, table, chunks, window)
    assert off(found, paged_prefill.meaning(q, kv, table, chunks, scale=SCALE, window=window)) < DTYPES[dtype]


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dtype", [*DTYPES, FP8], ids=str)
def test_a_token_has_the_same_bits_whole_in_chunks_of_any_size_and_decoded(dtype: torch.dtype, window: int) -> None:
    length, group = 75, 3
    kv, table, _ = poisoned([length], 1, D, 16, dtype)
    q = queries(length, group, D, dtype=torch.bfloat16 if dtype == FP8 else dtype)
    whole = prefill(q, kv, table, [(0, length)], window)
    at = 0
    for size in (7, 1, 31, 20, 16):
        chunk = prefill(q[at : at + size], kv, table, [(at, size)], window)
        assert torch.equal(chunk, whole[at : at + size])
        at += size
    assert at == length
    for last in (1, 2, 33, 50, length):
        lengths = torch.tensor([last, 5], dtype=torch.int32)
        both = torch.stack([q[last - 1], q[4]])[:, None]
        decoded = decode_and_merge(both, kv, table.expand(2, -1), lengths, scale=SCALE, window=window)
        assert torch.equal(decoded[:, 0], whole[[last - 1, 4]])
    verified = decode_and_merge(q[None, -5:], kv, table, torch.tensor([length]).int(), scale=SCALE, window=window)
    assert torch.equal(verified[0], whole[-5:])


def prefill(
    q: torch.Tensor, kv: Paged, table: torch.Tensor, chunks: list[tuple[int, int]], window: int
) -> torch.Tensor:
    tokens = paged_prefill.tile_tokens(D, q.shape[1] // kv.k.shape[1])
    tiles = torch.tensor(cut_tiles(chunks, tokens), dtype=torch.int32)
    out = torch.full_like(q, float("nan"))
    paged_prefill.paged_prefill(q, kv, table, tiles, out, scale=SCALE, window=window)
    return out


def test_a_shared_prefix_and_what_follows_it_are_merged_into_the_whole() -> None:
    prefix = 32
    kv, table, length = poisoned([prefix + 21], 1, D, 16, torch.float32)
    q = queries(1, 1, 4, D)
    one = decode_and_merge(q, kv, table[:, :2], torch.tensor([prefix]).int(), scale=SCALE)
    other = decode_and_merge(q, kv, table[:, 2:], length - prefix, scale=SCALE)
    logits = paged_logits(q, kv, table, int(length))
    lse = torch.stack([logits[:, :prefix].exp2().sum(1).log2(), logits[:, prefix:].exp2().sum(1).log2()], -1)[None]
    out = torch.empty(1, 4, D)
    part = torch.stack([one[0, 0], other[0, 0]], 1)[None]
    merge.merge(part, lse, torch.tensor([2]).int(), out, split=1)
    assert off(out[0], paged_decode.meaning(q, kv, table, length, scale=SCALE)[0, 0]) < 1e-5


def paged_logits(q: torch.Tensor, kv: Paged, table: torch.Tensor, length: int) -> torch.Tensor:
    """Base-2 logits [Hq, length] of the only KV head."""
    k = kv.k[table[0, : -(-length // 16)].long(), 0].flatten(0, 1)[:length]
    return q[0, 0] @ k.T * SCALE * paged_decode.LOG2_E


@pytest.mark.parametrize(
    ("q", "heads", "d", "page", "said"),
    [
        ((1, 1, 2, 48), 1, 48, 16, "head size of 48"),
        ((1, 1, 3, D), 2, D, 16, "3 query heads over 2"),
        ((1, 1, 2, D), 1, D, 8, "pages of 8"),
        ((1, 1, 2, 64), 1, D, 16, "head size of 64"),
        ((1, 17, 8, D), 1, D, 16, "17 tokens of 8 heads"),
    ],
)
def test_a_shape_that_the_kernel_has_not_is_refused_in_a_sentence(
    q: tuple[int, ...], heads: int, d: int, page: int, said: str
) -> None:
    kv = Paged(*(torch.zeros(2, heads, page, d) for _ in "kv"))
    table, length = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(UnsupportedShape, match=said):
        decode_and_merge(queries(*q), kv, table, length, scale=1.0)


def test_kv_of_another_type_than_the_queries_is_refused() -> None:
    kv = Paged(*(torch.zeros(2, 1, 16, D, dtype=torch.float16) for _ in "kv"))
    with pytest.raises(UnsupportedShape, match="e4m3"):
        decode_and_merge(queries(1, 1, 1, D), kv, torch.zeros(1, 2).int(), torch.ones(1).int(), scale=1.0)
