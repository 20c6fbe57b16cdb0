"""Tools as a configuration declares them, and what is no tool."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from runtime.config import SessionConfig
from runtime.steps.calls import rounds
from runtime.store.ledger import Call
from runtime.tools.catalog import Catalog
from runtime.tools.kinds import shown
from runtime.tools.outcome import as_text, capped
from runtime.tools.redacting import Redactor

COMMAND = {"name": "do", "description": "d", "command": ["true"]}
HTTP = {"type": "http", "name": "ask", "description": "d", "url": "https://example.org/x"}
MCP = {"type": "mcp", "name": "far", "url": "https://example.org/mcp"}
INSIDE = {"type": "mcp", "name": "near", "command": ["server"]}
LISTINGS = {name: {"tools": [{"name": "t", "description": "d", "parameters": {}}]} for name in ("far", "near")}


def config(*tools: Any) -> SessionConfig:
    return SessionConfig(model="m", tools=list(tools))


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ({**COMMAND, "type": "other"}, "type must be command, http, mcp"),
        ({**COMMAND, "type": 7}, "type must be command, http, mcp"),
        (7, "valid dictionary"),
        ({**COMMAND, "env": {"TENUTO_CALL_KEY": "x"}}, "cannot be set"),
        ({**HTTP, "url": "ftp://example.org"}, "http:// or https://"),
        ({**HTTP, "url": "https://{host}/x"}, "host must be known"),
        ({**HTTP, "url": "https://me:secret@example.org/"}, "name or a password"),
        ({**HTTP, "url": "https://example.org:99999/"}, "http:// or https://"),
        ({**HTTP, "url": "https://example.org/{id}"}, "must describe and require 'id'"),
        ({**HTTP, "headers": {"Host": "x"}}, "no header that can be set"),
        ({**HTTP, "headers": {"A b": "x"}}, "no header that can be set"),
        ({**HTTP, "headers": {"A": "x\r\nB: y"}}, "printable ASCII"),
        ({**HTTP, "effect": "sandboxed"}, "effect"),
        ({**MCP, "command": ["x"]}, "either command"),
        ({"type": "mcp", "name": "x"}, "either command"),
        ({**INSIDE, "headers": {"A": "x"}}, "headers are for a server at a url"),
        ({**MCP, "effect": "sandboxed"}, "not in the sandbox"),
        ({**MCP, "name": "a__b"}, "must not contain '__'"),
    ],
)
def test_what_is_no_tool_is_refused_in_a_sentence(tool: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        config(tool)


def test_no_tool_may_be_mistaken_for_one_of_a_server() -> None:
    with pytest.raises(ValidationError, match="could be the name of a tool of the server 'far'"):
        config(MCP, {**COMMAND, "name": "far__t"})


def test_a_command_needs_no_type_and_everything_has_its_effect() -> None:
    post = {**HTTP, "name": "post", "method": "POST"}
    catalog = Catalog(config("bash", "read_file", COMMAND, HTTP, post, MCP, INSIDE), LISTINGS)
    effects = {spec.name: catalog.find(spec.name).effect for spec in catalog.specs}
    assert effects == {
        "bash": "sandboxed", "read_file": "pure", "do": "sandboxed", "ask": "idempotent", "post": "unsafe",
        "far__t": "unsafe", "near__t": "sandboxed",
    }  # fmt: skip
    out = Catalog(
        config("bash", COMMAND, INSIDE, {**COMMAND, "name": "safe", "effect": "pure"}), LISTINGS, leads_out=True
    )
    assert [out.find(spec.name).effect for spec in out.specs] == ["unsafe", "unsafe", "unsafe", "pure"]


def test_neighbours_that_leave_the_workspace_alone_are_one_round_and_no_order_is_changed() -> None:
    catalog = Catalog(config("bash", "read_file", HTTP, MCP, INSIDE), LISTINGS)
    names = ["ask", "far__t", "read_file", "near__t", "bash", "unknown", "ask", "bash"]
    calls = [Call(number, name, {}, "pure") for number, name in enumerate(names)]
    assert [[call.call_no for call in each] for each in rounds(catalog, calls)] == [[0, 1, 2], [3], [4], [5, 6], [7]]


def test_views_show_which_secrets_there_are_and_none_of_them() -> None:
    tool = config({**HTTP, "headers": {"Authorization": "Bearer abc"}}).model_dump()["tools"][0]
    assert shown(tool)["headers"] == {"Authorization": "***"}  # type: ignore[index]
    assert shown("bash") == "bash"


def test_secrets_are_taken_out_with_their_scheme_and_without_it() -> None:
    secrets = ["Bearer abcdefgh", "ab"]
    assert Redactor(secrets).of_bytes(b"Bearer abcdefgh, abcdefgh, ab") == b"***, ***, ab"


@pytest.mark.parametrize(
    ("result", "output", "text"),
    [
        ({"reason": "exit", "code": 0}, b" hi \n", "hi"),
        ({"reason": "exit", "code": 3}, b"hi", "hi\n[exit code 3]"),
        ({"reason": "signal", "code": 9}, b"", "[ended by signal 9]"),
        ({"reason": "http", "code": 204}, b"", "(no output)"),
        ({"reason": "http", "code": 404, "content_type": "text/html"}, b"no", "no\n[HTTP status 404]"),
        ({"reason": "http", "code": 200, "content_type": "application/problem+json"}, b"{}", "{}"),
        ({"reason": "http", "code": 200, "content_type": "image/png"}, b"abc", "[image/png, 3 bytes]"),
        ({"reason": "refused", "code": None}, b"why", "why\n[not executed]"),
    ],
)
def test_the_model_is_told_the_output_and_how_it_ended(result: dict[str, Any], output: bytes, text: str) -> None:
    assert as_text(result, output) == text


def test_what_is_too_long_is_cut_and_says_by_how_much() -> None:
    assert capped(b"abc", 3, 3) == (b"abc", False)
    assert capped(b"abcd", 3, 10) == (b"abc\n[... 7 bytes left out ...]\n", True)
    assert capped(b"abcd", 3, None) == (b"abc\n[... the rest left out ...]\n", True)
