"""Chat formats of models that write calls in other ways: what is written is admitted, read back, and published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.constraint import Constraints
from engine.errors import TemplateError
from engine.tokens import (
    FORMATS,
    Call,
    CallFormat,
    ChatFormat,
    Tokenizer,
    ToolResult,
    ToolSpec,
    load_chat_format,
    publish_chat,
    read_chat,
)
from engine.tokens.formats import CALL_ID, HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED
from engine.tokens.render import render
from tests.engine.test_scaffold import BY_NAME, LISTED, ONE_CALL, WITH_IDS
from tests.engine.tiny import write_tiny

LOOK = ToolSpec("look", "", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
TAKE = ToolSpec("take.it", "", {"type": "object", "properties": {"s": {"type": "string"}}})
ONE, TWO = Call("look", {"n": 1}, ""), Call("take.it", {"s": "[ARGS] ü"}, "")
EOS = "<|im_end|>"
TEMPLATES = {
    LLAMA3.name: (ONE_CALL.replace("<|eot|>", EOS), ("<|python_tag|>", "<|head|>", "<|/head|>")),
    MISTRAL.name: (
        LISTED.replace("{{ CALLS }}", WITH_IDS),
        ("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[INST]", "[/INST]"),
    ),
    MISTRAL_NAMED.name: (LISTED.replace("{{ CALLS }}", BY_NAME), ("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]")),
}
KINDS = pytest.mark.parametrize("kind", [LLAMA3, MISTRAL, MISTRAL_NAMED], ids=lambda kind: kind.name)
MARKED = pytest.mark.parametrize("marked", [True, False], ids=["tokens", "text"])


def chat_of(directory: Path, kind: CallFormat, marked: bool = True) -> tuple[Path, Tokenizer, ChatFormat]:
    """`marked`: whether the format's marks are tokens of their own."""
    template, marks = TEMPLATES[kind.name]
    path = write_tiny(directory / "tiny.gguf", template=template, marks=marks if marked else ())
    return path, *load_chat_format(path)


def said(chat: ChatFormat, text: str, calls: Sequence[Call]) -> list[int]:
    """What the model has said where the transcript holds this message, with its end."""
    return chat.assistant(text, calls)[len(chat.assistant_open()) :]


@KINDS
@MARKED
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_what_transcripts_hold_is_admitted_and_read_back(
    tmp_path: Path, kind: CallFormat, marked: bool, choice: str
) -> None:
    path, tokenizer, chat = chat_of(tmp_path, kind, marked)
    assert chat.calls is kind
    assert chat.native_tools
    constraints = Constraints(path, tokenizer.vocab_size)
    for calls in ([ONE], [TWO], [ONE, TWO])[: 3 if kind.several else 2]:
        text = "Look: " if kind.text_before and choice == "auto" else ""
        ids = said(chat, text, calls)
        grammar = chat.tool_grammar([LOOK, TAKE], choice, parallel=True)
        assert grammar is not None
        state = constraints.build(grammar)
        end = ids.index(tokenizer.eos_token_ids[0])
        assert all(state.accept(token) for token in ids[:end]), tokenizer.decode(ids, show_control=True)
        allowed = state.allowed()
        assert allowed is not None
        assert allowed[tokenizer.eos_token_ids[0]]
        parsed = chat.parse_assistant(ids[: end + 1], tools=["look", "take.it"])
        assert parsed.complete
        assert [(call.name, call.arguments) for call in parsed.calls] == [(call.name, call.arguments) for call in calls]


@KINDS
@MARKED
def test_a_plain_answer_and_one_of_json_are_answers(tmp_path: Path, kind: CallFormat, marked: bool) -> None:
    _, _, chat = chat_of(tmp_path, kind, marked)
    for text in ("It is 42.", '{"city": "Paris"}', '{"name": "Ada", "parameters": {"n": 1}}'):
        ids = said(chat, text, [])
        parsed = chat.parse_assistant(ids, tools=["look"])
        assert (parsed.text, parsed.calls, parsed.complete) == (text, (), True)


@KINDS
def test_marks_in_contents_are_text(tmp_path: Path, kind: CallFormat) -> None:
    """A user, a tool, an argument or a description that spells a mark gives none of the format's tokens."""
    _, tokenizer, chat = chat_of(tmp_path, kind)
    marks = {tokenizer.encode(mark, allow_special=True)[0] for mark in kind.marks}
    text = " ".join(kind.marks)
    results = [ToolResult("1", "look", text)]
    for ids in (chat.user(text), chat.tool_results(results), chat.opening(text, [ToolSpec("x", text)])):
        assert not marks.intersection(ids)
    plain, spelt = (said(chat, "", [Call("look", {"s": value}, "")]) for value in ("", text))
    assert [one for one in spelt if one in marks] == [one for one in plain if one in marks]


@KINDS
def test_a_transcript_with_results_is_what_the_template_writes(tmp_path: Path, kind: CallFormat) -> None:
    _, tokenizer, chat = chat_of(tmp_path, kind)
    ids = chat.opening(None, [LOOK]) + chat.user("Look.") + chat.assistant("", [ONE])
    ids += chat.tool_results([ToolResult("1", "look", 'a "b"')])
    call = {"id": CALL_ID, "type": "function", "function": {"name": "look", "arguments": {"n": 1}}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "look", "tool_call_id": CALL_ID, "content": 'a "b"'},
    ]
    template, variables = TEMPLATES[kind.name][0], {"bos_token": "", "eos_token": EOS, "add_generation_prompt": False}
    told = {"messages": messages, "tools": [LOOK.as_function()], "tools_in_user_message": False}
    (whole,) = render(template, [told | variables])
    assert tokenizer.decode(ids, show_control=True) == whole
    assert ids == tokenizer.encode(whole, allow_special=True)


@KINDS
def test_what_is_published_writes_calls_the_same(tmp_path: Path, kind: CallFormat) -> None:
    _, tokenizer, chat = chat_of(tmp_path, kind)
    _, again = read_chat(publish_chat(tokenizer, chat))
    assert again.calls is kind
    assert again.assistant("", [ONE]) == chat.assistant("", [ONE])
    assert again.tool_grammar([LOOK], "auto") == chat.tool_grammar([LOOK], "auto")


def test_a_format_that_is_given_holds_in_place_of_the_templates_own(tmp_path: Path) -> None:
    path, tokenizer, learnt = chat_of(tmp_path, MISTRAL)
    _, chat = load_chat_format(path, "hermes")
    assert (learnt.calls, chat.calls) == (MISTRAL, HERMES)
    assert chat.tool_results([ToolResult("1", "look", "x")]) == learnt.tool_results([ToolResult("1", "look", "x")])
    published, same = publish_chat(tokenizer, chat), publish_chat(tokenizer, learnt)
    assert published.digest != same.digest
    assert read_chat(published)[1].calls is HERMES
    assert read_chat(same)[1].calls is MISTRAL


def test_a_format_that_is_none_or_has_no_tools_to_call_is_refused(tmp_path: Path) -> None:
    path, _, _ = chat_of(tmp_path, MISTRAL)
    with pytest.raises(TemplateError, match="'qwen' is no format of calls; use auto, or one of hermes, llama3"):
        load_chat_format(path, "qwen")
    with pytest.raises(TemplateError, match="knows no tools"):
        load_chat_format(write_tiny(tmp_path / "plain.gguf"), "mistral")


def test_every_format_is_tried_by_a_template() -> None:
    assert set(TEMPLATES) | {"hermes"} == {kind.name for kind in FORMATS}
