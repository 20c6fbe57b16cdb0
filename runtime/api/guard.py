"""Who may speak to the API at all: loopback names only, no foreign web page, a key within its rate, a bounded body."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Final
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.requests import HTTPConnection
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.api import problems
from runtime.api.problems import problem
from runtime.archives import MAX_BYTES as MAX_ARCHIVE_BYTES
from runtime.errors import Forbidden, RequestError, TooManyRequests, Unauthorized, Unavailable
from runtime.store import Database, keys, rates
from runtime.store.keys import Caller

OPEN: Final = frozenset({"/v1/openapi.json"})  # what it says of the API is no secret
MAX_BODY_BYTES = 8 << 20
_NO_KEY = "send your key as `Authorization: Bearer KEY`; the first one is in admin.key of TENUTO_HOME"


INSIDE: Final = "tenuto.key_id"  # in the scope of a request that this process makes of itself; no header sets it
LARGER: Final = {"/v1/sessions/import": MAX_ARCHIVE_BYTES}  # what is not read into memory


class Guard:
    """ASGI middleware: Host and Origin must name this machine; bodies end at MAX_BODY_BYTES, or where LARGER says.

    A page on the web can make a browser send requests to loopback; its Host (after DNS rebinding) or Origin gives
    it away. `allowed` adds names that a deployment answers to.
    """

    def __init__(self, app: ASGIApp, allowed: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if refusal := self._refusal(headers):
            await problem(403, "forbidden_origin", refusal)(scope, receive, send)
            return
        most = LARGER.get(scope["path"], MAX_BODY_BYTES)
        if _announced(headers) > most:
            await problem(413, "request_too_large", _too_large(most))(scope, receive, send)
            return
        await self._app(scope, _Bounded(receive, most), send)

    def _refusal(self, headers: dict[str, str]) -> str | None:
        host = headers.get("host", "")
        if not self._is_ours(host):
            return f"the Host header names {host!r}, which this server does not answer to"
        origin = headers.get("origin")
        if origin is not None and not self._is_ours(origin.partition("://")[2]):
            return f"requests from pages of {origin!r} are refused"
        return None

    def _is_ours(self, netloc: str) -> bool:
        try:
            name = urlsplit(f"//{netloc}").hostname or ""
        except ValueError:
            return False
        if name == "localhost" or name in self._allowed:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def _announced(headers: Mapping[str, str]) -> int:
    """Bytes of the body, as its header says; a server that lets others through has not read it yet."""
    length = headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() else 0


class _Bounded:
    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._most = most
        self._seen = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if self._seen > self._most:
            raise HTTPException(413, _too_large(self._most))
        return message


def _too_large(most: int) -> str:
    return f"the body is larger than {most} bytes"


class Authenticated:
    """ASGI middleware: whatever lies under /v1 takes a key. It is looked up here, once, before anything of the request
    is read; routes find whose it is with `Who`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/") or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        try:
            db = scope["app"].state.db
            inside = scope.get(INSIDE)
            caller = await (keys.caller_of(db, inside) if inside else keys.caller(db, _bearer(scope)))
            allowance = await rates.take(db, caller)
        except (RequestError, Unavailable) as error:
            await problems.of(error)(scope, receive, send)
            return
        left = allowance.headers() if allowance else {}
        scope.setdefault("state", {}).update(caller=caller, rate_headers=left)
        if allowance is None or allowance.taken:
            await self._app(scope, receive, _saying(left, send) if left else send)
            return
        refused = TooManyRequests(
            f"this key may send {allowance.limit} requests a minute; try again in {allowance.retry_after_s} s",
            allowance.retry_after_s,
        )
        await problems.of(refused)(scope, receive, _saying(left, send))


def _saying(more: Mapping[str, str], send: Send) -> Send:
    async def said(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(more)
        await send(message)

    return said


def _bearer(scope: Scope) -> str:
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthorized(_NO_KEY)
    return key.strip()


async def database(request: Request) -> Database:
    db = request.app.state.db
    assert isinstance(db, Database)
    return db


# Dependencies are coroutines: FastAPI would run plain functions on threads, which costs more than they do.
Db = Annotated[Database, Depends(database)]


async def who(connection: HTTPConnection) -> Caller:
    """Whose key the request was sent with. Raises Unauthorized."""
    caller = getattr(connection.state, "caller", None)
    if not isinstance(caller, Caller):
        raise Unauthorized(_NO_KEY)
    return caller


Who = Annotated[Caller, Depends(who)]


async def tenant(caller: Who) -> str:
    """The tenant of the request's key. Raises Unauthorized."""
    return caller.tenant_id


Tenant = Annotated[str, Depends(tenant)]


async def admin(caller: Who) -> Caller:
    """Raises Forbidden unless the request's key is of scope admin."""
    if caller.scope != "admin":
        raise Forbidden("this key may use sessions; what an operator does takes a key of scope admin")
    return caller


Admin = Annotated[Caller, Depends(admin)]
