from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from tests.runtime.api.conftest import KEY, app, client

__all__ = ["app", "client", "operator"]


class Operator:
    """Somebody with a browser that has no JavaScript: reads pages, and sends the forms that stand in them."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def log_in(self, key: str = KEY) -> httpx.Response:
        return await self.http.post("/console/login", data={"key": key, "next": "/console/"})

    async def page(self, path: str, **query: str) -> str:
        answer = await self.http.get(f"/console{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.text

    async def mark(self) -> str:
        found = re.search(r'name="mark" value="([^"]+)"', await self.page("/tenants"))
        assert found is not None
        return found[1]

    async def act(self, action: str, /, **fields: str) -> httpx.Response:
        """What a form sends, with the mark of this login."""
        return await self.http.post(f"/console/act/{action}", data={"mark": await self.mark(), **fields})

    async def told(self) -> str:
        """What the page after an action says of it."""
        found = re.search(r'<div class="flash[^>]*>(.*?)</div>', await self.page("/runbooks"), re.S)
        return found[1] if found else ""


async def away(app: FastAPI) -> None:
    await app.state.db.execute("UPDATE nodes SET heartbeat_at = now() - interval '1 hour'")


async def made(app: FastAPI, client: httpx.AsyncClient, said: str | None = None, **config: object) -> str:
    """A session; a node must be up while it is made."""
    await app.state.db.execute("UPDATE nodes SET heartbeat_at = now()")
    session = str((await client.post("/v1/sessions", json=config)).json()["id"])
    if said is not None:
        await client.post(f"/v1/sessions/{session}/events", json={"content": said})
    await away(app)
    return session


@pytest.fixture
async def operator(app: FastAPI) -> AsyncIterator[Operator]:
    """The node that is announced here is nobody: it has beaten once, so that nobody waits for its answers."""
    await away(app)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        someone = Operator(http)
        assert (await someone.log_in()).status_code == 303
        yield someone
