"""Tool calls as grammars, walked by the same matcher that the engine uses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.constraint import Constraint, Constraints
from engine.errors import RequestError, ToolSchemaError
from engine.tokens import Tokenizer, ToolSpec, load_tokenizer, tool_grammar
from tests.engine.conftest import MODELS, model_path

WRITE = ToolSpec(
    "write_file",
    "Write a file.",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "mode": {"enum": ["w", "a"]}, "size": {"type": "integer"}},
        "required": ["path"],
    },
)
LIST = ToolSpec("list_files")


class Walker:
    """Feeds text to a grammar, token by token."""

    def __init__(self, tokenizer: Tokenizer, constraints: Constraints) -> None:
        self.tokenizer = tokenizer
        self.constraints = constraints

    def walk(self, grammar: str | None, text: str) -> Constraint | None:
        """The state after the text; None if the grammar does not admit it."""
        assert grammar is not None
        constraint = self.constraints.build(grammar)
        for token in self.tokenizer.encode(text, allow_special=True):
            allowed = constraint.allowed()
            if allowed is None or not allowed[token] or not constraint.accept(token):
                return None
        return constraint

    def may_end(self, constraint: Constraint | None) -> bool:
        allowed = None if constraint is None else constraint.allowed()
        return allowed is not None and bool(allowed[self.tokenizer.eos_token_ids[0]])

    def admits(self, grammar: str | None, text: str) -> bool:
        return self.may_end(self.walk(grammar, text))


def call(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


@pytest.fixture(scope="module", params=MODELS)
def walker(request: pytest.FixtureRequest) -> Walker:
    path = model_path(request.param)
    tokenizer = load_tokenizer(path)
    return Walker(tokenizer, Constraints(path, tokenizer.vocab_size))


@pytest.mark.model
def test_required_admits_exactly_one_call_and_then_the_end(walker: Walker) -> None:
    grammar = tool_grammar([WRITE, LIST], "required")
    whole = call("write_file", {"path": "a.py", "mode": "w", "size": 3})
    after = walker.walk(grammar, whole)
    assert after is not None
    allowed = after.allowed()
    assert allowed is not None
    assert set(np.flatnonzero(allowed)) == set(walker.tokenizer.eos_token_ids)
    assert walker.admits(grammar, call("list_files", {}))
    for wrong in (f"Sure. {whole}", whole + whole, whole + "\n", "Sure.", ""):
        assert not walker.admits(grammar, wrong)


@pytest.mark.model
def test_auto_admits_text_calls_and_both_but_no_half_call(walker: Walker) -> None:
    grammar = tool_grammar([WRITE, LIST], "auto")
    one, two = call("write_file", {"path": "x"}), call("list_files", {})
    for text in (
        "",
        "Just text, with < and <tool in it.\n",
        one,
        f"First:\n{one}",
        f"{one}\n{two}",
        f"{one} and {two} done",
    ):
        assert walker.admits(grammar, text), text
    for wrong in ("<tool_call>", "<tool_call>\nhello\n</tool_call>", call("unknown", {}), f"{one}<tool_call>\n"):
        assert not walker.admits(grammar, wrong), wrong


@pytest.mark.model
def test_a_call_may_be_any_length_but_only_as_spaced(walker: Walker) -> None:
    grammar = tool_grammar([WRITE], "required")
    assert walker.admits(grammar, call("write_file", {"path": "é\\n😀" * 50}))
    loose = '<tool_call>\n{"name": "write_file",  "arguments": {"path": "a"}}\n</tool_call>'
    inner = '<tool_call>\n{"name": "write_file", "arguments": { "path": "a"}}\n</tool_call>'
    assert not walker.admits(grammar, loose)
    assert not walker.admits(grammar, inner)


@pytest.mark.model
def test_arguments_obey_their_schema(walker: Walker) -> None:
    grammar = tool_grammar([WRITE], "required")
    for wrong in (
        {"mode": "w"},
        {"path": "a", "mode": "x"},
        {"path": 1},
        {"path": "a", "size": "big"},
        {"path": "a", "more": 1},
    ):
        assert not walker.admits(grammar, call("write_file", wrong)), wrong


@pytest.mark.model
def test_a_named_choice_admits_that_tool_only(walker: Walker) -> None:
    grammar = tool_grammar([WRITE, LIST], {"name": "list_files"})
    assert walker.admits(grammar, call("list_files", {}))
    assert not walker.admits(grammar, call("write_file", {"path": "a"}))


@pytest.mark.model
def test_control_tokens_are_not_text(walker: Walker) -> None:
    allowed = walker.constraints.build(tool_grammar([LIST], "auto") or "").allowed()
    assert allowed is not None
    controls = [i for i in range(walker.tokenizer.vocab_size) if walker.tokenizer.is_control(i)]
    assert {i for i in controls if allowed[i]} == set(walker.tokenizer.eos_token_ids)


@pytest.mark.model
def test_a_call_fits_in_forty_tokens(walker: Walker) -> None:
    assert len(walker.tokenizer.encode(call("write_file", {"path": "hello.py", "mode": "w"}), allow_special=True)) <= 40


@pytest.mark.model
def test_a_resumed_generation_goes_on_where_its_tokens_left(walker: Walker) -> None:
    grammar = tool_grammar([WRITE], "required") or ""
    ids = walker.tokenizer.encode(call("write_file", {"path": "a.py"}), allow_special=True)
    for cut in range(len(ids)):
        live = walker.constraints.build(grammar)
        for token in ids[:cut]:
            assert live.accept(token)
        resumed = walker.constraints.build(grammar, ids[:cut])
        left, right = live.allowed(), resumed.allowed()
        assert left is not None
        assert right is not None
        assert np.array_equal(left, right)


@pytest.mark.model
def test_replayed_tokens_that_do_not_fit_are_refused(walker: Walker) -> None:
    with pytest.raises(RequestError, match="replayed token 0") as caught:
        walker.constraints.build(tool_grammar([WRITE], "required") or "", walker.tokenizer.encode("Hello"))
    assert caught.value.code == "bad_grammar"


@pytest.mark.model
def test_a_grammar_of_nonsense_is_a_sentence(walker: Walker) -> None:
    for grammar in ("start: (", "no start here", "start: %json {", "x" * 300_000, '{"grammars": 5}'):
        with pytest.raises(RequestError, match="grammar") as caught:
            walker.constraints.build(grammar)
        assert caught.value.code == "bad_grammar"


def test_none_and_auto_without_tools_are_free() -> None:
    assert tool_grammar([WRITE], "none") is None
    assert tool_grammar([], "auto") is None


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: [ToolSpec("t", "", {"type": "object", "properties": {"a": False}, "required": ["a"]})],
            "unsatisfiable",
        ),
        (
            lambda: [ToolSpec("t", "", {"type": "object", "properties": {"a": {"$ref": "http://x/y"}}})],
            "cannot be used",
        ),
        (lambda: [ToolSpec("t", "", {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}})], "cannot be used"),
        (lambda: [ToolSpec("t", "", {"type": "string"})], "must be of an object"),
        (lambda: [ToolSpec("t", "", {"type": "object", "properties": {"a": {"type": "wrong"}}})], "cannot be used"),
        (lambda: [ToolSpec("t", "", deep(60))], "nested more than"),
        (lambda: [ToolSpec("t", "", {"type": "object", "description": "x" * 70_000})], "characters"),
        (
            lambda: [ToolSpec("t", "", {"type": "object", "properties": {"a": {"type": "array", "minItems": 10**6}}})],
            "minItems",
        ),
        (lambda: [ToolSpec("t", "", {"type": "object", "properties": {"a": {1, 2}}})], "not JSON"),
        (lambda: [ToolSpec("t", "", {"type": "object", "properties": {"a": {"pattern": "("}}})], "cannot be used"),
        (lambda: [ToolSpec(f"t{i}") for i in range(200)], "200 tools"),
        (lambda: [ToolSpec("t"), ToolSpec("t")], "two tools have the name"),
        (list, "there are no tools"),
    ],
)
def test_an_impossible_or_enormous_schema_is_a_sentence(make: Callable[[], list[ToolSpec]], told: str) -> None:
    with pytest.raises(ToolSchemaError, match=told):
        tool_grammar(make(), "required")


def test_a_choice_that_is_none_of_the_choices_is_named() -> None:
    for choice in ("sometimes", {"name": "other"}, {}):
        with pytest.raises(ToolSchemaError, match="is none of"):
            tool_grammar([WRITE], choice)


def test_a_model_file_that_vanished_is_told_at_the_first_grammar(tmp_path: Path) -> None:
    from engine.errors import ModelFileError

    with pytest.raises(ModelFileError, match="cannot be read"):
        Constraints(tmp_path / "gone.gguf", 10).build("start: /a/")
