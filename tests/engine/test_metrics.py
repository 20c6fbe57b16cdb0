"""Histograms and what the engine puts into them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.metrics import COUNT_BOUNDS, TIME_BOUNDS_S, Histogram
from tests.engine.fakes import Harness


def test_without_observations_there_is_no_quantile() -> None:
    assert Histogram(TIME_BOUNDS_S).quantile(0.5) is None


@given(st.lists(st.floats(0.0002, 100), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_is_right_to_a_factor_of_two(values: list[float], share: float) -> None:
    histogram = Histogram(TIME_BOUNDS_S)
    for value in values:
        histogram.observe(value)
    rank = max(1, -int(-share * len(values) // 1))
    exact = sorted(values)[min(len(values), rank) - 1]
    found = histogram.quantile(share)
    assert found is not None
    assert exact / 2 <= found <= exact * 2


def test_what_is_above_all_bounds_is_counted() -> None:
    histogram = Histogram(COUNT_BOUNDS)
    for value in (1, 3, 10_000):
        histogram.observe(value)
    message = histogram.as_message()
    assert (message["count"], message["max"], message["sum"]) == (3, 10_000, 10_004)
    assert message["buckets"][-1] == [4096.0, 2]
    assert histogram.quantile(1.0) == 10_000


def test_every_token_and_every_step_is_measured(harness: Harness) -> None:
    go = harness.hold()
    running = [harness.start(f"s{i}", [i + 2] * 40, 10) for i in range(3)]
    go.set()
    for generation in running:
        generation.finish()
    stats = harness.stats()
    metrics = stats["metrics"]
    assert metrics["queue_s"]["count"] == metrics["restore_s"]["count"] == metrics["first_token_s"]["count"] == 3
    assert metrics["inter_token_s"]["count"] == 27
    assert metrics["step_s"]["count"] == stats["steps"]
    assert metrics["batch"]["max"] == 3
    assert metrics["prefill_tokens"]["sum"] == 120
    assert stats["counters"]["computed_tokens"] == 120
