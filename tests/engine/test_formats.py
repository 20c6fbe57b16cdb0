"""Ways of writing calls: admitted by a grammar, read as they come, and written back the same."""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.constraint import Constraints
from engine.tokens import (
    FORMATS,
    ArgumentsDelta,
    CallEnded,
    CallFormat,
    CallStarted,
    Form,
    MessageParser,
    TextDelta,
    Tokenizer,
    ToolSpec,
    load_tokenizer,
    tool_grammar,
)
from engine.tokens.formats import CALL_ID, HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED
from engine.tokens.incremental import MAX_CALLS
from tests.engine.tiny import write_tiny

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "s": {"type": "string", "maxLength": 6}},
    "required": ["n"],
}
LOOK, TAKE = ToolSpec("look", "", SCHEMA), ToolSpec("take.it", "", SCHEMA)
BY_NAME = pytest.mark.parametrize("kind", FORMATS, ids=[one.name for one in FORMATS])

ARGUMENTS = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.integers() | st.text(max_size=8) | st.booleans() | st.none(),
        _nested := (
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=3,
)
# What calls are made of, whole and in halves.
PARTS = st.sampled_from(
    [*'{}[]":, \n\\', "look", '{"name": "look"', '"name": "other"', ', "arguments": ', ', "parameters": ', '{"n": 1}']
    + [text for kind in FORMATS for text in (*kind.marks, *(mark[:5] for mark in kind.marks), kind.lead, kind.end)]
    + [kind.written([("look", {"n": 1})]) for kind in FORMATS]
)
CALLS = st.lists(st.tuples(st.sampled_from(["look", "take.it", "a_b-c"]), ARGUMENTS), min_size=1, max_size=4)


def read(
    kind: CallFormat, pieces: list[str], tools: Collection[str] | None = None
) -> tuple[str, list[tuple[str, str, Any]], bool]:
    """Text, calls with what was told of their arguments, and whether one was broken."""
    parser = MessageParser(kind, tools)
    told = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    names: dict[int, str] = {}
    shown: dict[int, str] = {}
    calls = []
    for delta in told:
        if isinstance(delta, CallStarted):
            names[delta.index] = delta.name
        elif isinstance(delta, ArgumentsDelta):
            assert delta.index in names, "a name comes first"
            shown[delta.index] = shown.get(delta.index, "") + delta.text
        elif isinstance(delta, CallEnded) and delta.call is not None:
            assert names[delta.index] == delta.call.name
            calls.append((delta.call.name, shown[delta.index], delta.call.arguments))
    return "".join(one.text for one in told if isinstance(one, TextDelta)), calls, parser.broken


def cut(text: str, seed: int) -> list[str]:
    draw, pieces = random.Random(seed), []
    while text:
        size = draw.randint(1, 7)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@BY_NAME
@given(calls=CALLS, before=st.text("ab<[{ \n", max_size=12), seed=st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_however_it_comes(
    kind: CallFormat, calls: list[tuple[str, dict[str, Any]]], before: str, seed: int
) -> None:
    calls = calls if kind.several else calls[:1]
    before = before if kind.text_before else ""
    text = before + kind.written(calls)
    said, found, broken = read(kind, [text])
    assert not broken
    assert said.strip("\n") == before.strip("\n") or said == before
    assert [(name, arguments) for name, _, arguments in found] == calls
    assert [json.loads(shown) for _, shown, _ in found] == [arguments for _, arguments in calls]
    assert read(kind, cut(text, seed)) == (said, found, broken)


@BY_NAME
@given(
    text=st.text('<tool_cal>/[TOOL_CALLS]{}":,name parguments\\\n look', max_size=60) | st.lists(PARTS).map("".join),
    tools=st.sampled_from([None, ["look"], []]),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=150, deadline=None)
def test_what_is_no_call_reads_the_same_however_it_comes(
    kind: CallFormat, text: str, tools: list[str] | None, seed: int
) -> None:
    said, calls, broken = read(kind, [text], tools)
    assert read(kind, cut(text, seed), tools) == (said, calls, broken)
    assert read(kind, list(text), tools) == (said, calls, broken)
    if not calls and not broken:
        assert said == (text.replace(kind.may_be_marked, "", 1) if said != text else text)


@BY_NAME
@given(calls=CALLS, share=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_a_call_that_is_cut_short_is_none(
    kind: CallFormat, calls: list[tuple[str, dict[str, Any]]], share: float
) -> None:
    calls = calls if kind.several else calls[:1]
    text = kind.written(calls)
    short = text[: int(share * len(text))]
    said, found, _ = read(kind, [short])
    whole = [(name, arguments) for name, _, arguments in found]
    assert whole == calls[: len(whole)]
    assert not any(mark in said for mark in kind.marks)


def test_arguments_are_told_before_they_are_whole_and_half_a_marker_is_not() -> None:
    parser = MessageParser(HERMES)
    assert parser.push("Look: <tool") == [TextDelta("Look: ")]
    assert parser.push("_call>\n") == []
    assert parser.push('{"name": "look", "argu') == [CallStarted(0, "look")]
    assert parser.push('ments": {"n": 1') == [ArgumentsDelta(0, '{"n": 1')]
    assert parser.push("2}}\n</tool") == [ArgumentsDelta(0, "2}")]
    (ended,) = parser.push("_call>")
    assert isinstance(ended, CallEnded)
    assert ended.call is not None
    assert ended.call.arguments == {"n": 12}


def test_arguments_before_the_name_wait_for_it() -> None:
    text = '<tool_call>{"arguments": {"n": [1, {"}": "]"}]}, "name": "look"}</tool_call>'
    assert read(HERMES, cut(text, 1))[1] == [("look", '{"n": [1, {"}": "]"}]}', {"n": [1, {"}": "]"}]})]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "look", "name": "take", "arguments": {}}',
        '{"name": "look", "arguments": {"n": 1}, "arguments": {"n": 2}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "look", "arguments": [1]}',
        '{"name": "look"}',
        '["look"]',
        '{"name": "look", "arguments": {}} and more',
        '{"name": "look", "arguments": {]}',
        '{"name": "look", "arguments": {"n": NaN}}',
        '{"name": "look", "arguments": {"n": [-Infinity, 1e999]}}',
    ],
)
def test_what_could_mean_two_things_or_none_is_no_call(body: str) -> None:
    assert read(HERMES, [f"<tool_call>{body}</tool_call>"])[1:] == ([], True)


def test_a_deep_and_a_long_call_are_read_in_one_walk() -> None:
    deep = '<tool_call>{"name": "look", "arguments": ' + '{"a":' * 50_000 + "1" + "}" * 50_000 + "}</tool_call>"
    assert read(HERMES, [deep])[1:] == ([], True)  # deeper than JSON is read
    long = HERMES.written([("look", {"s": "x" * 500_000})])
    assert read(HERMES, [long[at : at + 16] for at in range(0, len(long), 16)])[2] is False
    blank = " " * 100_000  # what is held back is looked at once
    for kind, text in ((LLAMA3, blank), (HERMES, HERMES.written([("look", {})]).removesuffix(HERMES.end) + blank)):
        assert read(kind, list(text))[:2] == (blank if kind is LLAMA3 else "", [])


def test_more_calls_than_a_message_may_have_are_none() -> None:
    said, calls, broken = read(HERMES, [HERMES.written([("look", {})] * (MAX_CALLS + 1))])
    assert (len(calls), broken) == (MAX_CALLS, False)
    assert HERMES.marker in said
    _, calls, broken = read(MISTRAL, [MISTRAL.written([("look", {})] * (MAX_CALLS + 1))])
    assert (len(calls), broken) == (MAX_CALLS, True)


@pytest.mark.parametrize("lead", ["", "<|python_tag|>", " \n"])
def test_llama_calls_where_a_message_begins_as_one(lead: str) -> None:
    body = LLAMA3.written([("look", {"n": 1})])
    assert read(LLAMA3, cut(lead + body, 3))[1] == [("look", '{"n": 1}', {"n": 1})]
    assert read(LLAMA3, ["I say " + body]) == ("I say " + body, [], False)


@pytest.mark.parametrize(
    ("text", "tools"),
    [
        ("Words, and no more.", None),
        (' {"city": "Paris", "name": "x"}', None),
        ('{"name": "Ada", "age": 36}', None),
        ('{"name": "look"}', None),
        ('{"name": "look", "parameters": [1]}', None),
        ('{"parameters": {"n": 1}, "of": 2}', None),
        ('{"name": "other", "parameters": {"n": 1}}', ["look"]),
        ('{"name": "look", "parameters": {"n": 1}}', []),
        ('{"na', None),
        ("{]", None),
        ("<|python", None),
        (" \n", None),
    ],
)
def test_json_without_a_marker_is_an_answer_where_it_is_no_call(text: str, tools: list[str] | None) -> None:
    for pieces in ([text], list(text)):
        assert read(LLAMA3, pieces, tools) == (text, [], False)


def test_a_call_without_a_marker_is_told_once_it_is_known_to_be_one() -> None:
    parser = MessageParser(LLAMA3, ["look"])
    assert parser.push('{"type": "function", "name": "look", "param') == []
    assert parser.push('eters": ') == []
    assert parser.push('{"n"') == [CallStarted(0, "look"), ArgumentsDelta(0, '{"n"')]
    assert parser.push(": 1") == [ArgumentsDelta(0, ": 1")]
    assert parser.finish() == [CallEnded(0, None)]
    assert parser.broken


# -- what may be written ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Constraints]:
    path = write_tiny(tmp_path_factory.mktemp("formats") / "tiny.gguf")
    return load_tokenizer(path), Constraints(path, 265)


def walk(bytewise: tuple[Tokenizer, Constraints], grammar: str, seed: int, begins: str = "") -> str | None:
    """What a model without a will writes after this beginning, if it comes to an end."""
    tokenizer, constraints = bytewise
    state, draw, ids = constraints.build(grammar), random.Random(seed), tokenizer.encode(begins)
    assert all(state.accept(token) for token in ids), begins
    for _ in range(300):
        allowed = state.allowed()
        if allowed is None:
            return None
        possible = np.flatnonzero(allowed)
        ends = [token for token in possible if token in tokenizer.eos_token_ids]
        if ends and draw.random() < 0.6:
            return tokenizer.decode(ids)
        plain = [token for token in possible if token not in tokenizer.eos_token_ids]
        likely = [token for token in plain if chr(token % 256) in '"}]0,{'] or plain
        if not plain:
            return tokenizer.decode(ids)
        ids.append(int(draw.choice(likely if draw.random() < 0.7 else plain)))
        assert state.accept(ids[-1])
    return None


@BY_NAME
@pytest.mark.parametrize("choice", ["required", "auto", {"name": "look"}], ids=["required", "auto", "named"])
@pytest.mark.parametrize("parallel", [True, False])
def test_whatever_may_be_written_is_read_as_calls_of_the_schema(
    bytewise: tuple[Tokenizer, Constraints], kind: CallFormat, choice: Any, parallel: bool
) -> None:
    grammar = tool_grammar([LOOK, TAKE], choice, format=kind, parallel=parallel)
    assert grammar is not None
    whole, most = 0, 0
    begins = "" if choice != "auto" else kind.marker or "{"
    for seed in range(30):
        text = walk(bytewise, grammar, seed, begins)
        if text is None:
            continue
        _, calls, broken = read(kind, [text])
        assert calls
        assert not broken, text
        for name, _, arguments in calls:
            jsonschema.validate(arguments, SCHEMA)
            assert name in (["look"] if isinstance(choice, dict) else ["look", "take.it"])
        whole, most = whole + 1, max(most, len(calls))
    assert whole > 5
    assert most == 1 or (parallel and kind.several)


@BY_NAME
def test_several_calls_are_admitted_where_they_may_be_and_only_there(
    bytewise: tuple[Tokenizer, Constraints], kind: CallFormat
) -> None:
    tokenizer, constraints = bytewise
    two = kind.written([("look", {"n": 1}), ("take.it", {"n": 2})])
    for choice in ("auto", "required"):
        for parallel in (True, False, None):
            grammar = tool_grammar([LOOK, TAKE], choice, format=kind, parallel=parallel)
            assert grammar is not None
            state = constraints.build(grammar)
            fits = all(state.accept(token) for token in tokenizer.encode(two))
            wanted = kind.several and (parallel or (parallel is None and choice == "auto"))
            assert fits is wanted, (choice, parallel, grammar)


def test_an_answer_of_json_and_a_call_without_a_marker_may_begin_alike(
    bytewise: tuple[Tokenizer, Constraints],
) -> None:
    tokenizer, constraints = bytewise
    form = Form.json({"type": "object", "properties": {"name": {"type": "string"}, "names": {"type": "integer"}}})
    grammar = tool_grammar([LOOK], "auto", form, format=LLAMA3)
    assert grammar is not None
    call = LLAMA3.written([("look", {"n": 1})])
    for text in (call, '{"name": "look"}', '{"name": "loo"}', '{"name": "look", "names": 2}', '{"names": 3}', "{}"):
        state = constraints.build(grammar)
        assert all(state.accept(token) for token in tokenizer.encode(text)), text
        allowed = state.allowed()
        assert allowed is not None
        assert allowed[tokenizer.eos_token_ids[0]]
        assert bool(read(LLAMA3, [text], ["look"])[1]) is (text == call)
    assert not constraints.build(grammar).accept(tokenizer.encode("words")[0])


def test_marks_that_are_tokens_are_asked_for_as_such() -> None:
    for kind in (MISTRAL, MISTRAL_NAMED):
        grammar = tool_grammar([LOOK], "auto", format=kind, control={"[TOOL_CALLS]": 5})
        assert grammar is not None
        assert "<[5]>" in grammar
        assert '"[TOOL_CALLS]"' not in grammar
    assert CALL_ID in MISTRAL.written([("look", {})])


@BY_NAME
@pytest.mark.parametrize("is_token", [True, False], ids=["token", "text"])
@pytest.mark.parametrize("parallel", [True, False])
def test_text_that_begins_a_call_must_go_on_as_one(
    bytewise: tuple[Tokenizer, Constraints], kind: CallFormat, parallel: bool, is_token: bool
) -> None:
    """Also where the marker is spelt by tokens that are none of its own: it would be read as a call of no schema."""
    tokenizer, constraints = bytewise
    control = {kind.marker: 1} if is_token and kind.marker else None
    grammar = tool_grammar([LOOK], "auto", format=kind, parallel=parallel, control=control)
    assert grammar is not None
    for before in ("", "Look: ") if kind.text_before else ("",):
        state = constraints.build(grammar)
        ids = tokenizer.encode(f"{before}{kind.marker or '{'}zz")
        assert not all(state.accept(token) for token in ids)
        state = constraints.build(grammar)
        call = kind.written([("look", {"n": 1})]).removeprefix(kind.marker if control else "")
        assert all(state.accept(token) for token in tokenizer.encode(before))
        assert not control or state.accept(1)
        assert all(state.accept(token) for token in tokenizer.encode(call))
