"""What operators are told of what is wrong, by a node that answers and without one."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from engine import doctor as engine_doctor
from runtime import bundle, deaths
from runtime.store import Database
from tests.runtime.api.house import House
from tests.runtime.api.test_between_steps import turn

VALUE = "hunter22-of-a-tenant"
SAID = "xylophone confessions"
IN_THE_HOUSE = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
async def unheard(app: FastAPI, dsn: str) -> None:
    """The node that is announced was last heard of an hour ago."""
    async with Database(dsn) as db:
        await db.execute("UPDATE nodes SET heartbeat_at = now() - interval '1 hour'")


@IN_THE_HOUSE
async def test_a_node_that_answers_is_looked_at_in_every_part(house: House):
    told = (await house.client.get("/v1/admin/doctor")).json()["data"]
    assert [one["id"] for one in told] == [f"n/{part}" for part in engine_doctor.PARTS]
    assert all(one["notes"] for one in told)
    (memory,) = (await house.client.get("/v1/admin/doctor", params={"part": "memory", "node": "n"})).json()["data"]
    assert not memory["findings"]
    assert any(note.startswith("KV pool: 16.8 MB") for note in memory["notes"])


@IN_THE_HOUSE
async def test_what_an_engine_did_is_shown_step_by_step(house: House):
    session = await house.session()
    await turn(house, session, SAID)
    told = (await house.client.get("/v1/admin/engines/n/spans")).json()
    assert (told["id"], told["error"]) == ("n", None)
    rows = [dict(zip(told["spans"]["columns"], row, strict=True)) for row in told["spans"]["steps"]]
    assert sum(row["prefill"] for row in rows) > 0
    assert all(row["model_s"] > 0 for row in rows)
    assert told["memory"]["bill"]["pool_tokens"] == 65536
    assert told["limits"]["running"] == 32


@IN_THE_HOUSE
async def test_a_bundle_has_all_that_is_needed_and_nothing_of_its_users(house: House):
    await house.client.put("/v1/secrets/BUNDLED", json={"value": VALUE})
    session = await house.session(system=SAID)
    settings = house.app.state.settings
    settings.logs_dir.mkdir(exist_ok=True)
    (settings.logs_dir / "api.log").write_text(f"cut\nERROR a tool printed {VALUE}\nkept\n")
    try:
        told = (await house.client.get("/v1/admin/doctor/bundle")).json()
    finally:
        (settings.logs_dir / "api.log").unlink()
        await house.client.delete("/v1/secrets/BUNDLED")
    assert set(told["parts"]) == set(bundle.WHAT)
    assert told["logs"]["api"] == "ERROR a tool printed ***\nkept\n"
    assert told["parts"]["migrations.json"][0] == "0001_sessions"
    assert told["parts"]["engines.json"]["n"]["stats"]["integrity"] == "ok"
    text = json.dumps(told)
    key, sealing = settings.admin_key, settings.secrets_key_path.read_text().strip()
    assert not [secret for secret in (VALUE, SAID, key, sealing, session) if secret in text]


async def test_a_part_that_there_is_not_is_refused(client: httpx.AsyncClient):
    answer = await client.get("/v1/admin/doctor", params={"part": "heart"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "part")


@pytest.mark.usefixtures("unheard")
async def test_without_a_node_there_is_nothing_to_look_at(client: httpx.AsyncClient):
    assert (await client.get("/v1/admin/doctor")).json()["data"] == []
    for path in ("doctor?node=nobody", "engines/nobody/spans", "engines/n/spans"):
        assert (await client.get(f"/v1/admin/{path}")).status_code == 404
    told = (await client.get("/v1/admin/doctor", params={"node": "n"})).json()["data"]
    assert [one["part"] for one in told] == list(engine_doctor.PARTS)
    assert {one["away"] for one in told} == {"the engine does not answer: n is down"}


@pytest.mark.usefixtures("unheard")
async def test_an_engine_that_did_not_start_is_told_of_without_a_node(client: httpx.AsyncClient, app: FastAPI):
    logs: Path = app.state.settings.logs_dir
    logs.mkdir()
    words = "a pool of 9 bytes cannot be had: Cannot allocate memory; lower --kv-tokens"
    deaths.note(logs, "engine", served=False, status=2, how="ended with status 2", words=words)
    told = (await client.get("/v1/admin/doctor")).json()["data"]
    (finding,) = [finding for one in told for finding in one["findings"]]
    assert {one["node"] for one in told} == {"node-1"}
    assert (finding["severity"], finding["evidence"]["said"]) == ("critical", words)
    parts = (await client.get("/v1/admin/doctor/bundle")).json()["parts"]
    assert parts["deaths.json"][0]["words"] == words
    assert parts["findings.json"]
