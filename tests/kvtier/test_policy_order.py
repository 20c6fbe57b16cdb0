"""Who is served first."""

from __future__ import annotations

import pytest

from kvtier.policy import OVERTAKEN_AT_MOST, Place, Waiting, first_served, left_s
from tests.kvtier.policy_support import PREFILL, session


def test_what_is_soon_ready_goes_before_what_has_to_be_computed_again():
    assert first_served([Waiting("lost", 0.0, 5.0), Waiting("kept", 1.0, 0.2)]) == "kept"


def test_equals_are_served_in_the_order_in_which_they_came():
    assert first_served([Waiting("late", 2.0, 1.0), Waiting("early", 1.0, 1.0)]) == "early"


def test_nobody_is_overtaken_more_often_than_the_bound():
    served, overtaken = "", 0
    while served != "long":
        served = first_served([Waiting("long", 0.0, 9.0, overtaken), Waiting("short", 1.0 + overtaken, 0.1)])
        overtaken += served == "short"
    assert overtaken == OVERTAKEN_AT_MOST


def test_of_those_overtaken_too_often_the_oldest_goes_first():
    most = OVERTAKEN_AT_MOST
    assert first_served([Waiting("b", 1.0, 1.0, most), Waiting("a", 0.0, 9.0, most), Waiting("c", 2.0, 0.1)]) == "a"


@pytest.mark.parametrize(
    ("where", "seconds"),
    [
        ({"resident": True}, 0.020),
        ({"resident": False}, 0.120),
        ({"resident": False, "copy": Place.HOST, "copy_from": 30, "copy_to": 90}, 0.060),
    ],
)
def test_what_is_left_to_compute_is_what_no_place_holds(where, seconds):
    assert left_s(session("a", tokens=100, **where), 20, PREFILL) == pytest.approx(seconds)
