"""What operators change is written down: by the change's own transaction where it has one, and else before the answer
leaves, refusals too."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Final

from fastapi import Depends, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.api.guard import Admin
from runtime.api.request_id import request_id
from runtime.errors import Unavailable
from runtime.store import audit
from runtime.store.audit import Act
from runtime.store.keys import Caller

log = logging.getLogger(__name__)

_PREFIX: Final = "/v1/admin/"
_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


async def acting(request: Request, caller: Admin) -> Act:
    """For a route that notes by itself what it did, in its own transaction; only its refusals are noted for it."""
    request.state.noted = True
    return Act(caller.tenant_id, caller.key_id, action_of(request.scope), request_id())


Acting = Annotated[Act, Depends(acting)]


def action_of(scope: Scope) -> str:
    """Collection and route, as `keys.revoke`."""
    collection = _kept(scope["path"].removeprefix(_PREFIX).removeprefix("/v1/").partition("/")[0])
    name = getattr(scope.get("route"), "name", None) or scope["method"].lower()
    return f"{collection[:64]}.{name}"


class Noted:
    """ASGI middleware: every change by an admin key that no transaction notes is noted before its answer leaves."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope.get("state", {}).get("caller")
        if not _changes(scope) or not isinstance(caller, Caller) or caller.scope != "admin":
            await self._app(scope, receive, send)
            return
        answered = False

        async def noted(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start" and not answered:
                answered = True
                await _note(scope, caller, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            if not answered:
                await _note(scope, caller, 500)
            raise


def _changes(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["path"].startswith(_PREFIX) and scope["method"] not in _READS


async def _note(scope: Scope, caller: Caller, status: int) -> None:
    outcome = "done" if status < 400 else "refused" if status < 500 else "failed"
    if outcome == "done" and scope["state"].get("noted"):
        return
    act = Act(caller.tenant_id, caller.key_id, action_of(scope), request_id())
    target = _kept(":".join(str(value) for value in scope.get("path_params", {}).values()))[:300] or None
    detail: dict[str, Any] = {"status": status}
    if tenant_id := scope["state"].get("for_tenant"):
        detail["tenant"] = tenant_id
    if code := scope["state"].get("error_code"):
        detail["code"] = code
    try:
        await audit.note(scope["app"].state.db, act, target, outcome, detail)
    except Unavailable as error:
        log.error("%s of %s by %s was %s and could not be noted: %s", act.action, target, act.key_id, outcome, error)


def _kept(text: str) -> str:
    """Postgres keeps no NUL, and who sends one is written down as well."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")
