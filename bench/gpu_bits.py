"""Whether a token's bits depend on its own context alone: a prompt whole, in chunks, decoded, and beside others."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from bench.gpu_course import Course
from bench.gpu_random import SMALL, TINY, facts_of, weights_of
from engine.backends.face import Logits, Tile, cut
from engine.backends.triton import Triton
from engine.facts import PAGE_SIZE

_LENGTH, _DRY_LENGTH = 1500, 37
_DECODED, _DRY_DECODED = 24, 2
_CHUNKS = (7, 129, 1, 64, 300, 16)
_OTHERS, _DRY_OTHERS = 12, 2


def bits(course: Course) -> None:
    shape = TINY if course.dry else SMALL
    length = _DRY_LENGTH if course.dry else _LENGTH
    draw = random.Random(29)
    tokens = [draw.randrange(3, shape.vocab) for _ in range(length)]
    pages = -(-length // PAGE_SIZE)
    others = _DRY_OTHERS if course.dry else _OTHERS
    backend = Triton(facts_of(shape), weights_of(shape), pool_blocks=(2 + others) * pages)
    there, again = list(range(pages)), list(range(pages, 2 * pages))
    whole = _run(backend, there, tokens, [length])
    kept = [backend.snapshot(block, PAGE_SIZE) for block in there[:-1]]
    decoded = _DRY_DECODED if course.dry else _DECODED
    for name, sizes in (("chunks", _CHUNKS), ("decoded", (length - decoded, *[1] * decoded))):
        for block in again:
            backend.zero(block)
        last = _run(backend, again, tokens, sizes)
        same = [backend.snapshot(block, PAGE_SIZE) for block in again[:-1]] == kept
        course.say("bits", what=name, logits=bool(np.array_equal(whole, last)), pages=same)
    beside = [_last(list(range((2 + n) * pages, (3 + n) * pages)), length, 3 + n) for n in range(others)]
    row = backend.forward([*beside, _last(there, length, tokens[-1])])[-1]
    assert row is not None
    course.say("bits", what="beside others", logits=bool(np.array_equal(whole, row)), pages=True)


def _run(backend: Triton, blocks: Sequence[int], tokens: Sequence[int], sizes: Sequence[int]) -> Logits:
    """Logits of the last token; `sizes` are gone through again and again until the prompt is at its end."""
    start, at = 0, 0
    while start < len(tokens):
        size = sizes[at % len(sizes)]
        last = backend.forward(cut(blocks, start, tokens[start : start + size]))[-1]
        start, at = start + size, at + 1
    assert last is not None
    return last.copy()


def _last(blocks: Sequence[int], length: int, token: int) -> Tile:
    """The last token of a context once more."""
    return Tile(tuple(blocks), (length - 1) % PAGE_SIZE, (token,), True)
