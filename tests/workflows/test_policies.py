import pytest

from workflows.contract import Progress
from workflows.policies import Next, next_action, tool_choice_now


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
    ],
)
def test_what_follows_is_decided_by_the_last_step_alone(kind, outcome, expected):
    assert next_action(Progress(step_no=3, kind=kind, outcome=outcome)) is expected


def test_the_answer_after_the_last_tool_round_is_without_tools():
    assert tool_choice_now(Progress(kind="input", tool_choice="required", max_tool_rounds=2)) == "required"
    assert tool_choice_now(Progress(rounds=1, tool_choice="required", max_tool_rounds=2)) == "required"
    assert tool_choice_now(Progress(rounds=2, tool_choice="required", max_tool_rounds=2)) == "none"
