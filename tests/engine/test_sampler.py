"""From logits to tokens."""

from __future__ import annotations

import numpy as np
import pytest

from engine.request import Sampling
from engine.sampler import sample, uniform

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
