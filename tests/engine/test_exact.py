"""Bits of the exact mode: whole = chunked = decoded alone = in a batch = restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends import Tile
from engine.backends.face import cut
from engine.facts import PAGE_SIZE
from tests.engine.conftest import MODELS, Loaded, load, model_path, models_dir
from tests.engine.tiny import write_tiny
from tests.engine.tiny_hf import FAMILIES, write_hf

CHUNKS = [7, 64, 1, 33, 15, 5, 16]
LENGTH = sum(CHUNKS)
PAGES = -(-LENGTH // PAGE_SIZE) + 1


class Rig:
    """A backend and a prompt; block tables as disjoint ranges, one per sequence."""

    def __init__(self, backend: Any, vocab: int) -> None:
        self.backend = backend
        self.ids = [int(i) for i in np.random.default_rng(3).integers(0, vocab, LENGTH + 8)]

    def table(self, sequence: int) -> list[int]:
        return list(range(sequence * PAGES, (sequence + 1) * PAGES))

    def tiles(self, sequence: int, start: int, end: int, ids: list[int] | None = None) -> list[Tile]:
        tokens, table, tiles = ids or self.ids, self.table(sequence), []
        while start < end:
            page = start // PAGE_SIZE
            stop = min(end, (page + 1) * PAGE_SIZE)
            tiles.append(Tile(tuple(table[: page + 1]), start % PAGE_SIZE, tuple(tokens[start:stop]), stop == end))
            start = stop
        return tiles

    def run(self, sequence: int, start: int, end: int, ids: list[int] | None = None) -> Any:
        """A copy of the logits, which hold until the next step only."""
        return self.backend.forward(self.tiles(sequence, start, end, ids))[-1].copy()

    def pages(self, sequence: int, tokens: int) -> list[bytes]:
        """The bytes of the pages that hold `tokens` tokens; rows after them are zero in the last one."""
        whole, rows = divmod(tokens, PAGE_SIZE)
        table = self.table(sequence)
        return [self.backend.snapshot(b, PAGE_SIZE) for b in table[:whole]] + [
            self.backend.snapshot(table[whole], rows)
        ]


def make(backend: str, name: str, dtype: str, tmp: Path) -> Rig:
    if name in TINY:
        path = write_hf(tmp / name, name) if name in FAMILIES else write_tiny(tmp / "tiny.gguf", **TINY[name])
        loaded: Loaded = load(path)
        return Rig(loaded.backend(backend, dtype, 6 * PAGES), loaded.facts.vocab)
    loaded = load(model_path(name))
    return Rig(loaded.backend(backend, dtype, 6 * PAGES, models_dir() / "cache"), loaded.facts.vocab)


MIXED = {
    "attn_q": "Q4_1",
    "attn_k": "Q5_0",
    "attn_v": "Q8_0",
    "ffn_gate": "Q4_0",
    "ffn_up": "F16",
    "ffn_down": "Q4_1",
    "token_embd": "Q8_0",
}
TINY: dict[str, dict[str, Any]] = {
    "tiny-llama": {"arch": "llama"},
    "tiny-qwen2": {"arch": "qwen2"},
    "tiny-mixed": {"arch": "qwen2", "quants": MIXED},
    "qwen3": {},
    "mistral": {},  # whose window is shorter than the prompt
    "deepseek_v3": {},
}
DTYPES = {"torch": ("bf16", "fp32"), "cpu": ("bf16", "fp32", "w4a8")}


def marks(backend: str, name: str, dtype: str) -> list[pytest.MarkDecorator]:
    """Real models on torch take minutes; in fp32 they say nothing that the tiny ones do not."""
    if name in TINY:
        return []
    return [pytest.mark.model, *([pytest.mark.soak] if backend == "torch" or dtype == "fp32" else [])]


PARAMS = [
    pytest.param((backend, name, dtype), id=f"{backend}-{name}-{dtype}", marks=marks(backend, name, dtype))
    for backend, dtypes in DTYPES.items()
    for name in (*TINY, *MODELS)
    for dtype in dtypes
    if (backend, name) != ("cpu", "deepseek_v3")
]


@pytest.fixture(scope="module", params=PARAMS)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return make(*request.param, tmp_path_factory.mktemp("rig"))


def test_a_prompt_in_chunks_gives_the_bits_of_the_whole_prompt(rig: Rig) -> None:
    whole = rig.run(0, 0, LENGTH)
    at = 0
    for size in CHUNKS:
        chunked = rig.run(1, at, at + size)
        at += size
    assert np.array_equal(whole, chunked)
    assert rig.pages(0, LENGTH) == rig.pages(1, LENGTH)


@pytest.mark.parametrize("drafts", [9])
def test_the_rows_of_a_verification_have_the_bits_that_they_have_alone(rig: Rig, drafts: int) -> None:
    """Beside another one and a lone token; what does not stand is written over without a trace."""
    start = 26
    for sequence in range(4):
        rig.run(sequence, 0, start)
    alone = [rig.run(0, start + n, start + n + 1) for n in range(drafts + 1)]
    wrong = [*rig.ids[: start + 1], *rig.ids[60 : 60 + drafts]]
    tiles = [
        *cut(rig.table(1), start, rig.ids[start : start + drafts + 1], all_logits=True),
        *rig.tiles(3, start, start + 1),
        *cut(rig.table(2), start, wrong[start:], all_logits=True),
    ]
    given = [rows for rows in rig.backend.forward(tiles) if rows is not None]
    rows = np.concatenate([rows[None] if rows.ndim == 1 else rows for rows in given])
    assert rows.shape[0] == 2 * (drafts + 1) + 1
    for at, row in enumerate(alone):
        assert np.array_equal(rows[at], row), at
    assert np.array_equal(rows[drafts + 1], alone[0])
    assert rig.pages(0, start + drafts + 1) == rig.pages(1, start + drafts + 1)
    again = [rig.run(2, start + n, start + n + 1) for n in range(drafts + 1)]
    assert all(np.array_equal(one, other) for one, other in zip(again, alone, strict=True))
    assert rig.pages(0, start + drafts + 1) == rig.pages(2, start + drafts + 1)


def test_tokens_one_by_one_give_the_bits_of_the_whole_prompt(rig: Rig) -> None:
    whole = rig.run(0, 0, 40)
    for at in range(40):
        single = rig.run(1, at, at + 1)
    assert np.array_equal(whole, single)
    assert rig.pages(0, 40) == rig.pages(1, 40)


def test_a_sequence_in_a_mixed_batch_gives_the_bits_it_gives_alone(rig: Rig) -> None:
    other = rig.ids[::-1]
    rig.run(0, 0, LENGTH)
    alone = [rig.run(0, LENGTH + i, LENGTH + i + 1) for i in range(3)]
    rig.run(1, 0, LENGTH)
    rig.run(2, 0, 20, other)
    for step in range(3):
        at = 20 + step
        tiles = rig.tiles(2, at, at + 1, other) + rig.tiles(3, 16 * step, 16 * step + 16, other)
        tiles += rig.tiles(1, LENGTH + step, LENGTH + step + 1)
        assert np.array_equal(rig.backend.forward(tiles)[-1], alone[step])


@pytest.mark.parametrize("size", [11, 29])
def test_a_prompt_in_odd_chunks_beside_a_decode_leaves_the_bits_of_both(rig: Rig, size: int) -> None:
    other = rig.ids[::-1]
    whole = rig.run(0, 0, LENGTH)
    rig.run(1, 0, 20, other)
    alone = [rig.run(1, 20 + n, 21 + n, other) for n in range(-(-LENGTH // size))]
    rig.run(2, 0, 20, other)
    for n, start in enumerate(range(0, LENGTH, size)):
        chunk = rig.tiles(3, start, min(start + size, LENGTH))
        found = rig.backend.forward([*rig.tiles(2, 20 + n, 21 + n, other), *chunk])
        assert np.array_equal(found[0], alone[n])
    assert np.array_equal(found[-1], whole)
    assert rig.pages(3, LENGTH) == rig.pages(0, LENGTH)


def test_a_restored_session_goes_on_with_the_bits_of_one_that_never_left(rig: Rig) -> None:
    rig.run(0, 0, LENGTH)
    saved = rig.pages(0, LENGTH)
    live = [rig.run(0, LENGTH + i, LENGTH + i + 1) for i in range(5)]
    rig.run(4, 0, LENGTH, rig.ids[::-1])  # others used the blocks meanwhile
    blocks = rig.table(4)[: len(saved)]
    for block, page in zip(blocks, saved, strict=True):
        rig.backend.landing(block)[:] = page
    rig.backend.scatter(blocks)
    restored = [rig.run(4, LENGTH + i, LENGTH + i + 1) for i in range(5)]
    assert all(np.array_equal(left, right) for left, right in zip(live, restored, strict=True))


def test_what_a_block_held_before_does_not_matter(rig: Rig) -> None:
    rig.run(5, 0, LENGTH, rig.ids[::-1])
    over_old = rig.run(5, 0, 21)
    for block in rig.table(5):
        rig.backend.zero(block)
    assert np.array_equal(over_old, rig.run(5, 0, 21))


def test_copied_rows_are_a_page_of_ones_own(rig: Rig) -> None:
    rig.run(0, 0, LENGTH)
    source, target = rig.table(0)[1], rig.table(5)[0]
    rig.backend.copy_rows(source, target, 5)
    assert rig.backend.snapshot(target, PAGE_SIZE) == rig.backend.snapshot(source, 5)
    assert rig.backend.snapshot(source, 5) != rig.backend.snapshot(source, PAGE_SIZE)


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_decode_steps_of_any_batch_have_the_bits_of_steps_with_a_prefill_in_them(rig: Rig, batch: int) -> None:
    """Lone tokens alone are a captured step on backends that capture; with a prefill beside them they are not."""
    starts = [20 + 7 * n for n in range(batch)]
    for sequence, start in enumerate(starts):
        rig.run(sequence, 0, start)
    steps = [tile for n, at in enumerate(starts) for tile in rig.tiles(n, at, at + 1)]
    captured = [row.copy() for row in rig.backend.forward(steps)]
    beside = rig.backend.forward([*steps, *rig.tiles(5, 0, 3)])
    assert all(np.array_equal(left, right) for left, right in zip(captured, beside, strict=False))
