"""Every answer names the request that it is of, as problem documents and the log do."""

from __future__ import annotations

import contextvars
import logging
import re
import secrets
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

HEADER: Final = "X-Request-Id"
_SANE: Final = re.compile(r"[!-~]{1,128}")  # visible ASCII
_present: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


def request_id() -> str:
    """Of the request that is being answered; empty where there is none."""
    return _present.get()


class RequestIds:
    """ASGI middleware: takes the request's own id where it has a sane one, and makes one where not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ours = _id_of(scope)
        _present.set(ours)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = ours
                if message["status"] >= 500 and scope["path"].startswith("/v1/"):
                    log.error("%s %s was answered %d (%s)", scope["method"], scope["path"], message["status"], ours)
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception as error:
            log.error("%s %s failed (%s): %s", scope["method"], scope["path"], ours, type(error).__name__)
            raise


def _id_of(scope: Scope) -> str:
    given = [value.decode("latin-1") for name, value in scope["headers"] if name == HEADER.lower().encode()]
    return given[0] if len(given) == 1 and _SANE.fullmatch(given[0]) else f"req_{secrets.token_hex(12)}"
