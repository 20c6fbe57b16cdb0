"""The event stream over a real connection: cut at every event, read slowly, left alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from runtime.api import stream
from runtime.embedded import PostgresServer
from runtime.store import Database, Event, fleet, sessions
from runtime.store.events import append
from tests.runtime.api.server import Served, api_process

EVENTS = 40
FRAME = re.compile(r"id: (\d+)\nevent: (\S+)\ndata: (.*)\n\n")


@pytest.fixture(scope="module")
def server(postgres_server: PostgresServer, temporal_address: str, model_path: Path) -> Iterator[Served]:
    with api_process(postgres_server, temporal_address, model_path) as served:
        yield served


@pytest.fixture
async def db(server: Served) -> AsyncIterator[Database]:
    async with Database(server.dsn) as database:
        yield database


@pytest.fixture
async def http(server: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, headers=server.headers, timeout=60, trust_env=False) as client:
        yield client


async def made(http: httpx.AsyncClient, db: Database, count: int = EVENTS, size: int = 1) -> str:
    """A session that has ended, so that its stream does; its log has `count` events between the first and the last."""
    session_id = str((await http.post("/v1/sessions", json={})).json()["id"])
    await written(db, session_id, [Event("model.delta", {"n": n, "text": "é" * size}) for n in range(count)])
    await ended(db, session_id)
    return session_id


async def ended(db: Database, session_id: str) -> None:
    await sessions.request_end(db, fleet.DEFAULT_TENANT, session_id)
    await sessions.finish(db, session_id, "cancelled", {})


async def written(db: Database, session_id: str, events: list[Event]) -> None:
    await db.run(lambda connection: append(connection, session_id, events))


async def log_of(http: httpx.AsyncClient, session_id: str) -> list[int]:
    page = (await http.get(f"/v1/sessions/{session_id}/events", params={"limit": 1000})).json()
    return [event["id"] for event in page["data"]]


async def read_until(http: httpx.AsyncClient, session_id: str, last: int, frames: int) -> list[int]:
    """Ids of whole frames after `last`; the connection is cut once there are `frames` of them."""
    rest, ids, path = "", [], f"/v1/sessions/{session_id}/events/stream"
    async with http.stream("GET", path, headers={"Last-Event-ID": str(last)}) as response:
        assert response.status_code == 200
        async for piece in response.aiter_text(64 if frames < 1000 else None):  # also in the middle of a frame
            *whole, rest = (rest + piece).split("\n\n")
            ids += [int(match[1]) for frame in whole if (match := FRAME.match(f"{frame}\n\n"))]
            if len(ids) >= frames:
                break
    return ids


async def test_cut_at_every_event_and_come_back_twice_each_event_is_there_once_in_order(http, db):
    session_id = await made(http, db)
    whole = await log_of(http, session_id)
    for cut in range(1, len(whole)):
        first = await read_until(http, session_id, 0, cut)
        second = await read_until(http, session_id, first[-1], 1)  # and is cut again
        third = await read_until(http, session_id, second[-1], len(whole)) if second[-1] < whole[-1] else []
        assert first + second + third == whole


async def test_only_events_of_the_log_carry_an_id_and_a_control_frame_moves_no_cursor(http, db, server):
    session_id = str((await http.post("/v1/sessions", json={})).json()["id"])
    await written(db, session_id, [Event("session.idle", {})])
    async with http.stream("GET", f"/v1/sessions/{session_id}/events/stream") as response:
        lines = response.aiter_lines()
        seen = [await anext(lines)]
        while seen[-1] != stream.KEEP_ALIVE.decode().strip():  # it comes when nothing else does
            seen.append(await anext(lines))
        await ended(db, session_id)
        seen += [line async for line in lines]
    ids = [int(line[4:]) for line in seen if line.startswith("id: ")]
    assert ids == await log_of(http, session_id)
    around = seen.index(stream.KEEP_ALIVE.decode().strip())
    assert seen[around - 1] == ""  # between frames, and nothing but a comment: no id, no empty event
    assert not [line for line in seen if line.startswith(("id:", "data:")) and line.strip() in ("id:", "data:")]


@pytest.mark.parametrize("cursor", ["-1", "x", "9" * 30, "1.5", ""])
async def test_a_cursor_that_is_none_is_refused_and_not_taken_for_the_beginning(http, db, cursor):
    session_id = await made(http, db, 1)
    answer = await http.get(f"/v1/sessions/{session_id}/events/stream", headers={"Last-Event-ID": cursor})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "last-event-id")


async def test_a_cursor_behind_the_last_event_waits_for_the_next_one(http, db):
    session_id = await made(http, db, 1)
    assert await read_until(http, session_id, (await log_of(http, session_id))[-1], 1) == []


async def test_who_reads_slowly_or_not_at_all_holds_up_nobody_and_finds_everything_later(http, db, server):
    """Nobody waits for a reader: neither who writes events, nor other readers. What is not taken is not kept either."""
    session_id = str((await http.post("/v1/sessions", json={})).json()["id"])
    address = urlsplit(server.url)
    request = (
        f"GET /v1/sessions/{session_id}/events/stream HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: {server.headers['Authorization']}\r\n\r\n"
    ).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            deaf = stack.enter_context(socket.socket())
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((address.hostname, address.port))
            deaf.sendall(request)
        before = psutil.Process(server.pid).memory_info().rss
        for _ in range(40):  # 16 MB that none of them takes
            await written(db, session_id, [Event("tool.output", {"text": "x" * 4000}) for _ in range(100)])
        assert (await http.get("/healthz")).status_code == 200
        await ended(db, session_id)
        ids: list[int] = []
        while not ids or ids[-1] != (await last_event(http, session_id)):
            ids += await read_until(http, session_id, ids[-1] if ids else 0, 1500)
        assert ids == list(range(1, ids[-1] + 1))
        grown = psutil.Process(server.pid).memory_info().rss - before
        assert grown < 20 * 16_000_000 // 2  # a page each, not the whole log each


async def last_event(http: httpx.AsyncClient, session_id: str) -> int:
    return int((await http.get(f"/v1/sessions/{session_id}")).json()["last_event"])


async def test_readers_at_once_see_one_order_while_events_are_written(http, db):
    session_id = str((await http.post("/v1/sessions", json={})).json()["id"])

    async def reader() -> list[tuple[int, Any]]:
        text = ""
        async with http.stream("GET", f"/v1/sessions/{session_id}/events/stream") as response:
            async for piece in response.aiter_text():
                text += piece
        return [(int(position), json.loads(data)["data"].get("n")) for position, _, data in FRAME.findall(text)]

    reading = [asyncio.create_task(reader()) for _ in range(10)]
    await asyncio.gather(*(written(db, session_id, [Event("model.delta", {"n": n})]) for n in range(100)))
    await ended(db, session_id)
    seen = await asyncio.gather(*reading)
    assert all(one == seen[0] for one in seen)
    assert sorted(n for _, n in seen[0] if n is not None) == list(range(100))
