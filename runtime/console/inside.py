"""The API as the console asks it: through its own front door, in this process, with the operator's key."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.api.guard import INSIDE

WITHIN_S: Final = 6.0  # a page that waits for longer says what it knows without
ACT_WITHIN_S: Final = 60.0


@dataclass(frozen=True)
class Refused(Exception):
    """The API refused, or a part behind it is away."""

    status: int
    code: str
    message: str

    def __str__(self) -> str:
        return self.message


def segment(text: str) -> str:
    """A text as one segment of a path, whatever is in it: a client would walk up at `..`."""
    return quote(text, safe="").replace(".", "%2E")


class Inside:
    """One operator's. Every answer is as their key would have got it over the network, audit and all."""

    def __init__(self, app: ASGIApp, key_id: str) -> None:
        self._app, self._key_id = app, key_id

    async def get(self, path: str, **query: Any) -> Any:
        """The JSON under /v1/admin. Raises Refused."""
        return await self._ask("GET", path, WITHIN_S, params={name: v for name, v in query.items() if v is not None})

    async def many(self, *asks: tuple[str, Mapping[str, Any]] | str) -> list[Any]:
        """Several at once; a Refused stands in the place of what was refused."""
        split = [(ask, {}) if isinstance(ask, str) else ask for ask in asks]
        return await asyncio.gather(*(self._or_refused(path, query) for path, query in split))

    async def act(self, method: str, path: str, body: Mapping[str, Any] | None, once: str) -> Any:
        """Change something; a repeat with the same `once` changes nothing more. Raises Refused."""
        return await self._ask(method, path, ACT_WITHIN_S, json=body or {}, headers={"Idempotency-Key": once})

    async def ready(self) -> dict[str, str]:
        """What this process needs, and ok or what is wrong with each."""
        try:
            answer = await self._request("GET", "/readyz", WITHIN_S)
        except Refused as refused:
            return {"api": refused.message}
        return dict(answer.json()["checks"])

    async def forward(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        """A request of the browser's, answered by the API as it stands: streams and files."""
        inside = {**scope, "path": path, "raw_path": path.encode(), "root_path": "", INSIDE: self._key_id, "state": {}}
        await self._app(inside, receive, send)

    async def _or_refused(self, path: str, query: Mapping[str, Any]) -> Any:
        try:
            return await self.get(path, **query)
        except Refused as refused:
            return refused

    async def _ask(self, method: str, path: str, within_s: float, **rest: Any) -> Any:
        answer = await self._request(method, f"/v1/admin{path}", within_s, **rest)
        if answer.is_error:
            raise refusal(answer)
        return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else answer.text

    async def _request(self, method: str, path: str, within_s: float, **rest: Any) -> httpx.Response:
        async def entry(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app({**scope, INSIDE: self._key_id}, receive, send)

        transport = httpx.ASGITransport(entry, raise_app_exceptions=False)
        try:
            async with (
                asyncio.timeout(within_s),
                httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
            ):
                return await client.request(method, path, **rest)
        except TimeoutError:
            raise Refused(503, "unavailable", f"there was no answer within {within_s:.0f} s") from None


def refusal(answer: httpx.Response) -> Refused:
    try:
        problem = answer.json()
        return Refused(answer.status_code, problem["error"]["code"], problem["detail"])
    except (ValueError, KeyError):
        return Refused(answer.status_code, "error", answer.text[:300])
