"""Secrets of tools at the node: opened for a call, masked wherever the record keeps what came of it."""

from __future__ import annotations

import base64
import dataclasses
import json
import secrets
from typing import Any

import pytest

from runtime.config import SessionConfig
from runtime.kept import as_kept
from runtime.sealing import Sealer
from runtime.steps.generating import Shown
from runtime.store import fleet, vault
from runtime.tools.redacting import Redactor
from tests.runtime.api.test_secrets import every_row
from tests.runtime.tools import servers
from tests.runtime.tools.conftest import Node

pytestmark = [pytest.mark.sandbox, pytest.mark.model]
IN_BASE64 = "print(base64.b64encode(b'x' + v.encode()).decode())"
WORD = {"type": "object", "properties": {"word": {"type": "string"}}}


def ask(web: servers.Seen, value: object) -> dict[str, Any]:
    return {
        "type": "http", "name": "ask", "description": "Ask.", "url": f"{web.url}/x", "method": "POST",
        "parameters": WORD, "headers": {"X-Key": value},
    }  # fmt: skip


def echo(value: object) -> dict[str, Any]:
    command = ["python3", "-c", "import base64,os,sys; v=os.environ['V']; print(v, sys.stdin.read())\n" + IN_BASE64]
    return {"name": "echo", "description": "E.", "command": command, "env": {"V": value}, "parameters": WORD}


async def put(node: Node, name: str, value: str) -> None:
    sealer = node.services.sealer
    await vault.put(node.db, fleet.DEFAULT_TENANT, name, sealer.seal(fleet.DEFAULT_TENANT, name, value), sealer.key_id)


async def seal(node: Node, session: str) -> None:
    """As the API keeps the session's configuration."""
    row = await node.db.fetchrow("SELECT config FROM sessions WHERE session_id = $1", session)
    assert row is not None
    kept = as_kept(node.services.sealer, fleet.DEFAULT_TENANT, SessionConfig.model_validate(row["config"]))
    await node.db.execute("UPDATE sessions SET config = $2 WHERE session_id = $1", session, kept)


async def test_secrets_in_env_headers_arguments_and_output_are_in_no_row(node: Node, web: servers.Seen) -> None:
    by_name, literal = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    node = node.allowing(web.url.removeprefix("http://"))
    await put(node, "TOKEN", by_name)
    session = await node.session([ask(web, {"secret": "TOKEN", "prefix": "Bearer "}), echo(literal)])
    await seal(node, session)
    owner = await node.take(session)
    hidden = node.hiding(by_name, literal)
    await hidden.think(owner, ("ask", {"word": f"give {by_name}"}), ("echo", {"word": literal}))
    await node.run(owner)
    asked = web.requests[-1]
    assert asked["headers"]["X-Key"] == f"Bearer {by_name}"
    assert json.loads(asked["body"]) == {"word": f"give {by_name}"}  # what runs is what was asked for
    called, echoed = await node.ledger(session)
    assert (called["arguments"], echoed["arguments"]) == ({"word": "give ***"}, {"word": "***"})
    assert echoed["output"].count(b"***") == 3
    assert b"***" in called["output"]
    requested = await node.events(session, "tool.requested")
    assert [each["arguments"]["word"] for each in requested] == ["give ***", "***"]
    rows = await every_row(node.db)
    for secret in (by_name, literal):
        for shift in range(3):
            inner = base64.b64encode(bytes(shift) + secret.encode()).decode()[4:-4]
            assert inner not in rows
        assert secret not in rows
        assert secret.encode().hex() not in rows  # bytea as text
    row = await node.db.fetchrow("SELECT last_used_at FROM secrets")
    assert row is not None
    assert row["last_used_at"] is not None


async def test_a_call_whose_secret_was_deleted_is_refused_and_says_so(node: Node) -> None:
    await put(node, "GONE", "some value")
    session = await node.session([echo({"secret": "GONE"})])
    await vault.delete(node.db, fleet.DEFAULT_TENANT, "GONE")
    [row] = await node.called(session, ("echo", {}))
    assert (row["result"]["reason"], row["runs"]) == ("refused", 0)
    assert row["output"] == b"the secret GONE does not exist any more; set it again"


async def test_a_secret_that_was_replaced_is_the_new_one_at_the_next_call(node: Node) -> None:
    await put(node, "V", "first value")
    session = await node.session([echo({"secret": "V"})])
    owner = await node.take(session)
    await node.think(owner, ("echo", {}))
    await put(node, "V", "second value")
    await node.run(owner)
    assert "value" not in (await node.ledger(session))[0]["output"].decode()


async def test_a_call_under_another_key_is_refused_by_the_name_of_its_secret(node: Node) -> None:
    await put(node, "V", "some value")
    session = await node.session([echo({"secret": "V"})])
    other = Node(dataclasses.replace(node.services, sealer=Sealer(b"k" * 32)))
    [row] = await other.called(session, ("echo", {}))
    assert row["result"]["reason"] == "refused"
    assert b"the secret V: sealed with the key" in row["output"]


async def test_values_that_an_earlier_release_kept_as_they_are_still_work(node: Node) -> None:
    session = await node.session([echo("plain old")])
    [row] = await node.called(session, ("echo", {}))
    assert (row["result"]["code"], row["output"].count(b"***")) == (0, 2)


async def test_a_header_that_cannot_be_sent_is_refused(node: Node, web: servers.Seen) -> None:
    await put(node, "LINES", "one\r\nX-Other: two")
    node = node.allowing(web.url.removeprefix("http://"))
    session = await node.session([ask(web, {"secret": "LINES"})])
    [row] = await node.called(session, ("ask", {}))
    assert (row["result"]["reason"], web.requests) == ("refused", [])


async def test_a_secret_that_a_model_repeats_is_masked_in_its_deltas_however_they_are_cut(node: Node) -> None:
    secret = "hunter22-and-more"
    tokens = node.services.tokenizer.encode(f"It is {secret}, and hunter2 is not.")
    shown = Shown(node.services.chat, Redactor([secret]), [])
    pieces = [shown.push([token]) for token in tokens[:-1]] + [shown.push(tokens[-1:], last=True)]
    assert "".join(told.text for told in pieces) == "It is ***, and hunter2 is not."


async def test_a_secret_in_the_arguments_of_a_call_is_masked_as_they_come(node: Node) -> None:
    secret, chat = "hunter22-and-more", node.services.chat
    tokens = node.services.tokenizer.encode(chat.calls.written([("ask", {"q": f"{secret}!"})]))
    shown = Shown(chat, Redactor([secret]), tokens[:3], calls=True)
    pieces = [shown.push([token]) for token in tokens[3:-1]] + [shown.push(tokens[-1:], last=True)]
    deltas = [delta for told in pieces for delta in told.calls]
    assert [delta["name"] for delta in deltas if "name" in delta] == ["ask"]
    assert "".join(delta["arguments"] for delta in deltas) == '{"q": "***!"}'


def test_the_beginning_of_a_secret_before_a_cut_is_masked_too() -> None:
    redactor = Redactor(["abcdefghijkl"])
    assert (
        redactor.of_bytes(b"xx abcdefgh\n[... 9 bytes left out ...]\n", cut_at=11)
        == b"xx ***\n[... 9 bytes left out ...]\n"
    )
    assert redactor.of_bytes(b"xx abc\n[...]", cut_at=6) == b"xx abc\n[...]"
    assert redactor.json({"abcdefghijkl": ["abcdefghijkl", 3, None]}) == {"***": ["***", 3, None]}


async def test_a_call_whose_arguments_another_key_sealed_is_refused_and_the_session_goes_on(node: Node) -> None:
    session = await node.session([echo("plain")])
    owner = await node.take(session)
    hidden = node.hiding("hunter22")
    await hidden.think(owner, ("echo", {"word": "hunter22"}))
    other = Node(dataclasses.replace(node.services, sealer=Sealer(b"k" * 32)))
    await other.run(owner)
    [row] = await node.ledger(session)
    assert (row["result"]["reason"], row["arguments"], row["runs"]) == ("refused", {"word": "***"}, 0)
    assert b"call it anew" in row["output"]
