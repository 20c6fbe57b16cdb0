"""Conversations as they are sent, kept and told to a session."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.openai import Chain, as_engine, input_items, listed
from runtime.openai.tools import called_name, server_of

TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=12)
NAME = st.from_regex(r"[a-z]{1,6}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT, lambda one: st.lists(one, max_size=3), max_leaves=5
)
ARGUMENTS = st.dictionaries(TEXT, VALUES, max_size=3)
ROOT = {"model": "m", "system": None, "tools": []}


@st.composite
def turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A conversation in which every call has its result."""
    items: list[dict[str, Any]] = []
    for index in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(("user", "assistant", "call", "reasoning", "approval")))
        if kind in ("user", "assistant"):
            items.append({"type": "message", "role": kind, "content": draw(TEXT)})
        elif kind == "reasoning":
            items.append({"type": "reasoning", "id": f"rs_{index}", "summary": []})
        elif kind == "approval":
            about = {"name": draw(NAME), "server_label": "tenuto", "arguments": json.dumps(draw(ARGUMENTS))}
            items.append({"type": "mcp_approval_request", "id": f"qst_{index}", **about})
            said = {"approval_request_id": f"qst_{index}", "approve": draw(st.booleans())}
            items.append({"type": "mcp_approval_response", **said})
        else:
            call = {"call_id": f"c{index}", "name": draw(NAME), "arguments": json.dumps(draw(ARGUMENTS))}
            items.append({"type": "function_call", **call})
            items.append({"type": "function_call_output", "call_id": f"c{index}", "output": draw(TEXT)})
    return items


@given(turns())
def test_what_is_listed_can_be_sent_again_and_is_the_same_conversation(sent: list[dict[str, Any]]) -> None:
    kept = input_items(sent)
    again = input_items(listed(kept, "item"))
    assert Chain.of(ROOT, again) == Chain.of(ROOT, kept)
    assert as_engine(again) == as_engine(kept)


@given(turns(), turns())
def test_a_conversation_begins_with_every_one_of_its_beginnings(first: Any, then: Any) -> None:
    kept, more = input_items(first), input_items(then)
    whole = Chain.of(ROOT, [*kept, *more])
    assert whole.digests[: len(kept) + 1] == Chain.of(ROOT, kept).digests
    assert len(whole.digests) == len(kept) + len(more) + 1


@given(turns(), turns())
def test_conversations_that_say_other_things_are_not_the_same(one: Any, other: Any) -> None:
    said = [input_items(each) for each in (one, other)]
    same = _said(said[0]) == _said(said[1])
    assert (Chain.of(ROOT, said[0]).last == Chain.of(ROOT, said[1]).last) is same
    assert Chain.of({**ROOT, "system": "x"}, said[0]).last != Chain.of(ROOT, said[0]).last


def _said(items: Any) -> Any:
    ids = ("call_id", "reason")
    said = [{k: v for k, v in item.items() if k not in ids} for item in items if item["type"] != "reasoning"]
    for item in said:
        if item["type"] == "function_call":
            item["arguments"] = json.dumps(json.loads(item["arguments"]), sort_keys=True)
        if item["type"] == "mcp_approval_request":
            said[said.index(item)] = {"type": item["type"], "id": item["id"]}
    return said


def test_how_arguments_are_spaced_and_what_calls_are_named_makes_no_other_conversation() -> None:
    one, other = (
        input_items(
            [
                {"type": "function_call", "call_id": call_id, "name": "f", "arguments": arguments},
                {"type": "function_call_output", "call_id": call_id, "output": "x"},
            ]
        )
        for call_id, arguments in (("a", '{"x":1,"y":2}'), ("b", '{ "y": 2, "x": 1 }'))
    )
    assert Chain.of(ROOT, one) == Chain.of(ROOT, other)


@pytest.mark.parametrize(
    "error", [None, {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "no"}]}]
)
def test_what_ran_inside_is_sent_back_as_a_call_and_its_output(error: Any) -> None:
    item = {"type": "mcp_call", "id": "m", "server_label": "weather", "name": "look", "arguments": "{}", "error": error}
    call, output = input_items([{**item, "output": None if error else "Fog."}])
    assert (call["name"], output["output"]) == ("weather__look", "no" if error else "Fog.")
    assert server_of(call["name"]) == ("weather", "look")
    assert called_name(*server_of("bash")) == "bash"


@pytest.mark.parametrize(
    "items",
    [
        [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}],
        [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"role": "user", "content": "x"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        [{"type": "function_call_output", "call_id": "c", "output": "x"}],
    ],
)
def test_a_call_without_its_result_is_refused(items: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        as_engine(input_items(items))
    assert refused.value.param == "input"
