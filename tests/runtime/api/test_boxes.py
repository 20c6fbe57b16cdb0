"""The boxes between a call and the device, as docs/boxes.md lists them, and those of the API made to fail."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from fastapi import FastAPI

from runtime import boxes
from runtime.api import feeds, stream
from runtime.store import Database, Event, fleet, retention, sessions
from runtime.store.alterations import MOST_WAITING
from runtime.store.events import append
from tests.runtime.api.test_keys import bearer, make


async def counted(client: httpx.AsyncClient) -> dict[str, int]:
    return dict((await client.get("/v1/admin/overview")).json()["process"])


def ids_of(frames: bytes) -> list[int]:
    return [int(position) for position in re.findall(rb"^id: (\d+)$", frames, re.M)]


@pytest.mark.usefixtures("uncollected")
def test_the_page_is_what_the_sources_say() -> None:
    assert boxes.OUT.read_text() == boxes.document(), "run `python -m runtime.boxes`"


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    "gone",
    [
        "runtime/api/none.py::Guard",
        "runtime/api/guard.py::Gone",
        "runtime/api/counts.py::Counts.gone",
        "runtime/api/counts.py::Counts.failed.gone",
        "tests/runtime/api/test_boxes.py::test_that_is_none",
    ],
)
def test_a_name_that_the_sources_do_not_have_is_refused(gone: str) -> None:
    with pytest.raises(LookupError):
        boxes.resolve(gone)


def test_there_are_seven_with_a_failure_a_figure_and_a_test_each() -> None:
    assert [box.name for box in boxes.BOXES] == (
        "gateway, auth and limits, router, tokenizer, scheduler, engine, streamer".split(", ")
    )
    assert all(box.failure and box.metrics for box in boxes.BOXES)
    assert len({box.test for box in boxes.BOXES}) == len(boxes.BOXES)


async def test_a_gateway_with_no_node_behind_it_says_which_part_is_away(client: httpx.AsyncClient, app: FastAPI):
    db: Database = app.state.db
    await db.execute("UPDATE nodes SET heartbeat_at = now() - interval '1 hour'")
    before = (await counted(client))["failed"]
    refused = await client.post("/v1/sessions", json={})
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert (await client.get("/readyz")).json()["checks"]["nodes"] == "no node is up"
    assert (await counted(client))["failed"] == before + 2
    await db.execute("UPDATE nodes SET heartbeat_at = now()")
    assert (await client.post("/v1/sessions", json={})).status_code == 201
    assert (await counted(client))["failed"] == before + 2


async def test_a_fault_that_nobody_meant_is_counted_too(client: httpx.AsyncClient, app: FastAPI):
    app.state.chats = None
    assert (await client.post("/v1/sessions", json={})).status_code == 500
    assert (await counted(client))["failed"] == 1


async def test_keys_that_may_not_are_counted_by_why(client: httpx.AsyncClient):
    key = bearer((await make(client, requests_per_minute=2))["key"])
    before = await counted(client)
    assert [(await client.get("/v1/sessions", headers=bearer("tk_none"))).status_code for _ in range(2)] == [401, 401]
    answers = [await client.get("/v1/sessions", headers=key) for _ in range(3)]
    assert [one.status_code for one in answers] == [200, 200, 429]
    assert [one.headers["x-ratelimit-remaining-requests"] for one in answers] == ["1", "0", "0"]
    after = await counted(client)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        "requests": 6,  # the look at the counts itself is the sixth
        "unauthenticated": 2,
        "limited": 1,
    }


async def test_a_prompt_that_the_context_has_no_room_for_is_counted_and_not_accepted(client: httpx.AsyncClient):
    session = (await client.post("/v1/sessions", json={})).json()["id"]
    before = await counted(client)
    for content, status in (("word " * 9000, 400), ("word", 202)):
        answer = await client.post(f"/v1/sessions/{session}/events", json={"content": content})
        assert answer.status_code == status, answer.text
        if status == 400:
            assert answer.json()["error"]["code"] == "context_length_exceeded"
    after = await counted(client)
    assert (after["prompts"] - before["prompts"], after["prompts_refused"] - before["prompts_refused"]) == (2, 1)
    assert after["failed"] == before["failed"]


async def test_a_reader_behind_what_the_feed_keeps_is_counted_and_gets_every_event(
    client: httpx.AsyncClient, app: FastAPI
):
    """One reader holds the feed at the log's end, and another one comes to it from the beginning."""
    db: Database = app.state.db
    session = str((await client.post("/v1/sessions", json={})).json()["id"])
    events = [Event("model.delta", {"text": "x" * 1000}) for _ in range(2 * feeds.KEPT_BYTES // 1000)]
    await db.run(lambda connection: append(connection, session, events))
    ahead = stream.sse(app.state.hub, db, session, len(events) - 9, "key")
    seen = ids_of(await anext(ahead))
    now = await counted(client)
    assert (now["streams_open"], now["frames"], now["frames_behind"]) == (1, len(seen), 0)
    await sessions.request_end(db, fleet.DEFAULT_TENANT, session)
    await sessions.finish(db, session, "cancelled", {})
    late = await client.get(f"/v1/sessions/{session}/events/stream", headers={"Last-Event-ID": "0"})
    page = await client.get(f"/v1/sessions/{session}/events", params={"limit": 1000})
    log = [event["id"] for event in page.json()["data"]]
    assert ids_of(late.content) == log
    seen += [one async for piece in ahead for one in ids_of(piece)]
    assert seen == log[-len(seen) :]
    after = await counted(client)
    assert after["frames_behind"] >= len(events) - 9
    assert (after["streams_open"], after["frames"]) == (0, len(log) + len(seen))


async def test_a_reader_who_is_behind_when_the_record_is_removed_comes_to_an_end(
    client: httpx.AsyncClient, app: FastAPI
) -> None:
    db: Database = app.state.db
    session = str((await client.post("/v1/sessions", json={})).json()["id"])
    events = [Event("model.delta", {"text": "x" * 1000}) for _ in range(2 * feeds.KEPT_BYTES // 1000)]
    await db.run(lambda connection: append(connection, session, events))
    ahead, behind = (stream.sse(app.state.hub, db, session, after, "key") for after in (len(events) - 9, 0))
    await anext(ahead)
    await anext(behind)
    await sessions.request_end(db, fleet.DEFAULT_TENANT, session)
    await sessions.finish(db, session, "cancelled", {})
    await retention.sweep(db, 0)
    async with asyncio.timeout(20):
        assert [one async for one in behind] == []
    await ahead.aclose()


async def test_a_stream_ends_with_its_key(
    client: httpx.AsyncClient, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    db: Database = app.state.db
    key = await make(client)
    session = str((await client.post("/v1/sessions", json={})).json()["id"])
    monkeypatch.setattr(stream, "KEY_EVERY_S", 0.0)
    follower = stream.sse(app.state.hub, db, session, 0, key["id"])
    assert ids_of(await anext(follower)) == [1]
    await client.post(f"/v1/admin/keys/{key['id']}/revoke")
    await db.run(lambda connection: append(connection, session, [Event("model.delta", {"text": "x"})]))
    assert [one async for one in follower] == []


async def test_changes_that_wait_for_a_node_are_bounded(client: httpx.AsyncClient, app: FastAPI) -> None:
    db: Database = app.state.db
    session = str((await client.post("/v1/sessions", json={})).json()["id"])
    await db.execute(
        "INSERT INTO commands (command_id, tenant_id, session_id, verb, argument)"
        " SELECT 'cmd_' || n, $1, $2, 'write', '{}' FROM generate_series(1, $3) n",
        fleet.DEFAULT_TENANT,
        session,
        MOST_WAITING,
    )
    refused = await client.put(f"/v1/sessions/{session}/sandbox/files/a", content=b"x", params={"wait_s": 0})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_busy")
