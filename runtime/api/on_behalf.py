"""`/v1/admin/tenants/{tenant}/sessions/…` and its like: what a tenant's key reaches, reached by an operator for them.

The rest of the path is that of the tenant's own route, and so are its answers. It takes a key of scope admin, and what
is changed this way is in the audit log, with the tenant that it was changed for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.api import problems
from runtime.errors import Forbidden, NotFound, Unavailable
from runtime.store.keys import Caller

_PREFIX: Final = "/v1/admin/tenants/"
COLLECTIONS: Final = frozenset(
    {"agents", "approvals", "keys", "models", "schedules", "secrets", "sessions", "usage", "webhooks"}
)


class OnBehalf:
    """ASGI middleware, behind `Authenticated` and `Noted`: the path and the caller become the tenant's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (found := _split(scope["path"])):
            tenant_id, rest = found
            try:
                await _become(scope, tenant_id)
            except (Forbidden, NotFound, Unavailable) as error:
                await problems.of(error)(scope, receive, send)
                return
            scope["path"] = f"/v1/{rest}"
            scope["raw_path"] = scope["path"].encode()
        await self._app(scope, receive, send)


def _split(path: str) -> tuple[str, str] | None:
    """A tenant, and what is asked for of theirs; None where it is something else."""
    if not path.startswith(_PREFIX):
        return None
    tenant_id, _, rest = path.removeprefix(_PREFIX).partition("/")
    return (tenant_id, rest) if rest.partition("/")[0] in COLLECTIONS else None


async def _become(scope: Scope, tenant_id: str) -> None:
    """Raises Forbidden, NotFound."""
    state = scope["state"]
    caller = state["caller"]
    assert isinstance(caller, Caller)
    if caller.scope != "admin":
        raise Forbidden("this key may use its own tenant's sessions; others take a key of scope admin")
    found = await scope["app"].state.db.fetchrow(
        "SELECT true FROM tenants WHERE tenant_id = $1", tenant_id.replace("\0", "")
    )
    if found is None:
        raise NotFound(f"there is no tenant {tenant_id}; GET /v1/admin/tenants lists them")
    state["for_tenant"] = tenant_id
    state["caller"] = replace(caller, tenant_id=tenant_id)
