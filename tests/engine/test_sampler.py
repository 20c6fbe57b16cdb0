"""From logits to tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineFault
from engine.sampler import sample, uniform
from engine.sampling import Sampling

LOGITS = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], dtype=np.float32))


def test_greedy_takes_the_best_and_the_lower_id_of_two_equals() -> None:
    assert sample(np.array([1, 3, 3, 2], dtype=np.float32), Sampling(), 0) == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-101])
def test_a_temperature_that_overflows_is_greedy(temperature: float) -> None:
    logits = np.array([-9, 30, 3e38, 2], dtype=np.float32)
    assert sample(logits, Sampling(temperature=temperature, top_k=2, top_p=0.9, seed=4), 7) == 2


def test_noise_depends_on_seed_and_position_and_nothing_else() -> None:
    wide = np.zeros(1000, dtype=np.float32)
    draw = [sample(wide, Sampling(temperature=1.0, seed=5), position) for position in range(50)]
    again = [sample(wide, Sampling(temperature=1.0, seed=5), position) for position in reversed(range(50))]
    assert draw == again[::-1]
    assert draw != [sample(wide, Sampling(temperature=1.0, seed=6), position) for position in range(50)]
    assert len(set(draw)) > 40


def test_the_noise_of_a_token_is_the_same_whichever_others_are_kept() -> None:
    few = uniform(9, 3, np.array([2, 5], dtype=np.int64))
    all_of_them = uniform(9, 3, np.arange(8, dtype=np.int64))
    assert few.tolist() == all_of_them[[2, 5]].tolist()


def test_the_noise_is_what_it_always_was() -> None:
    numbers = uniform(7, 11, np.arange(3, dtype=np.int64))
    assert numbers.tolist() == [0.7580687378316242, 0.02649322120613623, 0.0028009055616767253]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    count = 20_000
    draws = [sample(LOGITS, Sampling(temperature=temperature, seed=1), position) for position in range(count)]
    wanted = np.exp(LOGITS / temperature) / np.exp(LOGITS / temperature).sum()
    seen = np.bincount(draws, minlength=5) / count
    # six standard deviations of a binomial share
    assert np.all(np.abs(seen - wanted) < 6 * np.sqrt(wanted * (1 - wanted) / count))


def test_top_k_keeps_the_k_best_and_lower_ids_at_the_edge() -> None:
    kept = {sample(LOGITS, Sampling(temperature=5.0, top_k=4, seed=2), p) for p in range(2000)}
    assert kept == {0, 1, 2, 3}


def test_top_p_keeps_the_least_set_that_reaches_it() -> None:
    kept = {sample(LOGITS, Sampling(temperature=1.0, top_p=0.8, seed=2), p) for p in range(2000)}
    assert kept == {0, 1, 2}


def test_top_p_of_nothing_is_greedy() -> None:
    assert {sample(LOGITS, Sampling(temperature=3.0, top_p=0.0, seed=2), p) for p in range(200)} == {0}


def test_a_mask_is_never_left() -> None:
    allowed = np.array([False, False, True, True, False])
    assert {sample(LOGITS, Sampling(temperature=9.0, seed=3), p, allowed) for p in range(500)} == {2, 3}
    assert sample(LOGITS, Sampling(), 0, allowed) == 2


def drawn_from_all(logits: np.ndarray, sampling: Sampling, position: int, allowed: np.ndarray | None = None) -> int:
    """What `sample` means, with a logarithm for every token."""
    scores = logits.astype(np.float64) / sampling.temperature
    scores[~np.isfinite(scores)] = -np.inf
    if allowed is not None:
        scores[~allowed] = -np.inf
    ids = np.flatnonzero(np.isfinite(scores))
    order = ids[np.lexsort((ids, -scores[ids]))]
    if 0 < sampling.top_k < len(order):
        order = order[: sampling.top_k]
    if sampling.top_p < 1.0:
        weights = np.exp(scores[np.sort(order)] - scores[order[0]])
        mass = np.cumsum(np.exp(scores[order] - scores[order[0]]))
        order = order[: int(np.searchsorted(mass, sampling.top_p * weights.sum())) + 1]
    kept = np.sort(order)
    noisy = scores[kept] - np.log(-np.log(uniform(sampling.seed, position, kept)))
    return int(kept[np.argmax(noisy)])


@given(
    seed=st.integers(0, 2**32),
    width=st.floats(0.01, 12.0),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0, 50.0]),
    top_k=st.sampled_from([0, 0, 40, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.9999, 0.2]),
    masked=st.booleans(),
)
def test_few_logarithms_give_the_draw_of_all_of_them(
    seed: int, width: float, temperature: float, top_k: int, top_p: float, masked: bool
) -> None:
    rng = np.random.default_rng(seed)
    logits = np.round(rng.standard_normal(20_000) * width, 1).astype(np.float32)  # many are equal
    logits[:5] = [np.nan, -np.inf, np.inf, np.nan, -np.inf]
    allowed = rng.random(20_000) < 0.6 if masked else None
    for position in range(3):
        sampling = Sampling(temperature, top_k, top_p, seed)
        assert sample(logits, sampling, position, allowed) == drawn_from_all(logits, sampling, position, allowed)


@pytest.mark.parametrize("temperature", [1e-99, 1e-30, 1e-5, 1e30])
@pytest.mark.parametrize("width", [1e-30, 1.0, 1e30])
def test_no_temperature_and_no_logit_is_too_great_or_too_small(temperature: float, width: float) -> None:
    logits = (np.random.default_rng(1).standard_normal(5000) * width).astype(np.float32)
    with np.errstate(over="ignore"):
        token = sample(logits, Sampling(temperature, seed=3), 5)
    assert 0 <= token < 5000


def test_noise_that_reaches_across_the_spread_is_found() -> None:
    """With flat logits every token is near; with one peak, others win as often as the softmax says."""
    logits = np.zeros(20_000, np.float32)
    logits[7] = 18.0  # the others together weigh 20,000 / e^18 of it: too little; at temperature 2 they win often
    draws = [sample(logits, Sampling(temperature=2.0, seed=3), position) for position in range(300)]
    others = sum(draw != 7 for draw in draws) / 300
    wanted = 19_999 / (19_999 + np.exp(9.0))
    assert abs(others - wanted) < 6 * np.sqrt(wanted * (1 - wanted) / 300)


def test_logits_without_a_finite_one_are_a_fault_not_a_token() -> None:
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        with pytest.raises(EngineFault, match="finite"):
            sample(np.full(50, np.nan, np.float32), sampling, 0)
