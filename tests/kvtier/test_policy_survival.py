"""What is learned of tool durations, and what a pause is worth by it."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from kvtier.policy import Durations, Expected, Reason, Survival, best_ttl_s, keep_rate
from kvtier.policy.index import mean_left_s
from kvtier.policy.survival import EDGES, bin_of, kaplan_meier
from tests.kvtier.policy_support import session, tiers, view


def exponential(mean_s: float) -> Survival:
    return Survival(np.exp(-EDGES / mean_s))


def pareto(shape: float) -> Survival:
    return Survival(np.where(EDGES < 1, 1.0, np.maximum(EDGES, 1.0) ** -shape))


@pytest.mark.parametrize("at_s", [2.0, 10.0, 40.0])
def test_learned_survival_agrees_with_kaplan_meier_where_calls_still_run(at_s):
    rng = random.Random(1)
    durations = [10 * math.exp(rng.gauss(0, 1)) for _ in range(3000)]
    seen_for = [rng.uniform(1, 60) for _ in durations]
    ended = [d for d, c in zip(durations, seen_for, strict=True) if d <= c]
    running = [c for d, c in zip(durations, seen_for, strict=True) if d > c]
    learned = Durations()
    for seconds in ended:
        learned.add(seconds)
    survival = Survival.from_hazard(learned.hazard((seconds, 0.0) for seconds in running))
    assert survival(at_s) == pytest.approx(kaplan_meier(ended, running, at_s), abs=0.04)


def test_ignoring_running_calls_would_make_tools_look_quick():
    learned = Durations()
    for _ in range(20):
        learned.add(1.0)
    alone = Survival.from_hazard(learned.hazard([]))(5.0)
    censored = Survival.from_hazard(learned.hazard([(100.0, 0.0)] * 80))(5.0)
    assert alone < 0.1
    assert censored > 0.7


def test_what_a_call_did_before_it_was_seen_says_nothing():
    learned = Durations()
    for _ in range(50):
        learned.add(10.0)
    before = learned.hazard([])
    late = learned.hazard([(100.0, 50.0)] * 50)
    assert late[bin_of(10.0)] == pytest.approx(before[bin_of(10.0)])
    assert late[bin_of(80.0)] < before[bin_of(80.0)]


def test_without_history_the_timeout_is_the_only_bound():
    now = view(Reason.TOOL_STARTED, "a", [session("a", timeout_s=100.0)], tiers())
    survival = Expected().survival("sh", 100.0, now)
    assert survival(90.0) > 0.5
    assert survival(101.0) == 0.0


def test_nothing_outlives_its_timeout():
    assert exponential(1000.0).capped(100.0)(100.1) < 1e-3
    assert exponential(1000.0).capped(None)(100.1) > 0.9


def test_few_calls_of_a_tool_borrow_the_history_of_all_tools():
    expected = Expected()
    for tool, count in (("slow", 50), ("new", 2)):
        for _ in range(count):
            expected.learn(view(Reason.TOOL_STARTED, "a", [session("a", tool=tool)], tiers()))
            expected.learn(view(Reason.TOOL_ENDED, "a", [session("a", tool=tool)], tiers(), now_s=50.0))
    now = view(Reason.PRESSURE, "a", [session("a")], tiers())
    assert expected.survival("new", None, now)(30.0) == pytest.approx(
        expected.survival("slow", None, now)(30.0), abs=0.1
    )


def test_the_rate_of_a_known_pause_is_one_over_what_is_left():
    rate = keep_rate(Survival.point(10.0), wait_s=0.0)
    assert 1 / rate[bin_of(0.0)] == pytest.approx(10.0, rel=0.12)
    assert 1 / rate[bin_of(6.0)] == pytest.approx(10.0 - EDGES[bin_of(6.0)], rel=0.25)


def test_the_rate_of_a_memoryless_pause_does_not_depend_on_the_time_elapsed():
    rate = keep_rate(exponential(20.0))
    assert rate[bin_of(1.0)] == pytest.approx(1 / 20, rel=0.02)
    assert rate[bin_of(50.0)] == pytest.approx(1 / 20, rel=0.05)


def test_where_hazard_falls_the_rate_is_the_hazard_and_the_longest_pause_is_worth_least():
    rate = keep_rate(pareto(1.5))
    by_elapsed = [rate[bin_of(seconds)] for seconds in (2.0, 8.0, 30.0, 120.0)]
    assert by_elapsed == sorted(by_elapsed, reverse=True)
    assert rate[bin_of(8.0)] == pytest.approx(1.5 / 8, rel=0.25)


def test_waiting_for_the_device_after_the_return_lowers_the_rate():
    survival = exponential(20.0)
    assert keep_rate(survival, 20.0)[0] == pytest.approx(keep_rate(survival)[0] / 2, rel=0.05)


def test_the_mean_of_what_is_left_grows_with_a_heavy_tail():
    left = mean_left_s(pareto(2.5))
    assert left[bin_of(30.0)] > left[bin_of(3.0)] > 0


@pytest.mark.parametrize(("saving_s", "kept"), [(5.0, False), (40.0, True)])
def test_a_fixed_ttl_follows_when_a_pause_is_known_to_end_then(saving_s, kept):
    ttl_s = best_ttl_s(Survival.point(10.0), saving_s, cost_per_s=1.0)
    assert ttl_s == (pytest.approx(10.0, rel=0.22) if kept else 0.0)


def test_a_ttl_has_the_form_of_continuums_and_grows_with_what_is_saved():
    ttls = [best_ttl_s(pareto(1.2), saving_s, cost_per_s=1.0) for saving_s in (1.0, 10.0, 100.0)]
    assert ttls == sorted(ttls)
    assert ttls[0] < ttls[-1]
