"""Secrets at the API: written and used by name, never shown, and sealed in every row."""

from __future__ import annotations

import json

import httpx
import pytest
from fastapi import FastAPI

from runtime.sealing import LITERAL, Sealer, SealError, parse_key
from runtime.store import Database
from runtime.tools.egress import Egress
from sandbox.allow import parse_allow

VALUE = "kQ7vX2mN9pL4wR8t"
HTTP = {"type": "http", "name": "ask", "description": "Ask.", "url": "https://api.example.org/x"}
COMMAND = {"name": "do", "description": "Do.", "command": ["true"]}


async def every_row(db: Database) -> str:
    """All that Postgres holds, as text."""
    tables = await db.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    rows = [await db.fetch(f'SELECT t::text AS text FROM "{table["tablename"]}" t') for table in tables]
    return "\n".join(row["text"] for found in rows for row in found)


async def test_a_secret_is_made_replaced_listed_and_deleted_and_its_value_is_shown_nowhere(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    made = await client.put("/v1/secrets/TOKEN", json={"value": "first value"})
    assert (made.status_code, made.json()["id"], made.json()["last_used_at"]) == (200, "TOKEN", None)
    again = await client.put("/v1/secrets/TOKEN", json={"value": VALUE})
    assert again.json()["created_at"] == made.json()["created_at"] < again.json()["updated_at"]
    await client.put("/v1/secrets/another", json={"value": VALUE})
    listed = (await client.get("/v1/secrets", params={"limit": 1})).json()
    assert ([one["id"] for one in listed["data"]], listed["has_more"]) == (["TOKEN"], True)
    rest = (await client.get("/v1/secrets", params={"after": "TOKEN"})).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (["another"], False)
    assert VALUE not in made.text + again.text + json.dumps(listed) + (await client.get("/v1/secrets/TOKEN")).text
    assert VALUE not in await every_row(app.state.db)
    assert (await client.delete("/v1/secrets/TOKEN")).json() == {"id": "TOKEN", "object": "secret", "deleted": True}
    for call in (client.delete, client.get):
        assert (await call("/v1/secrets/TOKEN")).status_code == 404


@pytest.mark.parametrize("name", ["1A", "A-B", "A" * 64, "ü", "a.b"])
async def test_a_name_that_no_secret_can_have_is_refused(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.put(f"/v1/secrets/{name}", json={"value": "x"})).status_code == 400


@pytest.mark.parametrize("value", ["", "a\0b", "x" * 65_537])
async def test_a_value_that_cannot_be_kept_is_refused(client: httpx.AsyncClient, value: str) -> None:
    assert (await client.put("/v1/secrets/A", json={"value": value})).status_code == 400


@pytest.mark.parametrize("inside", [False, True])
async def test_a_session_whose_secret_is_missing_is_refused_by_its_name(
    client: httpx.AsyncClient, inside: bool
) -> None:
    tool = {**COMMAND, "env": {"TOKEN": {"secret": "NOWHERE"}}}
    child = {"type": "session", "name": "sub", "description": "Sub.", "tools": [tool]}
    refused = await client.post("/v1/sessions", json={"tools": [child if inside else tool]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "secret_not_found")
    assert "NOWHERE" in refused.json()["error"]["message"]
    await client.put("/v1/secrets/NOWHERE", json={"value": VALUE})
    assert (await client.post("/v1/sessions", json={"tools": [child if inside else tool]})).status_code == 201


async def test_values_that_a_tool_is_given_are_sealed_and_names_of_secrets_are_shown(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    app.state.egress = Egress(parse_allow("*.example.org"))
    await client.put("/v1/secrets/TOKEN", json={"value": VALUE})
    by_name = {"secret": "TOKEN", "prefix": "Bearer "}
    http = {**HTTP, "headers": {"Authorization": by_name, "X-Key": f"{VALUE}1"}}
    child = {"type": "session", "name": "sub", "description": "S.", "tools": [{**COMMAND, "env": {"A": f"{VALUE}2"}}]}
    made = await client.post("/v1/sessions", json={"tools": [http, child, {**COMMAND, "env": {"B": f"{VALUE}3"}}]})
    assert made.status_code == 201, made.text
    assert made.json()["tools"][0]["headers"] == {"Authorization": by_name, "X-Key": "***"}
    assert made.json()["tools"][1]["tools"][0]["env"] == {"A": "***"}
    db: Database = app.state.db
    assert VALUE not in made.text + await every_row(db)
    row = await db.fetchrow("SELECT config FROM sessions")
    assert row is not None
    kept = row["config"]["tools"][1]["tools"][0]["env"]["A"]["sealed"]
    assert app.state.sealer.open("default", LITERAL, kept) == f"{VALUE}2"
    with pytest.raises(SealError, match="altered"):
        app.state.sealer.open("somebody else", LITERAL, kept)


@pytest.mark.parametrize(
    "value", [{"sealed": "v1:0:AAAA"}, {"secret": "a b"}, {"secret": "A", "other": 1}, 7, None, []]
)
async def test_a_value_that_is_neither_text_nor_the_name_of_a_secret_is_refused(
    client: httpx.AsyncClient, value: object
) -> None:
    answer = await client.post("/v1/sessions", json={"tools": [{**COMMAND, "env": {"A": value}}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


def test_what_another_key_sealed_says_so_by_name() -> None:
    sealed = Sealer(bytes(32)).seal("default", "TOKEN", VALUE)
    other = Sealer(b"k" * 32)
    with pytest.raises(SealError, match=rf"TOKEN: sealed with the key {Sealer(bytes(32)).key_id}.*{other.key_id}"):
        other.open("default", "TOKEN", sealed)
    with pytest.raises(SealError, match="OTHER: what is kept of it was altered"):
        Sealer(bytes(32)).open("default", "OTHER", sealed)


@pytest.mark.parametrize("text", ["", "short", "A" * 44, "=" * 44, "AAAA" * 11])
def test_a_key_that_is_not_32_bytes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="32 random bytes"):
        parse_key(text)
