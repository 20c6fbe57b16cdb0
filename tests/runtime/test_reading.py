"""What a generated message means, and that nobody asks the model for ever."""

import json

import pytest

from engine.tokens import Parsed
from engine.tokens.values import Call
from runtime.steps.reading import MAX_CORRECTIONS, read

TOOLS = ["bash", "read_file"]
CALL = {"name": "bash", "arguments": {"command": "ls"}}


def said(text: str, *calls: Call, complete: bool = True) -> Parsed:
    return Parsed(text, calls, complete)


def test_words_are_an_answer():
    assert read(said("It is done."), True, TOOLS, "auto", 0).outcome == "final"


def test_a_call_is_a_call():
    reading = read(said("", Call("bash", {"command": "ls"}, "")), True, TOOLS, "auto", 0)
    assert (reading.outcome, reading.calls, reading.repaired) == ("tools", (CALL,), False)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(CALL),
        json.dumps([CALL]),
        json.dumps({"name": "bash", "parameters": {"command": "ls"}}),
        json.dumps(CALL, indent=2),
        f"```json\n{json.dumps(CALL)}\n```",
        f"```\n{json.dumps(CALL)}\n```\n",
    ],
)
def test_a_call_that_was_written_as_text_is_repaired(text):
    reading = read(said(text), True, TOOLS, "auto", 0)
    assert (reading.outcome, list(reading.calls), reading.repaired) == ("tools", [CALL], True)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada"}',
        '{"name": "bash", "arguments": "ls"}',
        '{"name": "bash", "arguments": {}, "and": 1}',
        '{"name": "bash", "arguments": {}, "parameters": {}}',
        '{"name": "bash", "arguments": {"n": NaN}}',
        '{"name": "bash", "arguments": {"n": 1e999}}',
        '{"name": "bash", "arguments": {"n": 1, "n": 2}}',
        '{"result": 5}',
        "[]",
        "[1, 2]",
        'Use {"name": "bash", "arguments": {}} for it.',
        "{not json",
        "[" * 5000,
    ],
)
def test_json_that_is_no_call_is_an_answer(text):
    assert read(said(text), True, TOOLS, "auto", 0).outcome == "final"


@pytest.mark.parametrize(
    ("parsed", "choice", "complaint"),
    [
        (said("", complete=False), "auto", "could not be read"),
        (said('{"name": "fly", "arguments": {}}'), "auto", "There is no tool 'fly'. There are: bash, read_file"),
        (said(json.dumps(CALL)), "none", "Answer in words"),
    ],
)
def test_what_cannot_be_repaired_goes_back_to_the_model_a_bounded_number_of_times(parsed, choice, complaint):
    for corrections in range(MAX_CORRECTIONS):
        reading = read(parsed, True, TOOLS, choice, corrections)
        assert (reading.outcome, reading.calls) == ("tools", ())
        assert complaint in reading.complaint
    last = read(parsed, True, TOOLS, choice, MAX_CORRECTIONS)
    assert last.outcome in ("final", "incomplete")
    assert last.complaint == ""


def test_a_call_that_was_cut_off_at_the_token_limit_is_neither_executed_nor_complained_about():
    reading = read(said("", complete=False), False, TOOLS, "auto", 0)
    assert (reading.outcome, reading.calls, reading.complaint) == ("incomplete", (), "")


def test_a_session_without_tools_may_write_what_looks_like_a_call():
    assert read(said(json.dumps(CALL)), True, [], "auto", 0).outcome == "final"
