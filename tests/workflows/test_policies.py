from datetime import timedelta

import pytest

from workflows.contract import Progress
from workflows.policies import (
    LONGEST_ASKED_S,
    Next,
    may_go_on,
    next_action,
    pause_after_loss,
    stops,
    tool_choice_now,
)


@pytest.mark.parametrize(
    ("kind", "outcome", "expected"),
    [
        ("", "", Next.REST),
        ("input", "input", Next.THINK),
        ("tool", "settled", Next.THINK),
        ("think", "tools", Next.TOOLS),
        ("think", "final", Next.REST),
        ("think", "incomplete", Next.REST),
        ("failed", "", Next.REST),
        ("think", "interrupted", Next.REST),
        ("tool", "interrupted", Next.REST),
    ],
)
def test_what_follows_is_decided_by_the_last_step_alone(kind, outcome, expected):
    assert next_action(Progress(step_no=3, kind=kind, outcome=outcome)) is expected


def test_the_answer_after_the_last_tool_round_is_without_tools():
    assert tool_choice_now(Progress(kind="input", tool_choice="required", max_tool_rounds=2)) == "required"
    assert tool_choice_now(Progress(rounds=1, tool_choice="required", max_tool_rounds=2)) == "required"
    assert tool_choice_now(Progress(rounds=2, tool_choice="required", max_tool_rounds=2)) == "none"


@pytest.mark.parametrize(
    ("verb", "running", "expected"),
    [
        ("pause", "think", True),
        ("pause", "run_tools", False),
        ("interrupt", "run_tools", True),
        ("rewind", "think", True),
        ("resume", "think", False),
        ("answer", "run_tools", False),
        ("interrupt", "take_input", False),
        ("rewind", "interrupt", False),
    ],
)
def test_a_command_stops_only_what_it_must(verb, running, expected):
    assert stops(verb, running) is expected


@pytest.mark.parametrize(
    ("hold", "message", "expected"),
    [
        ("", False, True),
        ("failed", False, False),
        ("failed", True, True),
        ("paused", True, False),
        ("approval", True, False),
    ],
)
def test_what_holds_a_session_ends_by_a_command_and_a_failure_by_a_message_too(hold, message, expected):
    assert may_go_on(Progress(hold=hold), message) is expected


def test_a_server_that_is_busy_is_given_the_time_that_it_asks_for_within_bounds():
    assert pause_after_loss(1) == pause_after_loss(1, 0.01) == timedelta(seconds=0.05)
    assert pause_after_loss(1, 7.0) == timedelta(seconds=7)
    assert pause_after_loss(12, 1e9) == timedelta(seconds=LONGEST_ASKED_S)
