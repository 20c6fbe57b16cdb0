"""The asyncio client: the same calls as the blocking one, awaited."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Self

import httpx

from tenuto import _turns, _wire
from tenuto._async_collections import (
    AsyncAgents,
    AsyncKeys,
    AsyncSchedules,
    AsyncSecrets,
    AsyncTenants,
    AsyncUsage,
    AsyncWebhooks,
)
from tenuto._async_sessions import AsyncSessions
from tenuto.models import Event, Question


class AsyncClient:
    """A connection to a Tenuto server. Use it as an async context manager, or await `close()`.

    `timeout_s`: of one answer; `attempts`: at one request, while the server is away or has too much to do.

    ```python
    import asyncio
    import tenuto

    async def main() -> None:
        async with tenuto.AsyncClient() as client:
            async with await client.sessions.create(limits={"max_think_tokens": 16}) as session:
                async with session.turn("Say yes.") as turn:
                    async for event in turn:
                        print(event.id, event.type)
                print((await turn.result()).text)

    asyncio.run(main())
    ```
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float = 30.0,
        attempts: int = _wire.ATTEMPTS,
    ) -> None:
        self._server = _wire.Server.find(base_url, api_key)
        self._http = _wire.AsyncHttp(
            base_url=self._server.url, headers=self._server.headers, timeout=timeout_s, trust_env=False
        )
        self._attempts = attempts
        self._claims = _turns.Claims()
        self.sessions = AsyncSessions(self)
        self.agents = AsyncAgents(self)
        self.schedules = AsyncSchedules(self)
        self.secrets = AsyncSecrets(self)
        self.webhooks = AsyncWebhooks(self)
        self.keys = AsyncKeys(self)
        self.tenants = AsyncTenants(self)
        self.usage = AsyncUsage(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give the connections back. The sessions go on."""
        await self._http.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """The models that the server can run, with their cards."""
        data: list[dict[str, Any]] = (await self.get("/v1/models"))["data"]
        return data

    async def plan(self, *, config: Mapping[str, Any], device: str | None = None, **options: Any) -> dict[str, Any]:
        """What a model needs and a device holds, by its config.json: memory, users per replica, speed, tiers.

        `options`: `tp`, `context`, `users`, `kv_dtype` and the others of POST /v1/plan. Nothing is created. Raises
        APIError (400), which says which key is wrong and what is legal.

        ```python
        import asyncio
        import tenuto

        config = {
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
        }

        async def main() -> None:
            async with tenuto.AsyncClient() as client:
                plan = await client.plan(config=config, device="l4", context=32_000)
                print(plan["users_by_memory"], plan["kv_bytes_per_token"], plan["verdict"])

        asyncio.run(main())
        ```
        """
        return await self.post("/v1/plan", {"config": dict(config), "device": device, **options})

    async def questions(self, session_id: str | None = None) -> list[Question]:
        """What sessions wait for: approvals, unknown outcomes, results of the caller's own tools, budgets."""
        params = {"limit": 1000, **({"session": session_id} if session_id else {})}
        return [Question.model_validate(row) for row in (await self.get("/v1/approvals", params))["data"]]

    async def question(self, question_id: str) -> Question:
        """One of them, answered or not. Raises APIError (404)."""
        return Question.model_validate(await self.get(f"/v1/approvals/{_wire.segment(question_id)}"))

    async def answer(self, question_id: str, decision: str, **more: Any) -> Question:
        """Answer one: approve or decline (`reason`); ran (`output`), did_not_run; result (`output`, `is_error`); raise
        (`budget`), stop. The first answer holds; another one raises APIError (409)."""
        body = {"decision": decision, **more}
        return Question.model_validate(await self.post(f"/v1/approvals/{_wire.segment(question_id)}", body))

    async def get(self, path: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One GET of the API, retried while the server is away. Raises APIError, ConnectionFailed."""
        return await self._send(self._http.build_request("GET", path, params=params))

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, key: str | None = None) -> dict[str, Any]:
        """One POST with an idempotency key, retried as GET is: it takes effect once."""
        return await self._send(
            self._http.build_request("POST", path, json=body or {}, headers=_wire.post_headers(key))
        )

    async def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One PATCH, retried as GET is."""
        return await self._send(self._http.build_request("PATCH", path, json=body))

    async def post_bytes(self, path: str, body: bytes, *, key: str | None = None) -> dict[str, Any]:
        """One POST of bytes, retried as `post` is."""
        headers = {**_wire.post_headers(key), **_wire.BYTES}
        return await self._send(self._http.build_request("POST", path, content=body, headers=headers))

    async def put(
        self,
        path: str,
        body: Mapping[str, Any] | bytes,
        params: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
    ) -> dict[str, Any]:
        """One PUT of a JSON object or of bytes, retried as `post` is."""
        headers = {**_wire.post_headers(key), **(_wire.BYTES if isinstance(body, bytes) else {})}
        content, json = (body, None) if isinstance(body, bytes) else (None, body)
        return await self._send(
            self._http.build_request("PUT", path, params=params, content=content, json=json, headers=headers)
        )

    async def delete(self, path: str, *, key: str | None = None) -> dict[str, Any]:
        """One DELETE, retried as `post` is."""
        return await self._send(self._http.build_request("DELETE", path, headers=_wire.post_headers(key)))

    async def read(self, path: str, params: Mapping[str, Any] | None = None) -> bytes:
        """The bytes of one GET, retried. Raises APIError, ConnectionFailed."""
        return (await self._answered(lambda: self._http.build_request("GET", path, params=params))).content

    async def download(
        self, path: str, target: str | os.PathLike[str], params: Mapping[str, Any] | None = None
    ) -> None:
        """One GET into a file, which is there once it is whole. Not retried once bytes have come."""
        try:
            async with self._http.stream("GET", path, params=params, timeout=_wire.STREAM_TIMEOUT) as response:
                if not response.is_success:
                    await response.aread()
                _wire.checked(response)
                with _wire.whole_file(target) as file:
                    async for chunk in response.aiter_bytes():
                        file.write(chunk)
        except httpx.TransportError as error:
            raise self._server.away(error) from error

    async def upload(self, path: str, source: str | os.PathLike[str], *, key: str | None = None) -> dict[str, Any]:
        """One POST of a file, read as it is sent; retried as `post` is."""
        headers = {**_wire.post_headers(key), **_wire.BYTES, "Content-Length": str(os.stat(source).st_size)}

        def request() -> httpx.Request:
            content = _wire.apieces_of(source)
            return self._http.build_request("POST", path, content=content, headers=headers, timeout=_wire.LONG_TIMEOUT)

        return _wire.read_answer(await self._answered(request))

    async def _send(self, request: httpx.Request) -> dict[str, Any]:
        return _wire.read_answer(await self._answered(lambda: request))

    async def _answered(self, request: Callable[[], httpx.Request]) -> httpx.Response:
        """Send, and again where the server was away: every request is safe to repeat. Raises APIError."""
        failure: Exception | None = None
        response: httpx.Response | None = None
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(_wire.pause(attempt - 1, response))
            try:
                response = await self._http.send(request())
            except httpx.TransportError as error:
                failure, response = error, None
                continue
            if response.status_code not in _wire.RETRIED_STATUS or attempt == self._attempts - 1:
                return _wire.checked(response)
        raise self._server.away(failure) from failure

    async def stream(
        self, path: str, after: int, watch: Callable[[], None] | None = None
    ) -> AsyncGenerator[Event, None]:
        """Events after a position, each once and in order, across lost connections, until the session ends.

        `watch` is called whenever anything comes.
        """
        place = _wire.Resume(self._server, after)
        while not place.ended:
            failure: Exception | None = None
            try:
                headers = place.connect()
                async with self._http.stream("GET", path, headers=headers, timeout=_wire.STREAM_TIMEOUT) as response:
                    if response.is_success:
                        async for chunk in response.aiter_bytes():
                            if watch is not None:
                                watch()
                            for event in place.feed(chunk):
                                yield event
                    else:
                        await response.aread()
                        failure = _wire.refusal(response)
                        if response.status_code not in _wire.RETRIED_STATUS:
                            raise failure
            except httpx.TransportError as error:
                failure = error
            if not place.ended:
                await asyncio.sleep(place.pause(failure))
