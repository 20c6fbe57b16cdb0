"""Generations with every option, and a model that repeats itself, so that drafts stand now and then."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from engine.backends.face import Logits
from engine.draftmodel import DraftModel
from engine.sampling import Sampling
from engine.speculator import Speculator
from tests.engine.fakes import PAGE_BYTES, VOCAB, FakeBackend, oracle_logits
from tests.engine.stepped import Budget, Stepped

CONTEXT = 512


class Repeating(FakeBackend):
    """Says what its last token says, so it goes in circles. Rows that are not its own still give another answer."""

    def _answer(self, context: Sequence[int]) -> Logits:
        return 3 * oracle_logits([*context[-1:], -1] if -1 in context else context[-1:])


def drawn_sampling(draw: random.Random) -> Sampling:
    """Each option is there about every second time."""

    def maybe(value: Any, other: Any) -> Any:
        return value if draw.random() < 0.5 else other

    return Sampling(
        temperature=maybe(draw.choice([0.3, 0.8, 1.5]), 0.0),
        top_k=maybe(draw.choice([1, 5, 40]), 0),
        top_p=maybe(draw.choice([0.3, 0.9, 0.99]), 1.0),
        seed=draw.randrange(1 << 64),
        min_p=maybe(draw.choice([0.02, 0.3]), 0.0),
        repetition_penalty=maybe(draw.choice([0.8, 1.1, 1.5]), 1.0),
        presence_penalty=maybe(draw.choice([-0.5, 0.7]), 0.0),
        frequency_penalty=maybe(draw.choice([-0.2, 0.4]), 0.0),
        logit_bias=maybe(tuple((token, draw.choice([-100.0, -2.0, 3.0])) for token in (3, 9, 17)), ()),
    )


class Mistaken(Repeating):
    """Says something else now and then."""

    def _answer(self, context: Sequence[int]) -> Logits:
        logits = super()._answer(context)
        return logits if sum(context[-2:]) % 3 else logits[::-1].copy()


def engine(*, always: bool, blocks: int = 64, drafts: FakeBackend | None = None, draft_blocks: int = 64) -> Stepped:
    """Without tiers. `always`: every draft is verified, whatever it costs; else none is. `drafts`: a model's."""
    model = None if drafts is None else DraftModel(drafts, draft_blocks, CONTEXT)
    speculator = Speculator(enabled=always, always=always, model=model)
    backend = Repeating(blocks)
    budget = Budget()
    return Stepped(
        backend, blocks, None, page_bytes=PAGE_BYTES, vocab=VOCAB, context=CONTEXT, budget=budget, speculator=speculator
    )


def prompt_of(draw: random.Random, most: int = 60) -> list[int]:
    return [draw.randrange(VOCAB - 1) for _ in range(draw.randint(1, most))]
