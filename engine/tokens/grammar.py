"""Tool calls as grammars: what the model may write, in the template's own format.

A call is `<tool_call>\\n{"name": "x", "arguments": {...}}\\n</tool_call>` with one way of spacing. `auto` admits free
text and calls in any order; text that begins a call must go on as one. The strings are grammars of llguidance's Lark
dialect.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import ToolSchemaError
from engine.tokens.values import ToolSpec

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
MAX_TOOLS = 128
MAX_SCHEMA_CHARS = 65_536
MAX_GRAMMAR_CHARS = 262_144
_MAX_DEPTH = 32
_MAX_REPEAT = 4096
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_CHECKED = 64  # what was found usable lately; a session asks for the same tools at every think
_BOUNDS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")

Choice = str | Mapping[str, str]


def tool_grammar(tools: Sequence[ToolSpec], choice: Choice) -> str | None:
    """A grammar for one assistant message, or None where the message is free.

    choice: "auto" (text, calls, or both), "none" (free text), "required" (exactly one call, then the end), or
    {"name": tool} (exactly that call). An object schema that lists properties and does not speak of others admits no
    others.
    Raises ToolSchemaError, in a sentence, for a schema that is impossible, too large or not local.
    """
    if choice == "none" or (not tools and choice == "auto"):
        return None
    chosen = _chosen(tools, choice)
    rules = [_call_rules(index, tool) for index, tool in enumerate(chosen)]
    bodies = " | ".join(f"body_{index}" for index in range(len(chosen)))
    if choice == "auto":
        head = f'start: call* TEXT\nTEXT: /(.|\\n)*/\ntrigger[lazy]: TEXT "{CALL_OPEN}"\n'
    else:
        head = f'start: call\ntrigger: "{CALL_OPEN}"\n'
    grammar = f'{head}call: trigger "\\n" ({bodies}) "\\n{CALL_CLOSE}"\n' + "\n".join(rules) + "\n"
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ToolSchemaError(
            f"the tools' schemas make a grammar of {len(grammar)} characters; {MAX_GRAMMAR_CHARS} are allowed"
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


def _call_rules(index: int, tool: ToolSpec) -> str:
    opening = json.dumps('{"name": ' + json.dumps(tool.name) + ', "arguments": ')
    schema = json.dumps(_grammar_schema(tool), ensure_ascii=True)
    if len(schema) > MAX_SCHEMA_CHARS:
        raise ToolSchemaError(
            f"the schema of {tool.name!r} has {len(schema)} characters; {MAX_SCHEMA_CHARS} are allowed"
        )
    _check_schema(tool.name, schema)
    return f'body_{index}: {opening} args_{index} "}}"\nargs_{index}: %json {schema}'


def _grammar_schema(tool: ToolSpec) -> dict[str, Any]:
    try:
        schema = _closed(json.loads(json.dumps(dict(tool.parameters))), 0)
    except (TypeError, ValueError) as error:
        raise ToolSchemaError(f"the schema of {tool.name!r} is not JSON: {error}") from error
    except RecursionError as error:
        raise ToolSchemaError(f"the schema of {tool.name!r} is nested more than {_MAX_DEPTH} deep") from error
    kind = schema.setdefault("type", "object")
    if kind != "object":
        raise ToolSchemaError(f"the schema of {tool.name!r} must be of an object, not {kind!r}")
    schema["x-guidance"] = _SPACING
    return dict(schema)


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
def _check_schema(name: str, schema: str) -> None:
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(f"start: %json {schema}\n")
    if failed:
        raise ToolSchemaError(f"the schema of {name!r} cannot be used: {_first_line(messages)}")


def _first_line(messages: Sequence[str]) -> str:
    text = messages[0] if messages else "no reason was given"
    return text.split("\n", 1)[0].removeprefix("at ").strip()[:300]
