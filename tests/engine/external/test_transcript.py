"""Transcripts of bytes, read back as the messages that they were made of."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine import RequestError
from engine.external.transcript import NO_RESULT, read
from engine.tokens import Call, ToolResult, ToolSpec, byte_chat, publish_chat, read_chat
from engine.tokens.bytewise import CONTROLS

TOKENIZER, CHAT = byte_chat()
SPEC = ToolSpec("look", "Looks. <|end|><tool_call>", {"type": "object", "properties": {"at": {"type": "string"}}})
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(CONTROLS)
SAID = TEXT.filter(lambda text: "<tool_call>" not in text and "think>" not in text)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.dictionaries(TEXT, JSON, max_size=3), min_size=1, max_size=3)
TURNS = st.lists(
    st.one_of(
        st.tuples(st.just("user"), TEXT),
        st.tuples(st.just("assistant"), SAID),
        st.tuples(st.just("calls"), st.tuples(SAID.map(lambda text: text.strip("\n")), CALLS, TEXT)),
    ),
    max_size=6,
)


def messages_of(turns):
    """Tokens and messages of the same turns."""
    tokens, wanted, calls = [], [], 0
    for kind, said in turns:
        if kind == "user":
            tokens += CHAT.user(said)
            wanted.append({"role": "user", "content": said})
        elif kind == "assistant":
            tokens += CHAT.assistant(said)
            wanted.append({"role": "assistant", "content": said})
        else:
            text, arguments, result = said
            ids = [f"call{calls + n + 1:05}" for n in range(len(arguments))]
            calls += len(arguments)
            tokens += CHAT.assistant(text, [Call("look", one, "") for one in arguments])
            tokens += CHAT.tool_results([ToolResult("", "look", result) for _ in arguments])
            functions = [{"name": "look", "arguments": one} for one in arguments]
            made = [
                {"id": i, "type": "function", "function": function} for i, function in zip(ids, functions, strict=True)
            ]
            wanted.append({"role": "assistant", "content": text, "tool_calls": made})
            wanted += [{"role": "tool", "tool_call_id": i, "content": result} for i in ids]
    return tokens, wanted


def parsed(messages):
    """With arguments as what they say; servers are sent their text."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


@given(st.none() | TEXT, TURNS)
@example("<|end|>", [("user", "<|assistant|>\0"), ("calls", ("", [{"<|end|>": "</tool_call>"}, {}], "<tool_call>"))])
def test_what_is_read_is_what_was_written(system, turns):
    tokens, wanted = messages_of(turns)
    opening = [{"role": "system", "content": system}] if system is not None else []
    told = read([*CHAT.opening(system), *tokens, *CHAT.assistant_open()])
    assert parsed(told.messages) == opening + wanted
    assert (told.tools, told.begun) == ([], "")


@given(TEXT)
def test_the_tokens_of_a_text_are_its_bytes(text):
    assert bytes(TOKENIZER.encode(text)) == text.encode()
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_tools_come_back_with_the_transcript_that_opens_with_them():
    told = read([*CHAT.opening("s", [SPEC]), *CHAT.user("u"), *CHAT.assistant_open()])
    (function,) = [tool["function"] for tool in told.tools]
    assert (function["name"], function["parameters"]) == ("look", dict(SPEC.parameters))
    assert [one["role"] for one in told.messages] == ["system", "user"]


def test_the_beginning_of_a_message_is_what_the_model_said_of_it():
    told = read([*CHAT.user("u"), *CHAT.assistant_open(), *TOKENIZER.encode("Once upon")])
    assert told.begun == "Once upon"
    assert [one["role"] for one in told.messages] == ["user"]


def test_calls_without_a_result_get_one_that_says_so():
    tokens = [*CHAT.assistant("", [Call("look", {}, "")] * 2), *CHAT.user("never mind"), *CHAT.assistant_open()]
    roles = [(one["role"], one["content"]) for one in read(tokens).messages]
    assert roles == [("assistant", ""), ("tool", NO_RESULT), ("tool", NO_RESULT), ("user", "never mind")]


def test_a_result_of_no_call_is_told_by_the_user():
    tokens = [*CHAT.assistant("{"), *CHAT.tool_results([ToolResult("", "x", "no call")]), *CHAT.assistant_open()]
    assert read(tokens).messages[-1] == {"role": "user", "content": "no call"}


def test_thoughts_are_not_sent_back():
    tokens = [*CHAT.assistant("<think>\nhm\n</think>\n\nYes."), *CHAT.user("?"), *CHAT.assistant_open()]
    assert read(tokens).messages[0]["content"] == "Yes."


def test_a_message_that_was_cut_for_a_summary_counts_as_it_is():
    tokens = [*CHAT.user("a long story")[:5], *CHAT.user("in brief?"), *CHAT.assistant_open()]
    assert [one["content"] for one in read(tokens).messages] == ["a lo", "in brief?"]


@pytest.mark.parametrize("tokens", [[65], [256], [263], [9999], [-1], CHAT.user("u"), CHAT.user("u")[:-1], []])
def test_what_no_assistant_goes_on_with_is_refused(tokens):
    with pytest.raises(RequestError) as refused:
        read(tokens)
    assert refused.value.code in ("bad_request", "token_out_of_range")


def test_the_api_counts_as_the_node_writes():
    tokenizer, chat = read_chat(publish_chat(TOKENIZER, CHAT))
    assert chat.opening("s", [SPEC]) == CHAT.opening("s", [SPEC])
    assert tokenizer.digest == TOKENIZER.digest
