from __future__ import annotations

import pytest

from bench.eval_tasks import QUESTIONS, TOOL_TASKS, TOOLS, Question, ToolTask, right_answer, right_call, right_tool

MONEY = ToolTask("m", "", "convert_currency", {"amount": 12.5, "source": "EUR", "target": "SEK"})


def test_every_task_asks_for_a_tool_that_exists_with_the_arguments_that_it_has():
    tools = {tool.name: tool.parameters["properties"] for tool in TOOLS}
    assert all(set(task.arguments) == set(tools[task.tool]) for task in TOOL_TASKS)
    assert {task.tool for task in TOOL_TASKS} == set(tools)


def test_no_two_tasks_share_a_key():
    keys = [task.key for task in TOOL_TASKS] + [question.key for question in QUESTIONS]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"amount": 12.5, "source": "EUR", "target": "SEK"}, True),
        ({"amount": 12.5, "source": "eur", "target": " sek "}, True),
        ({"amount": "12.5", "source": "EUR", "target": "SEK"}, False),
        ({"amount": 12, "source": "EUR", "target": "SEK"}, False),
        ({"amount": 12.5, "source": "SEK", "target": "EUR"}, False),
        ({"amount": 12.5, "source": "EUR"}, False),
        ({"amount": True, "source": "EUR", "target": "SEK"}, False),
        ([], False),
    ],
)
def test_a_call_is_right_when_every_argument_is(arguments, right):
    call = {"name": "convert_currency", "arguments": arguments}
    assert right_tool(MONEY, call)
    assert right_call(MONEY, call) is right


def test_no_call_and_another_tool_are_wrong():
    assert not right_tool(MONEY, None)
    assert not right_call(MONEY, None)
    assert not right_call(MONEY, {"name": "set_timer", "arguments": dict(MONEY.arguments)})


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [
        ("12", "12", True),
        ("12", "The answer is 12.", True),
        ("12", "112", False),
        ("12", "12.5", False),
        ("12", "-12", False),
        ("12", "I add them.\n12", False),
        ("stone", "'STONE'", True),
        ("2|two", "Two", True),
        ("cat", "cats", False),
        ("9( ?kg| kilograms)?", "9 kg", True),
        ("9( ?kg| kilograms)?", "4 kg", False),
        (r"jane\.doe@example\.com", "jane.doe@example.com", True),
        ("x", "", False),
    ],
)
def test_an_answer_is_right_when_its_first_line_holds_it_as_a_word(answer, said, right):
    assert right_answer(Question("q", "", answer), said) is right


def test_every_question_accepts_an_answer_that_its_pattern_spells():
    assert all(right_answer(q, q.answer.split("|")[0].split("(")[0].replace("\\", "") or "204") for q in QUESTIONS)
