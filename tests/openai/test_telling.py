"""A stream is a function of the session's events, however those were cut into pieces."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.tokens import FORMATS
from runtime.openai import Telling, input_items
from tests.openai.published import check_event

HERMES = next(one for one in FORMATS if one.marker == "<tool_call>")
BASE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "completed_at": None,
    "incomplete_details": None,
    "error": None,
    "model": "m",
    "previous_response_id": None,
    "instructions": None,
    "tools": [],
    "tool_choice": "auto",
    "truncation": "disabled",
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_logprobs": 0,
    "temperature": 1.0,
    "reasoning": {"effort": None, "summary": None},
    "max_output_tokens": None,
    "max_tool_calls": None,
    "store": True,
    "background": False,
    "service_tier": "default",
    "metadata": {},
    "safety_identifier": None,
    "prompt_cache_key": None,
}
WORDS = st.text("ab {}<>\"'\\é🌊\n", max_size=8)


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@st.composite
def messages(draw: st.DrawFn) -> str:
    text = draw(WORDS.filter(lambda one: "<" not in one))
    calls = draw(
        st.lists(
            st.tuples(
                st.sampled_from(("look", "bash", "", "a b", "x" * 300)), st.dictionaries(WORDS, WORDS, max_size=2)
            ),
            max_size=3,
        )
    )
    whole = text + "\n".join(call(*one) for one in calls)
    return whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def told(texts: list[str], asks: tuple[str, ...] = (), more: tuple[tuple[str, Any], ...] = ()) -> tuple[Any, Telling]:
    telling = Telling(dict(BASE), "ses_1", HERMES, ["look"], "msg_1", asks=asks)
    events: list[tuple[str, Any]] = [
        ("step.started", {"kind": "input", "message_id": "msg_1"}),
        ("step.started", {"kind": "think"}),
        *(("model.delta", {"text": text}) for text in texts),
        ("message.completed", {"outcome": "stop"}),
        ("step.completed", {"kv": {"computed": 5, "device": 16}, "sampled": 3}),
        *more,
        ("session.idle", {}),
    ]
    said = telling.begin()
    for position, (kind, data) in enumerate(events):
        said += telling.feed({"id": position + 1, "type": kind, "step": 2, "data": data})
    return said, telling


def without_deltas(said: Any) -> Any:
    return [
        {name: value for name, value in one.items() if name != "sequence_number"}
        for one in said
        if not one["type"].endswith(".delta")
    ]


@given(messages().flatmap(lambda text: st.tuples(st.just(text), pieces(text), pieces(text))))
def test_any_cut_of_the_text_tells_the_same_items_and_numbers_without_gaps(
    cut: tuple[str, list[str], list[str]],
) -> None:
    _, one, other = cut
    said, telling = told(one)
    again, same = told(other)
    assert without_deltas(said) == without_deltas(again)
    assert telling.kept == same.kept
    assert [each["sequence_number"] for each in said] == list(range(len(said)))
    assert told(one)[0] == said
    for item in telling.output:
        assert item["status"] in ("completed", "incomplete", "failed")
        deltas = [
            each["delta"] for each in said if each.get("item_id") == item["id"] and each["type"].endswith(".delta")
        ]
        assert "".join(deltas) == (item["content"][0]["text"] if item["type"] == "message" else item["arguments"])
    for each in said:
        check_event(each)


@given(messages())
def test_what_is_told_can_be_sent_back_and_is_what_is_kept(text: str) -> None:
    _, telling = told([text])
    sent = input_items(telling.output)
    kept = [{name: value for name, value in item.items() if name not in ("id", "logprobs")} for item in telling.kept]
    assert [item for item in sent if item["type"] != "message"] == [item for item in kept if item["type"] != "message"]
    assert [item["text"] for item in sent if item["type"] == "message"] == [
        item["text"] for item in kept if item["type"] == "message"
    ]


def test_a_call_that_waits_for_approval_is_told_as_a_question_and_others_with_it_wait() -> None:
    texts = ["Well. ", call("bash", {"command": "ls"}), "\n", call("look", {})]
    asked = (
        "tool.approval_required",
        {"question_id": "qst_1", "call": 0, "name": "bash", "arguments": {"command": "ls"}},
    )
    said, telling = told(texts, ("bash",), (asked, ("session.waiting", {"waiting_for": "approval"})))
    assert [item["type"] for item in telling.output] == ["message", "mcp_approval_request"]
    assert said[-1]["type"] == "response.completed"
    assert [item["type"] for item in telling.kept] == ["message", "mcp_approval_request"]


def test_calls_that_were_held_are_told_once_they_run_and_the_callers_are_handed_over() -> None:
    held = {
        0: {"name": "bash", "arguments": '{"command": "ls"}', "question": "qst_1"},
        1: {"name": "look", "arguments": "{}"},
        2: {"name": "python", "arguments": "{}"},
    }
    telling = Telling(dict(BASE), "ses_1", HERMES, ["look"], None, asks=("bash",), held=held, held_step=2)
    events: list[tuple[str, Any]] = [
        ("question.answered", {"question_id": "qst_1", "decision": "decline"}),
        ("tool.settled", {"call": 0, "name": "bash", "reason": "refused", "code": None, "preview": "it was declined"}),
        ("tool.started", {"call": 2, "name": "python", "run": 1}),
        ("tool.settled", {"call": 2, "name": "python", "reason": "exit", "code": 0, "preview": "4"}),
        ("tool.client_required", {"call": 1, "name": "look", "arguments": {}, "question_id": "qst_2"}),
        ("session.waiting", {"waiting_for": "client_tool"}),
    ]
    said = telling.begin()
    for position, (kind, data) in enumerate(events):
        said += telling.feed({"id": position + 1, "type": kind, "step": 3, "data": data})
    declined, ran, handed = telling.output
    assert (declined["status"], declined["approval_request_id"], declined["output"]) == (
        "failed",
        "qst_1",
        "it was declined",
    )
    assert (ran["status"], ran["output"]) == ("completed", "4")
    assert (handed["type"], handed["call_id"], handed["status"]) == ("function_call", "call_1_2_1", "completed")
    assert len({item["id"] for item in telling.output}) == 3
    assert telling.response()["status"] == "completed"
    for each in said:
        check_event(each)
