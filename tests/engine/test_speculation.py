"""Drafts change no token, whatever becomes of them; and how many go into a step."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from engine.backends.face import Wish
from engine.drafts import Draft, PromptLookup
from engine.drawing import by_ratio
from engine.live import Guides
from engine.request import parse_generate
from engine.sampler import distribution, sample
from engine.sampling import Sampling, Speculation
from engine.worth import PROBE_EVERY, Worth
from tests.engine.fakes import VOCAB
from tests.engine.options import Mistaken, Repeating, drawn_sampling, engine, prompt_of
from tests.engine.stepped import Stepped

REQUESTS = 40


def both(seed: int, requests: int) -> tuple[list[list[int]], list[list[int]], int]:
    """What as many requests get with and without drafts, several at once; and how many drafts stood."""
    heard: list[list[list[int]]] = []
    accepted = 0
    for always in (False, True):
        draw = random.Random(seed)
        stepped = engine(always=always)
        told = []
        for number in range(requests):
            prompt, sampling = prompt_of(draw), drawn_sampling(draw)
            told.append(stepped.submit(f"s{number}", prompt, draw.randint(1, 60), 0, sampling=sampling))
            if number % 4 == 3:
                stepped.settle()
        stepped.settle()
        heard.append([one.tokens for one in told])
        accepted = stepped.core.speculator.totals.accepted
    return heard[0], heard[1], accepted


def test_with_drafts_every_token_is_the_one_without() -> None:
    alone, drafted, accepted = both(1, REQUESTS)
    assert drafted == alone
    assert accepted > 100


@pytest.mark.soak
def test_with_drafts_every_token_of_five_hundred_requests_is_the_one_without() -> None:
    alone, drafted, accepted = both(2, 500)
    assert drafted == alone
    assert accepted > 1000


@pytest.mark.parametrize("always", [False, True], ids=["plain", "drafts"])
def test_a_generation_resumed_at_any_token_goes_on_with_the_same_ones(always: bool) -> None:
    draw = random.Random(7)
    prompt = prompt_of(draw)
    sampling = Sampling(
        temperature=0.9,
        top_k=30,
        top_p=0.95,
        seed=5,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((4, 2.0), (8, -100.0)),
    )
    stepped = engine(always=always)
    whole = stepped.submit("whole", prompt, 51, 0, sampling=sampling)
    stepped.settle()
    assert len(whole.tokens) == 51
    for cut in range(1, 51):
        again = stepped.submit(f"cut{cut}", [*prompt, *whole.tokens[:cut]], 51 - cut, 0, sampling=sampling, replay=cut)
        stepped.settle()
        assert again.tokens == whole.tokens[cut:], cut


def test_what_did_not_stand_leaves_no_trace_in_the_pages() -> None:
    """The session's pages are those of a run without drafts: the next message finds the same."""
    pages = []
    for always in (False, True):
        stepped = engine(always=always)
        told = stepped.submit("s", [1, 2, 3] * 10, 90, 0, sampling=Sampling(temperature=0.7, seed=2))
        stepped.settle()
        blocks = [stepped.store.pool.find(bytes.fromhex(key)) for key in told.end["kv_keys"]]
        rows = [16] * (len(blocks) - 1) + [told.end["kv_tokens"] % 16 or 16]
        backend = stepped.store.backend
        pages.append([backend.snapshot(block or 0, count) for block, count in zip(blocks, rows, strict=True)])
        assert told.end["kv_tokens"] == 30 + len(told.tokens) - 1
    assert pages[0] == pages[1]


def test_drafts_take_no_page_that_another_is_owed() -> None:
    stepped = engine(always=True, blocks=12)
    told = [stepped.submit(f"s{n}", [n, n + 1] * 8, 100, n) for n in range(4)]
    stepped.settle()
    alone = engine(always=False, blocks=64)
    for one in told:
        again = alone.submit(one.session, one.prompt, one.count, one.sampling.seed)
        alone.settle()
        assert again.tokens == one.tokens


def unlikely(seen: np.ndarray, meant: np.ndarray) -> tuple[float, int] | None:
    """Chi-square and its degrees of freedom where counts are further from what was meant than once in a million."""
    rare = meant < 5
    seen, meant = np.append(seen[~rare], seen[rare].sum()), np.append(meant[~rare], meant[rare].sum())
    statistic, degrees = float(((seen - meant) ** 2 / np.maximum(meant, 1e-9)).sum()), len(meant) - 1
    return None if statistic < degrees + 5 * np.sqrt(2 * degrees) + 10 else (statistic, degrees)


FEW = Sampling(temperature=1.5, top_k=5)  # so that each token is counted often


def second_tokens(stepped: Stepped, prompt: list[int], draws: int) -> tuple[np.ndarray, np.ndarray]:
    """By the ratio rule over many seeds: how often each token was the second one, and how often it was to be."""
    seen, meant = np.zeros(VOCAB), np.zeros(VOCAB)
    for seed in range(draws):
        sampling = replace(FEW, seed=seed)
        told = stepped.submit("s", prompt, 3, 0, sampling=sampling, speculation=Speculation.RATIO)
        stepped.settle()
        ids, shares = distribution(Repeating(1)._answer(told.tokens[:1]), FEW)
        meant[ids] += shares
        seen[told.tokens[1]] += 1
    return seen, meant


def test_the_ratio_rule_draws_from_the_distribution_of_the_model() -> None:
    """There is a draft, the likeliest token, whatever the first one is: a lookup finds it."""
    firsts = distribution(Repeating(1)._answer([5]), FEW)[0].tolist()
    prompt = [*(token for one in firsts for token in (5, one, int(np.argmax(Repeating(1)._answer([one]))))), 5]
    stepped = engine(always=True)
    assert unlikely(*second_tokens(stepped, prompt, 800)) is None
    totals = stepped.core.speculator.totals
    assert totals.passes >= 800
    assert 0.1 < totals.accepted / totals.drafted < 0.9


def test_by_ratio_a_draw_from_another_distribution_becomes_one_of_the_models() -> None:
    p, q = np.array([0.4, 0.3, 0.15, 0.1, 0.05]), np.array([0.05, 0.1, 0.2, 0.3, 0.35])
    logits, ids = np.log(p).astype(np.float32), np.arange(5)
    drafts = np.random.default_rng(3).choice(5, 6000, p=q)
    seen = np.zeros(5)
    for seed, draft in enumerate(drafts.tolist()):
        wish = Wish(Sampling(temperature=1.0, seed=seed), 3)
        seen[by_ratio(logits, wish, Draft((draft,), ("model",), ((ids, q),)), 0)] += 1
    assert unlikely(seen, 6000 * p) is None


def test_by_ratio_greedy_is_greedy() -> None:
    stepped, alone = engine(always=True), engine(always=False)
    for seed in range(5):
        prompt = prompt_of(random.Random(seed))
        first = stepped.submit("s", prompt, 60, 0, sampling=Sampling(), speculation=Speculation.RATIO)
        second = alone.submit("s", prompt, 60, 0, sampling=Sampling())
        stepped.settle()
        alone.settle()
        assert first.tokens == second.tokens
        assert not first.end["replayable"]
        assert second.end["replayable"]
    assert stepped.core.speculator.totals.accepted > 50


def test_a_generation_that_asks_for_none_gets_no_drafts() -> None:
    stepped = engine(always=True)
    told = stepped.submit("s", [1, 2] * 10, 40, 0, speculation=Speculation.OFF)
    stepped.settle()
    assert (told.end["drafted"], stepped.core.speculator.totals.passes) == (0, 0)


def test_a_generation_that_is_cancelled_among_its_drafts_gives_its_pages_back() -> None:
    stepped = engine(always=True)
    frames: list[dict[str, object]] = []
    message = {"request_id": "q", "session": "s", "token_ids": [1, 2] * 10, "max_tokens": 300}
    stepped.core.submit(parse_generate(message), Guides(), frames.append)
    while not stepped.core.speculator.totals.accepted:
        stepped.turn()
    stepped.core.cancel("q")
    stepped.settle()
    assert frames[-1]["finish_reason"] == "cancelled"


@pytest.mark.parametrize("drafts", [Repeating, Mistaken])
def test_with_a_model_that_drafts_every_token_is_the_one_without(drafts: type[Repeating]) -> None:
    alone, stepped = engine(always=False), engine(always=True, drafts=drafts(64))
    draw = random.Random(11)
    pairs = []
    for number in range(12):
        prompt, sampling, count = prompt_of(draw), drawn_sampling(draw), draw.randint(1, 40)
        pairs.append([one.submit(f"s{number}", prompt, count, 0, sampling=sampling) for one in (alone, stepped)])
    alone.settle()
    stepped.settle()
    assert all(one.tokens == other.tokens for one, other in pairs)
    assert stepped.core.speculator.totals.accepted > 50


def test_a_model_that_drafts_gives_its_pages_back() -> None:
    drafts = Repeating(8)
    stepped = engine(always=True, drafts=drafts, draft_blocks=8)
    for number in range(6):
        stepped.submit(f"s{number}", [number] * 40, 30, number)
    stepped.settle()
    model = stepped.core.speculator._model
    assert model is not None
    model.keep(set())
    assert model.free_pages == 8


def test_by_ratio_drafts_of_a_model_leave_the_distribution_as_it_is() -> None:
    stepped = engine(always=True, drafts=Mistaken(64))
    assert unlikely(*second_tokens(stepped, [5, 9], 800)) is None
    totals = stepped.core.speculator.totals
    assert 0.1 < totals.accepted / totals.drafted < 0.95


# -- drafts -----------------------------------------------------------------------------------------------------------


def test_a_lookup_goes_on_after_the_longest_match() -> None:
    lookup = PromptLookup()
    lookup.follow([1, 2, 3, 9, 4, 8, 2, 3, 7, 1, 2, 3])
    assert lookup.propose(3).tokens == (9, 4, 8)  # 1 2 3, and not the later 2 3
    lookup.follow([1, 2, 3, 9, 4, 8, 2, 3, 7, 1, 2, 3, 50, 60])
    assert lookup.propose(3).tokens == ()


def test_a_draft_of_what_repeats_itself_goes_round() -> None:
    lookup = PromptLookup()
    lookup.follow([5, 6, 5, 6, 5, 6])
    assert lookup.propose(5).tokens == (5, 6, 5, 6, 5)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 1, 1]])
def test_short_transcripts_can_be_looked_up(tokens: list[int]) -> None:
    lookup = PromptLookup()
    lookup.follow(tokens)
    assert set(lookup.propose(4).tokens) <= set(tokens)


def test_a_lookup_finds_what_a_search_finds() -> None:
    draw = random.Random(3)
    tokens: list[int] = []
    lookup = PromptLookup()
    for _ in range(400):
        tokens.append(draw.randrange(6))
        lookup.follow(tokens)
        found = lookup.propose(1).tokens
        for matched in range(min(16, len(tokens) - 1), 0, -1):
            starts = [s for s in range(len(tokens) - matched) if tokens[s : s + matched] == tokens[-matched:]]
            if starts:
                assert found == (tokens[starts[-1] + matched],)
                break
        else:
            assert found == ()


# -- what pays --------------------------------------------------------------------------------------------------------


def learnt(base_s: float, row_s: float, requests: int = 1) -> Worth:
    worth = Worth()
    for _ in range(20):
        worth.observe(requests, 0, base_s)
    for drafts in (1, 2, 4, 8) * 20:
        worth.observe(requests, drafts, base_s + row_s * drafts)
    worth.observe(requests, 0, base_s)
    return worth


def test_cheap_rows_are_taken_and_dear_ones_are_not() -> None:
    likely = [0.8**n for n in range(1, 9)]
    assert learnt(0.010, 0.0003).choose(1, likely) == 8
    assert learnt(0.010, 0.009).choose(1, likely) == 0
    assert learnt(0.010, 0.0003).choose(1, [0.01]) == 0


def test_in_a_full_batch_only_the_likely_are_taken() -> None:
    mixed = sorted([0.95] * 4 + [0.1] * 12, reverse=True)
    assert learnt(0.011, 0.0007, requests=8).choose(8, mixed) == 4


def test_nothing_is_drafted_before_a_step_without_drafts_was_seen() -> None:
    assert Worth().choose(1, [0.99] * 8) == 0


def test_what_did_not_pay_is_tried_again_now_and_then() -> None:
    worth = learnt(0.010, 0.009)
    chosen = [worth.choose(1, [0.5, 0.25, 0.12]) for _ in range(4 * PROBE_EVERY)]
    assert sum(size > 0 for size in chosen) in (3, 4)


def test_what_a_step_takes_without_drafts_is_seen_again_now_and_then() -> None:
    worth = learnt(0.010, 0.0001)
    chosen = []
    for _ in range(2 * PROBE_EVERY):
        chosen.append(worth.choose(1, [0.9] * 4))
        worth.observe(1, chosen[-1], 0.0105)
    assert chosen.count(0) in (1, 2)


def test_a_step_that_something_held_up_teaches_little() -> None:
    worth = learnt(0.010, 0.0003)
    worth.observe(1, 0, 5.0)
    worth.observe(1, 4, 5.0)
    assert worth.choose(1, [0.8**n for n in range(1, 9)]) > 0


# -- the sampler that all of it is about ------------------------------------------------------------------------------


def test_min_p_keeps_what_is_likely_enough() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], dtype=np.float32))
    kept = {sample(logits, Sampling(temperature=1.0, min_p=0.2, seed=3), p) for p in range(800)}
    assert kept == {0, 1, 2}
