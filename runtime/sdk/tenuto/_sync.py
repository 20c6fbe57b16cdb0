"""The blocking client."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Self

import httpx

from tenuto import _turns, _wire
from tenuto._sync_collections import Agents, Keys, Schedules, Secrets, Tenants, Usage, Webhooks
from tenuto._sync_sessions import Sessions
from tenuto.models import Event, Question


class Client:
    """A connection to a Tenuto server. Use it as a context manager, or call `close()`.

    `timeout_s`: of one answer; `attempts`: at one request, while the server is away or has too much to do.

    ```python
    import tenuto

    with tenuto.Client() as client:  # or tenuto.Client("http://host:8300", "tk_...")
        print([model["id"] for model in client.models()])
        print(len(list(client.sessions.list(state="idle"))))
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
        self._http = _wire.Http(
            base_url=self._server.url, headers=self._server.headers, timeout=timeout_s, trust_env=False
        )
        self._attempts = attempts
        self._claims = _turns.Claims()
        self.sessions = Sessions(self)
        self.agents = Agents(self)
        self.schedules = Schedules(self)
        self.secrets = Secrets(self)
        self.webhooks = Webhooks(self)
        self.keys = Keys(self)
        self.tenants = Tenants(self)
        self.usage = Usage(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back. The sessions go on."""
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        """The models that the server can run, with their cards."""
        data: list[dict[str, Any]] = self.get("/v1/models")["data"]
        return data

    def plan(self, *, config: Mapping[str, Any], device: str | None = None, **options: Any) -> dict[str, Any]:
        """What a model needs and a device holds, by its config.json: memory, users per replica, speed, tiers.

        `options`: `tp`, `context`, `users`, `kv_dtype` and the others of POST /v1/plan. Nothing is created. Raises
        APIError (400), which says which key is wrong and what is legal.

        ```python
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

        with tenuto.Client() as client:
            plan = client.plan(config=config, device="l4", context=32_000)
            print(plan["users_by_memory"], plan["kv_bytes_per_token"], plan["verdict"])
        ```
        """
        return self.post("/v1/plan", {"config": dict(config), "device": device, **options})

    def questions(self, session_id: str | None = None) -> list[Question]:
        """What sessions wait for: approvals, unknown outcomes, results of the caller's own tools, budgets."""
        params = {"limit": 1000, **({"session": session_id} if session_id else {})}
        return [Question.model_validate(row) for row in (self.get("/v1/approvals", params))["data"]]

    def question(self, question_id: str) -> Question:
        """One of them, answered or not. Raises APIError (404)."""
        return Question.model_validate(self.get(f"/v1/approvals/{_wire.segment(question_id)}"))

    def answer(self, question_id: str, decision: str, **more: Any) -> Question:
        """Answer one: approve or decline (`reason`); ran (`output`), did_not_run; result (`output`, `is_error`); raise
        (`budget`), stop. The first answer holds; another one raises APIError (409).

        ```python
        import tenuto

        with tenuto.Client() as client:
            for question in client.questions():
                if question.kind == "approval":
                    client.answer(question.id, "decline", reason="not today")
        ```
        """
        body = {"decision": decision, **more}
        return Question.model_validate(self.post(f"/v1/approvals/{_wire.segment(question_id)}", body))

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One GET of the API, retried while the server is away. Raises APIError, ConnectionFailed."""
        return self._send(self._http.build_request("GET", path, params=params))

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, key: str | None = None) -> dict[str, Any]:
        """One POST with an idempotency key, retried as GET is: it takes effect once."""
        return self._send(self._http.build_request("POST", path, json=body or {}, headers=_wire.post_headers(key)))

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One PATCH, retried as GET is."""
        return self._send(self._http.build_request("PATCH", path, json=body))

    def post_bytes(self, path: str, body: bytes, *, key: str | None = None) -> dict[str, Any]:
        """One POST of bytes, retried as `post` is."""
        headers = {**_wire.post_headers(key), **_wire.BYTES}
        return self._send(self._http.build_request("POST", path, content=body, headers=headers))

    def put(
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
        return self._send(
            self._http.build_request("PUT", path, params=params, content=content, json=json, headers=headers)
        )

    def delete(self, path: str, *, key: str | None = None) -> dict[str, Any]:
        """One DELETE, retried as `post` is."""
        return self._send(self._http.build_request("DELETE", path, headers=_wire.post_headers(key)))

    def read(self, path: str, params: Mapping[str, Any] | None = None) -> bytes:
        """The bytes of one GET, retried. Raises APIError, ConnectionFailed."""
        return self._answered(lambda: self._http.build_request("GET", path, params=params)).content

    def download(self, path: str, target: str | os.PathLike[str], params: Mapping[str, Any] | None = None) -> None:
        """One GET into a file, which is there once it is whole. Not retried once bytes have come."""
        try:
            with self._http.stream("GET", path, params=params, timeout=_wire.STREAM_TIMEOUT) as response:
                if not response.is_success:
                    response.read()
                _wire.checked(response)
                with _wire.whole_file(target) as file:
                    for chunk in response.iter_bytes():
                        file.write(chunk)
        except httpx.TransportError as error:
            raise self._server.away(error) from error

    def upload(self, path: str, source: str | os.PathLike[str], *, key: str | None = None) -> dict[str, Any]:
        """One POST of a file, read as it is sent; retried as `post` is."""
        headers = {**_wire.post_headers(key), **_wire.BYTES, "Content-Length": str(os.stat(source).st_size)}

        def request() -> httpx.Request:
            content = _wire.pieces_of(source)
            return self._http.build_request("POST", path, content=content, headers=headers, timeout=_wire.LONG_TIMEOUT)

        return _wire.read_answer(self._answered(request))

    def _send(self, request: httpx.Request) -> dict[str, Any]:
        return _wire.read_answer(self._answered(lambda: request))

    def _answered(self, request: Callable[[], httpx.Request]) -> httpx.Response:
        """Send, and again where the server was away: every request is safe to repeat. Raises APIError."""
        failure: Exception | None = None
        response: httpx.Response | None = None
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(_wire.pause(attempt - 1, response))
            try:
                response = self._http.send(request())
            except httpx.TransportError as error:
                failure, response = error, None
                continue
            if response.status_code not in _wire.RETRIED_STATUS or attempt == self._attempts - 1:
                return _wire.checked(response)
        raise self._server.away(failure) from failure

    def stream(self, path: str, after: int, watch: Callable[[], None] | None = None) -> Generator[Event, None, None]:
        """Events after a position, each once and in order, across lost connections, until the session ends.

        `watch` is called whenever anything comes.
        """
        place = _wire.Resume(self._server, after)
        while not place.ended:
            failure: Exception | None = None
            try:
                headers = place.connect()
                with self._http.stream("GET", path, headers=headers, timeout=_wire.STREAM_TIMEOUT) as response:
                    if response.is_success:
                        for chunk in response.iter_bytes():
                            if watch is not None:
                                watch()
                            yield from place.feed(chunk)
                    else:
                        response.read()
                        failure = _wire.refusal(response)
                        if response.status_code not in _wire.RETRIED_STATUS:
                            raise failure
            except httpx.TransportError as error:
                failure = error
            if not place.ended:
                time.sleep(place.pause(failure))
