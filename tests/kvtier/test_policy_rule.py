"""What the rule decides, in views small enough to reckon by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import TierUsageError
from kvtier.policy import (
    Expected,
    Place,
    Policy,
    Prefill,
    Reason,
    SessionView,
    State,
    Survival,
    TierKeep,
    TierView,
    View,
    break_even_tokens,
    keep_rate,
    record,
    replay,
)
from kvtier.policy.survival import EDGES, bin_of
from tests.kvtier.policy_support import PREFILL, session, tiers, view


class Known:
    """Returns by a survival function that is given."""

    def __init__(self, survival: Survival) -> None:
        self.rates = keep_rate(survival)

    def learn(self, view: View) -> None:
        pass

    def rate(self, session: SessionView, view: View) -> float:
        return float(self.rates[bin_of(view.now_s - session.since_s)])


HEAVY = Survival(np.where(EDGES < 1, 1.0, np.maximum(EDGES, 1.0) ** -1.2))


def ours(survival: Survival = HEAVY, **options: object) -> Policy:
    return Policy(TierKeep(Known(survival)), **options)


def kinds(moves):
    return [(move.kind, move.session, move.place) for move in moves]


def test_a_prefill_goes_through_both_of_its_measurements():
    prefill = Prefill.through((512, 1500.0), (2048, 1150.0))
    assert prefill.seconds(512) == pytest.approx(512 / 1500)
    assert prefill.seconds(2048) == pytest.approx(2048 / 1150)
    assert prefill.seconds(2048, 512) == pytest.approx(2048 / 1150 - 512 / 1500)
    with pytest.raises(TierUsageError, match="lengths must grow"):
        Prefill.through((2048, 1150.0), (512, 1500.0))


def test_break_even_is_where_reading_takes_as_long_as_computing():
    tier = TierView(Place.HOST, 0, 0, read_bps=1e6, write_bps=1e6, latency_s=0.1)
    assert break_even_tokens(PREFILL, tier, bytes_per_token=500) == pytest.approx(200, abs=1)


def test_a_tier_slower_than_the_device_computes_never_pays():
    # 70B on eight devices: 35.7 us per token, 327,680 B each: below 9.2 GB/s a tier does not pay
    prefill = Prefill(35.7e-6)
    assert break_even_tokens(prefill, TierView(Place.NVME, 0, 0, 9.0e9, 9.0e9), 327_680) is None
    assert break_even_tokens(prefill, TierView(Place.NVME, 0, 0, 9.4e9, 9.4e9), 327_680) == 1


def test_below_the_break_even_length_nothing_is_stored():
    places = tiers(latency_s=0.05)
    short, long = session("a", tokens=40), session("b", tokens=200)
    assert ours().decide(view(Reason.TOOL_STARTED, "a", [short, long], places)) == []
    assert kinds(ours().decide(view(Reason.TOOL_STARTED, "b", [short, long], places))) == [("store", "b", Place.HOST)]


def test_a_tool_that_starts_makes_a_copy_and_frees_nothing():
    moves = ours().decide(view(Reason.TOOL_STARTED, "a", [session("a")], tiers()))
    assert kinds(moves) == [("store", "a", Place.HOST)]


@pytest.mark.parametrize("state", [State.APPROVAL, State.PAUSED])
def test_what_waits_for_a_person_leaves_the_device_at_once(state):
    moves = ours().decide(view(Reason.TOOL_STARTED, "a", [session("a", state=state)], tiers()))
    assert kinds(moves) == [("store", "a", Place.HOST), ("evict", "a", Place.DEVICE)]


def test_what_no_tier_takes_stays_on_the_device_even_if_it_waits_for_a_person():
    moves = ours().decide(view(Reason.TOOL_STARTED, "a", [session("a", state=State.APPROVAL)], tiers(host=10)))
    assert ("evict", "a", Place.DEVICE) not in kinds(moves)


def test_a_clean_session_is_evicted_before_one_that_would_have_to_be_computed_again():
    clean = session("clean", copy=Place.HOST, copy_to=100, since_s=5.0)
    dirty = session("dirty")
    asking = session("asking", resident=False, state=State.WAITING)
    now = view(Reason.PRESSURE, "asking", [clean, dirty, asking], tiers(host=100), now_s=20.0, need_bytes=100)
    assert kinds(ours().decide(now)) == [("evict", "clean", Place.DEVICE)]


def test_equal_sessions_with_falling_hazard_are_evicted_as_lru_would():
    sessions = [session(f"s{k}", since_s=float(k * k), copy=Place.HOST, copy_to=100) for k in range(6)]
    asking = session("asking", resident=False, state=State.WAITING)
    now = view(Reason.PRESSURE, "asking", [*sessions, asking], tiers(), now_s=60.0, need_bytes=300)
    assert [move.session for move in ours().decide(now)] == ["s0", "s1", "s2"]


def test_with_rising_hazard_the_order_is_the_other_way_round():
    sessions = [session(f"s{k}", since_s=float(10 * k), copy=Place.HOST, copy_to=100) for k in range(6)]
    asking = session("asking", resident=False, state=State.WAITING)
    now = view(Reason.PRESSURE, "asking", [*sessions, asking], tiers(), now_s=60.0, need_bytes=200)
    assert [move.session for move in ours(Survival.point(80.0)).decide(now)] == ["s5", "s4"]


def test_what_runs_or_is_being_read_is_never_evicted():
    held = [session("a", held=True, state=State.RUNNING), session("b", held=True, state=State.WAITING)]
    asking = session("asking", resident=False, state=State.WAITING)
    assert ours().decide(view(Reason.PRESSURE, "asking", [*held, asking], tiers(), need_bytes=100)) == []


def pressed(old: SessionView, new: SessionView, places: list[TierView], now_s: float) -> View:
    """`new` is alone on the device and has to leave it; `old` lies in a tier."""
    asking = session("asking", resident=False, state=State.WAITING, since_s=now_s)
    return view(Reason.PRESSURE, "asking", [old, new, asking], places, now_s=now_s, need_bytes=new.tokens)


def test_a_full_host_sends_the_one_worth_least_down():
    old = session("old", resident=False, copy=Place.HOST, copy_to=100)
    moves = ours().decide(pressed(old, session("new", since_s=50.0), tiers(host=100, nvme=1000), now_s=50.0))
    assert kinds(moves) == [
        ("store", "old", Place.NVME),
        ("store", "new", Place.HOST),
        ("evict", "new", Place.DEVICE),
    ]


def test_the_one_that_leaves_the_device_goes_further_down_when_it_is_worth_least():
    due = session("due", resident=False, copy=Place.HOST, copy_to=100)
    now = pressed(due, session("new", since_s=70.0), tiers(host=100, nvme=1000), now_s=70.0)
    assert kinds(ours(Survival.point(80.0)).decide(now))[0] == ("store", "new", Place.NVME)


def test_where_something_has_to_be_dropped_heads_go_first_and_tails_are_kept():
    old = session("old", tokens=80, resident=False, copy=Place.HOST, copy_to=80)
    now = pressed(old, session("new", tokens=40, since_s=50.0), list(tiers(host=100)), now_s=50.0)
    moves = ours(pieces=4).decide(now)
    assert kinds(moves)[:2] == [("trim", "old", Place.HOST), ("store", "new", Place.HOST)]
    assert moves[0].start == 20


def test_whole_sessions_only_when_asked_for_one_piece():
    old = session("old", tokens=80, resident=False, copy=Place.HOST, copy_to=80)
    now = pressed(old, session("new", tokens=40, since_s=50.0), tiers(host=100), now_s=50.0)
    assert kinds(ours(pieces=1).decide(now))[:2] == [("evict", "old", Place.HOST), ("store", "new", Place.HOST)]


def test_nothing_that_lies_nowhere_else_gives_way_to_a_second_copy():
    old = session("old", resident=False, copy=Place.HOST, copy_to=100)
    now = view(Reason.TOOL_STARTED, "new", [old, session("new", since_s=50.0)], tiers(host=100), now_s=50.0)
    assert ours().decide(now) == []


def test_a_second_copy_gives_way_to_what_lies_nowhere_else():
    twice = session("twice", copy=Place.HOST, copy_to=100, since_s=50.0, state=State.RUNNING, held=True)
    moves = ours(pieces=1).decide(pressed(twice, session("new"), tiers(host=100), now_s=50.0))
    assert kinds(moves) == [
        ("evict", "twice", Place.HOST),
        ("store", "new", Place.HOST),
        ("evict", "new", Place.DEVICE),
    ]


def test_a_tool_that_starts_makes_room_for_another_before_it_is_asked_for():
    old = session("old", since_s=-500.0)
    now = view(Reason.TOOL_STARTED, "new", [old, session("new", since_s=0.0)], tiers(device=250), now_s=0.0)
    assert kinds(ours().decide(now))[-1] == ("evict", "old", Place.DEVICE)
    assert ("evict", "old", Place.DEVICE) not in kinds(ours(reserves=False).decide(now))


def test_a_break_even_is_that_of_the_bandwidth_seen_now():
    places, half = (
        tiers(latency_s=0.05),
        [replace(tier, read_bps=tier.read_bps / 120) for tier in tiers(latency_s=0.05)],
    )
    policy = ours()
    for at, stored in ((places, True), (half, False), (places, True)):
        moves = policy.decide(view(Reason.TOOL_STARTED, "a", [session("a", tokens=200)], at))
        assert bool(moves) is stored


def test_a_restore_is_chosen_only_where_it_is_quicker_at_this_moment():
    away = session("a", resident=False, state=State.WAITING, copy=Place.HOST, copy_to=100)
    [idle] = ours().decide(view(Reason.SCHEDULED, "a", [away], tiers()))
    assert (idle.kind, idle.predicted_s) == ("prefetch", pytest.approx(100 * 1e-5))
    [busy] = ours().decide(view(Reason.SCHEDULED, "a", [away], tiers(queued_s=1.0)))
    assert (busy.kind, busy.predicted_s) == ("recompute", pytest.approx(0.1))


def test_a_second_of_the_device_costs_everyone_who_waits():
    away = session("a", resident=False, state=State.WAITING)
    [move] = ours().decide(view(Reason.SCHEDULED, "a", [away], tiers(), waiting=9))
    assert move.predicted_s == pytest.approx(0.1 * 10)


def test_nothing_is_promoted_for_a_session_that_is_not_about_to_be_scheduled():
    away = session("a", resident=False, copy=Place.HOST, copy_to=100)
    assert ours().decide(view(Reason.TOOL_ENDED, "a", [away], tiers())) == []


def test_a_log_is_replayed_under_another_policy():
    old = session("old", tokens=80, resident=False, copy=Place.HOST, copy_to=80)
    now = pressed(old, session("new", tokens=40, since_s=50.0), tiers(host=100), now_s=50.0)
    line = json.loads(json.dumps(record(now, ours().decide(now))))
    [same] = replay([line], ours())
    [other] = replay([line], ours(pieces=1))
    assert same.other == same.done
    assert kinds(other.done)[0][0] == "trim"
    assert kinds(other.other)[0][0] == "evict"


@given(
    st.lists(
        st.tuples(
            st.integers(1, 300), st.floats(0, 100), st.sampled_from([None, Place.HOST, Place.NVME]), st.booleans()
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([Reason.TOOL_STARTED, Reason.PRESSURE]),
    st.integers(1, 8),
    st.integers(0, 600),
)
def test_no_place_is_ever_overfilled_and_every_move_can_be_done(rows, reason, pieces, spare):
    sessions = [
        session(f"s{k}", tokens=tokens, since_s=since, resident=resident, copy=copy, copy_to=tokens if copy else 0)
        for k, (tokens, since, copy, resident) in enumerate(rows)
    ]
    sessions.append(session("asking", tokens=150, since_s=100.0, resident=reason is Reason.TOOL_STARTED))
    room = [sum(s.tokens for s in sessions if s.copy is place) for place in (Place.HOST, Place.NVME)]
    now = view(reason, "asking", sessions, tiers(10_000, room[0] + spare, room[1] + spare), now_s=100.0, need_bytes=200)
    moves = Policy(TierKeep(Expected()), pieces=pieces).decide(now)
    held = {s.id: (s.copy, s.copy_from, s.copy_to) for s in sessions}
    tokens = {s.id: s.tokens for s in sessions}
    on_device = {s.id for s in sessions if s.resident}
    for move in moves:
        if move.kind == "store":
            assert move.session in on_device or held[move.session][0] is not None
            held[move.session] = (move.place, move.start, tokens[move.session])
        elif move.place is Place.DEVICE:
            on_device.remove(move.session)
        else:
            place, start, stop = held[move.session]
            assert place is move.place
            assert move.kind == "evict" or start < move.start < stop
            held[move.session] = (place, move.start, stop) if move.kind == "trim" else (None, 0, 0)
        assert move.predicted_s >= 0
    for tier in now.tiers[1:]:
        assert sum(stop - start for place, start, stop in held.values() if place is tier.place) <= tier.capacity_bytes
