"""Forms of answers: what is whole is of the form, whatever the model would rather say."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from engine.constraint import Constraints
from engine.errors import ToolSchemaError
from engine.tokens import Form, Tokenizer, ToolSpec, load_tokenizer, tool_grammar
from engine.tokens.grammar import new_matcher
from tests.engine.tiny import write_tiny

MOST_TOKENS = 160


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Constraints]:
    path = write_tiny(tmp_path_factory.mktemp("forms") / "tiny.gguf")
    return load_tokenizer(path), Constraints(path, 265)


def written(bytewise: tuple[Tokenizer, Constraints], grammar: str | None, seed: int) -> tuple[str, bool]:
    """What a model without a will writes, and whether it is whole."""
    tokenizer, constraints = bytewise
    assert grammar is not None
    state, draw, ids = constraints.build(grammar), random.Random(seed), list[int]()
    while len(ids) < MOST_TOKENS:
        allowed = state.allowed()
        if allowed is None:
            break
        possible = np.flatnonzero(allowed)
        ends = [token for token in possible if token in tokenizer.eos_token_ids]
        likely = [token for token in possible if chr(token % 256) in '"}]0,{' or token in ends] or list(possible)
        token = int(draw.choice(ends if ends and draw.random() < 0.7 else likely if draw.random() < 0.5 else possible))
        if not state.accept(token):
            break
        if token in tokenizer.eos_token_ids:
            return tokenizer.decode(ids), True
        ids.append(token)
    return tokenizer.decode(ids), False


def _integers(low: int, more: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": low + more}


def _strings(low: int, more: int) -> dict[str, Any]:
    return {"type": "string", "minLength": low, "maxLength": low + more}


VALUES = st.lists(st.one_of(st.integers(-9, 9), st.text('abé"\\', max_size=4)), min_size=1, max_size=4, unique_by=repr)
SCALARS = st.one_of(
    st.builds(_integers, st.integers(-99, 99), st.integers(0, 999)),
    st.builds(_strings, st.integers(0, 3), st.integers(0, 5)),
    st.builds(lambda values: {"enum": values}, VALUES),
    st.sampled_from([{"type": "string", "pattern": p} for p in ("^[a-c]{2,4}$", "^(yes|no)$", "^\\d+-x$")]),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"type": "number"}]),
    st.just({"const": {"a": [1, "b"]}}),
)


def _objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def built(members: dict[str, dict[str, Any]], required: bool) -> dict[str, Any]:
        return {"type": "object", "properties": members, "required": list(members) if required else []}

    return st.builds(built, st.dictionaries(st.text("abn é", min_size=1, max_size=4), inner, max_size=3), st.booleans())


def _arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda item, most: {"type": "array", "items": item, "maxItems": most}, inner, st.integers(0, 3))


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(_objects(inner), _arrays(inner), st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)),
    max_leaves=5,
)


def _validates(bytewise: tuple[Tokenizer, Constraints], schema: dict[str, Any], seed: int) -> None:
    text, whole = written(bytewise, tool_grammar((), "none", Form.json(schema)), seed)
    if whole:
        jsonschema.validate(json.loads(text), schema)


@given(schema=SCHEMAS, seed=st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_whole_validates(bytewise: tuple[Tokenizer, Constraints], schema: dict[str, Any], seed: int) -> None:
    _validates(bytewise, schema, seed)


@pytest.mark.soak
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 30))
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_of_a_thousand_schemas_what_is_whole_validates(
    bytewise: tuple[Tokenizer, Constraints], schema: dict[str, Any], seed: int
) -> None:
    _validates(bytewise, schema, seed)


@pytest.mark.parametrize("pattern", ["yes|no", "[a-c]{3}/[0-9]{2}", r"a\/b\n?", "x\ny", "é+z", "(a*)*b"])
def test_an_answer_is_the_whole_of_its_pattern(bytewise: tuple[Tokenizer, Constraints], pattern: str) -> None:
    for seed in range(8):
        text, whole = written(bytewise, tool_grammar((), "none", Form.regex(pattern)), seed)
        assert not whole or re.fullmatch(pattern, text), text


def test_with_tools_a_message_is_an_answer_or_calls(bytewise: tuple[Tokenizer, Constraints]) -> None:
    tokenizer, constraints = bytewise
    tool = ToolSpec("look", "", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    grammar = tool_grammar([tool], "auto", Form.regex("yes|no"))
    assert grammar is not None
    call = '<tool_call>\n{"name": "look", "arguments": {"n": 4}}\n</tool_call>'
    for text, fits in [("yes", True), (call, True), (f"{call}\n{call}", True), ("maybe", False), (f"yes{call}", False)]:
        state = constraints.build(grammar)
        taken = [state.accept(token) for token in tokenizer.encode(text)]
        assert all(taken) is fits, text
    assert tool_grammar([tool], "required", Form.regex("yes")) == tool_grammar([tool], "required")


BAD_FORMS = [
    {"enum": []},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "integer", "minimum": 5, "maximum": 1},
    {"$ref": "http://example.org/schema"},
    {"$ref": "#/nowhere"},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"not": {}},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": "string", "maxLength": 10**9},
    {"anyOf": [{"const": n} for n in range(9000)]},
    {"type": "string", "pattern": "("},
    {"type": "string", "format": "no such"},
]


@pytest.mark.parametrize("schema", BAD_FORMS, ids=lambda schema: str(schema)[:40])
def test_an_impossible_schema_is_refused_in_a_sentence(schema: dict[str, Any]) -> None:
    with pytest.raises(ToolSchemaError) as refused:
        tool_grammar((), "none", Form.json(schema))
    assert str(refused.value).startswith(("the schema of the answer", "this grammar cannot be used"))


def test_a_schema_that_is_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(ToolSchemaError, match="nested"):
        Form.json(schema)


@pytest.mark.parametrize("pattern", ["(", "(?=a)b", r"(a)\1", "[]", "\\", "$^", "a" * 5000, "[^\\x00-\\U0010ffff]"])
def test_a_pattern_that_cannot_be_is_refused_in_a_sentence(pattern: str) -> None:
    with pytest.raises(ToolSchemaError):
        Form.regex(pattern)


@pytest.mark.parametrize("pattern", ["((a{1,99}){1,99}){1,99}", "(.{1,999}x){999}", "(.*a){20}.{40}", "(a|aa)+b"])
def test_a_pattern_that_others_choke_on_is_walked_or_ends_the_message(
    bytewise: tuple[Tokenizer, Constraints], pattern: str
) -> None:
    for seed in range(3):
        text, whole = written(bytewise, tool_grammar((), "none", Form.regex(pattern)), seed)
        assert len(text) <= 4 * MOST_TOKENS
        assert whole in (True, False)


def test_the_tiny_model_of_these_tests_has_a_token_for_every_byte(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tiny(tmp_path / "tiny.gguf"))
    assert tokenizer.decode(tokenizer.encode("é🙂\x00")) == "é🙂\x00"


def test_a_pattern_that_is_too_large_to_walk_ends_before_it_holds_up_others() -> None:
    tokenizer = LLTokenizer("byte")
    grammar = tool_grammar([], "auto", Form.regex("(.{1,4000}x|.{1,4000}y){1,4000}"))
    assert grammar is not None

    def walked(matcher: Any) -> int:
        """Tokens until it is in error."""
        text = tokenizer.tokenize_str("hello y" * 200)
        return next((at for at, token in enumerate(text) if not matcher.consume_token(token)), len(text))

    assert 0 < walked(new_matcher(tokenizer, grammar)) < walked(LLMatcher(tokenizer, grammar, log_level=0))


def test_a_large_and_sensible_form_is_walked_to_its_end() -> None:
    tokenizer = LLTokenizer("byte")
    names = [f"field_{number}" for number in range(100)]
    mail = {"type": "string", "pattern": "^[a-z0-9.-]{1,64}@[a-z.]{1,64}$"}
    schema = {"type": "object", "properties": dict.fromkeys(names, mail), "required": names}
    grammar = tool_grammar([], "auto", Form.json(schema))
    assert grammar is not None
    matcher = new_matcher(tokenizer, grammar)
    for token in tokenizer.tokenize_str(json.dumps(dict.fromkeys(names, "sea.and.boat@tide.example"))):
        assert matcher.consume_token(token)
        matcher.compute_bitmask()
    assert matcher.is_accepting()
