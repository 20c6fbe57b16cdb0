"""Tool calls and forms of answers as grammars: what the model may write, in the template's own format.

Calls are written as a `CallFormat` says, with one way of spacing. `auto` admits free text and calls; text that begins a
call must go on as one. The strings are grammars of llguidance's Lark dialect.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ToolSchemaError
from engine.tokens.formats import HERMES, CallFormat
from engine.tokens.values import ToolSpec

MAX_TOOLS = 128
MAX_SCHEMA_CHARS = 65_536
MAX_PATTERN_CHARS = 4096
MAX_GRAMMAR_CHARS = 262_144
LEXER_FUEL = (200_000, 50_000)  # for the first token and for each later one: at most about 50 and 15 ms of everyone's
_MAX_DEPTH = 32
_MAX_REPEAT = 4096
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_CHECKED = 64  # what was found usable lately; a session asks for the same tools at every think
_JSON = re.compile(r'"(?:[^"\\]|\\.)*"|[{,:] ?')  # pieces as a schema's grammar has them
_BOUNDS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")

_ANSWER = "the schema of the answer"
Choice = str | Mapping[str, str]


@dataclass(frozen=True)
class Form:
    """What an answer must be: rules of the grammar that define `answer`. Made by `json` or `regex`; `schema` says the
    same of what `json` made."""

    rules: str
    schema: Mapping[str, Any] | None = None

    @classmethod
    def json(cls, schema: Mapping[str, Any]) -> Form:
        """Raises ToolSchemaError for a schema that is impossible, too large or not local."""
        return cls(f"answer: %json {_schema_text(schema, _ANSWER)}\n", dict(schema))

    @classmethod
    def regex(cls, pattern: str) -> Form:
        """A regular expression for a whole answer, without look-around and back-references. Raises ToolSchemaError."""
        if len(pattern) > MAX_PATTERN_CHARS:
            raise ToolSchemaError(
                f"a pattern of {len(pattern)} characters is more than the {MAX_PATTERN_CHARS} allowed"
            )
        form = cls(f"answer: /{_in_slashes(pattern)}/\n")
        check_grammar(f"start: answer\n{form.rules}")
        return form


def tool_grammar(
    tools: Sequence[ToolSpec],
    choice: Choice,
    form: Form | None = None,
    *,
    format: CallFormat = HERMES,
    parallel: bool | None = None,
    control: Mapping[str, int] | None = None,
) -> str | None:
    """A grammar for one assistant message, or None where the message is free.

    choice: "auto" (text, calls, or both), "none" (free text), "required" (a call, then the end), or {"name": tool}
    (a call of that tool). An object schema that lists properties and does not speak of others admits no others.
    form: of what is said where nothing is called; then a message is an answer, or calls and nothing else.
    parallel: whether a message may have several calls; None: where the choice is "auto". Formats of one call have one.
    control: ids of the format's marks that are control tokens.
    Raises ToolSchemaError, in a sentence, for a schema that is impossible, too large or not local.
    """
    if choice == "none" or (not tools and choice == "auto"):
        return _checked(f"start: answer\n{form.rules}") if form is not None else None
    chosen = _chosen(tools, choice)
    several = format.several and (choice == "auto" if parallel is None else parallel)
    names = [tool.name for tool in chosen]
    schemas = "".join(f"args_{index}: %json {_parameters(tool)}\n" for index, tool in enumerate(chosen))
    text = _checked(_Written(format, names, several, {}).message(choice == "auto", form) + schemas)
    if not control:
        return text
    return _Written(format, names, several, control).message(choice == "auto", form) + schemas


@dataclass(frozen=True)
class _Written:
    """The rules of a message around those of its calls' arguments. `control`: marks that are tokens, with their ids."""

    format: CallFormat
    names: Sequence[str]
    several: bool
    control: Mapping[str, int]

    def message(self, with_text: bool, form: Form | None) -> str:
        """`with_text`: whether the message may be something else than calls."""
        if not with_text:
            return f"start: calls\n{self._calls(lazy=False)}"
        if form is not None:
            return f"start: calls | answer\n{form.rules}{self._calls(lazy=False)}"
        if not self.format.marker:  # what begins as a call is one
            return f"start: calls | TEXT\nTEXT: /(\\s*[^{{\\s](.|\\n)*)?/\n{self._calls(lazy=False)}"
        if self.format.marker in self.control:
            before = "TEXT " if self.format.text_before else ""
            # Spelt by other tokens it would begin no call here, and be read as one.
            spelt = _in_slashes(re.escape(self.format.marker))
            text = f"TEXT: /(.|\\n)*/ & ~/(.|\\n)*{spelt}(.|\\n)*/\n"
            return f"start: TEXT | {before}calls\n{text}{self._calls(lazy=False)}"
        tail = "call* TEXT" if self.several and self.format.separator is None else "calls | TEXT"
        return f"start: {tail}\nTEXT: /(.|\\n)*/\n{self._calls(lazy=True)}"

    def _calls(self, lazy: bool) -> str:
        kind, mark = self.format, self._text(self.format.marker)
        bodies = "(" + " | ".join(f"body_{index}" for index in range(len(self.names))) + ")"
        lead, end = self._text(kind.lead), self._text(kind.end)
        trigger = f"trigger[lazy]: TEXT {mark}\n" if lazy else f"trigger: {mark}\n" if mark else ""
        begin = "trigger" if trigger else ""
        if kind.separator is not None:
            more = f"({_quoted(kind.separator)} {bodies})*" if self.several else ""
            return f"calls: {begin} {lead} {bodies} {more} {end}\n{trigger}{self._bodies()}"
        gap = "" if lazy else _quoted(kind.gap)
        more = f"({gap} call)*" if self.several else ""
        return f"calls: call {more}\ncall: {begin} {lead} {bodies} {end}\n{trigger}{self._bodies()}"

    def _bodies(self) -> str:
        after = self._text(self.format.after_arguments)
        return "".join(
            f"body_{index}: {self._head(name)} args_{index} {after}\n" for index, name in enumerate(self.names)
        )

    def _head(self, name: str) -> str:
        """A call up to its arguments; without a marker in the pieces of JSON, since an answer may begin like it."""
        text = self.format.before_arguments(name)
        return self._text(text) if self.format.marker else " ".join(map(_quoted, _JSON.findall(text)))

    def _text(self, text: str) -> str:
        """As the grammar writes a text in which marks may be tokens; nothing where there is none."""
        if not self.control:
            return _quoted(text)
        pieces = re.split("(" + "|".join(map(re.escape, self.control)) + ")", text)
        return " ".join(f"<[{self.control[one]}]>" if one in self.control else _quoted(one) for one in pieces if one)


def _quoted(text: str) -> str:
    """As the grammar writes a text; nothing where there is none."""
    return json.dumps(text) if text else ""


def _checked(grammar: str) -> str:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ToolSchemaError(
            f"the schemas make a grammar of {len(grammar)} characters; {MAX_GRAMMAR_CHARS} are allowed"
        )
    check_grammar(grammar)
    return grammar


@functools.lru_cache(maxsize=_CHECKED)
def check_grammar(grammar: str) -> None:
    """Raise ToolSchemaError if the grammar cannot be compiled."""
    from llguidance import LLMatcher

    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ToolSchemaError(f"a grammar of {len(grammar)} characters is more than the {MAX_GRAMMAR_CHARS} allowed")
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise ToolSchemaError(f"this grammar cannot be used: {_first_line(messages)}")
    matcher = new_matcher(_any_bytes(), grammar)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ToolSchemaError("this grammar cannot be used: there is no text that it admits")


def new_matcher(vocabulary: Any, grammar: str) -> Any:
    """A grammar at its beginning; one that needs more than LEXER_FUEL to be walked is in error where it does."""
    from llguidance import LLMatcher, LLParserLimits

    first, later = LEXER_FUEL
    limits = LLParserLimits(initial_lexer_fuel=first, step_lexer_fuel=later)
    return LLMatcher(vocabulary, grammar, log_level=0, limits=limits)


@functools.cache
def _any_bytes() -> Any:
    """A vocabulary of single bytes: whether a text can be written at all is the same with it."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _chosen(tools: Sequence[ToolSpec], choice: Choice) -> Sequence[ToolSpec]:
    if not tools:
        raise ToolSchemaError("a tool call is required, but there are no tools")
    if len(tools) > MAX_TOOLS:
        raise ToolSchemaError(f"{len(tools)} tools are more than the {MAX_TOOLS} allowed")
    names = [tool.name for tool in tools]
    if len(set(names)) != len(names):
        raise ToolSchemaError(f"two tools have the name {next(n for n in names if names.count(n) > 1)!r}")
    if choice in ("auto", "required"):
        return tools
    wanted = choice.get("name") if isinstance(choice, Mapping) else None
    found = [tool for tool in tools if tool.name == wanted]
    if not found:
        raise ToolSchemaError(f"the tool choice {choice!r} is none of 'auto', 'none', 'required' and {names}")
    return found


def _parameters(tool: ToolSpec) -> str:
    """The schema of a tool's arguments, as grammars have it."""
    schema = dict(tool.parameters)
    what = f"the schema of {tool.name!r}"
    if (kind := schema.setdefault("type", "object")) != "object":
        raise ToolSchemaError(f"{what} must be of an object, not {kind!r}")
    return _schema_text(schema, what)


def _schema_text(given: Mapping[str, Any], what: str) -> str:
    """The schema as grammars have it, found usable."""
    try:
        schema = _closed(json.loads(json.dumps(dict(given))), 0)
    except (TypeError, ValueError) as error:
        raise ToolSchemaError(f"{what} is not JSON: {error}") from error
    except RecursionError as error:
        raise ToolSchemaError(f"{what} is nested more than {_MAX_DEPTH} deep") from error
    text = json.dumps({**schema, "x-guidance": _SPACING}, ensure_ascii=True)
    if len(text) > MAX_SCHEMA_CHARS:
        raise ToolSchemaError(f"{what} has {len(text)} characters; {MAX_SCHEMA_CHARS} are allowed")
    _check_schema(what, text)
    return text


def _in_slashes(pattern: str) -> str:
    """As a regular expression stands between slashes: those within it, and line ends, are escaped."""
    escaped = re.compile(r"\\(.)|([/\n\r])", re.DOTALL)
    shown = {"/": "\\/", "\n": "\\n", "\r": "\\r"}
    return escaped.sub(lambda m: m[0] if m[1] and m[1] not in "\n\r" else shown[m[1] or m[2]], pattern)


def _closed(node: Any, depth: int) -> Any:
    """The schema with objects closed to unnamed properties, and its bounds checked."""
    if depth > _MAX_DEPTH:
        raise RecursionError
    if isinstance(node, list):
        return [_closed(item, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    for bound in _BOUNDS:
        value = node.get(bound)
        if isinstance(value, int) and value > _MAX_REPEAT:
            raise ValueError(f"{bound} is {value}, more than the {_MAX_REPEAT} allowed")
    closed = {key: _closed(value, depth + 1) for key, value in node.items() if key != "x-guidance"}
    if isinstance(node.get("properties"), dict) and node.get("type", "object") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


@functools.lru_cache(maxsize=_CHECKED)
def _check_schema(what: str, schema: str) -> None:
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(f"start: %json {schema}\n")
    if failed:
        raise ToolSchemaError(f"{what} cannot be used: {_first_line(messages)}")


def _first_line(messages: Sequence[str]) -> str:
    text = messages[0] if messages else "no reason was given"
    return text.split("\n", 1)[0].removeprefix("at ").strip()[:300]
