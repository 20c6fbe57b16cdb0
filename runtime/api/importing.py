"""`POST /v1/sessions/import`: a session from an archive. The body is kept as it comes, piece by piece, and read by a
node, which makes the session only once all of it was verified."""

from __future__ import annotations

import hashlib
import json
import tarfile
from typing import Final, Literal

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field, ValidationError

from runtime.api import views
from runtime.api.asking import carried_out
from runtime.api.documented import Shape, refusals
from runtime.api.guard import Db, Tenant
from runtime.api.idempotency import id_for, made_before
from runtime.api.making import ensure_possible
from runtime.api.models import checked_model
from runtime.archives import FIRST, MAX_SESSION_BYTES
from runtime.config import SessionConfig
from runtime.errors import InvalidRequest, Unavailable
from runtime.store import Database, domains, errands
from runtime.store.sessions import new_id
from runtime.text import fault

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

PIECE: Final = 4 << 20
WITHIN_S: Final = 600.0
_TAR: Final = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


class Imported(Shape):
    """A session that came from an archive. `secrets`: values of headers and environments that the archive does not
    have, by their place; the tools are without them."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [
                {
                    "id": "ses_0b",
                    "object": "session.import",
                    "state": "idle",
                    "came_from": "ses_0a",
                    "step": 6,
                    "tokens": 812,
                    "secrets": ["tools.weather.headers.Authorization"],
                }
            ]
        },
    )

    id: str
    object: Literal["session.import"] = "session.import"
    state: str
    came_from: str = Field(description="The session's id where it was exported.")
    step: int = Field(description="The checkpoint at which it stands.")
    tokens: int
    secrets: list[str]


@router.post("/import", status_code=201, openapi_extra=_TAR, responses=refusals(409))
async def import_session(request: Request, db: Db, tenant: Tenant) -> Imported:
    """A new session from an archive of `GET …/export` (512 MiB at most). It stands at the last checkpoint of the one
    that was exported, at rest or paused, and goes on with the same tokens. Whatever is wrong with the archive is
    refused in a sentence, and nothing is made. It takes a node that serves the same model."""
    parts, errand_id = new_id("prt"), new_id("err")
    try:
        digest, config = await _keep(request, db, tenant, parts)
        before = await made_before(request, db, tenant, digest=digest)
        served = await checked_model(db, config.model)
        await ensure_possible(request, db, tenant, config)
        session_id = before or await id_for(request, db, tenant, "ses", digest=digest)
        domain = domains.domain_of(tenant, session_id, config.kv.share, request.app.state.kv_encryption)
        asked = {"session_id": session_id, "parts": parts, "domain": domain}
        queues = await errands.queues(db, None, model=served.name)
        if not queues:
            raise Unavailable("no node is up")
        await errands.ask(db, tenant, errand_id, "import", asked, None)
        done = await carried_out(request, db, errand_id, "", queues[0], within_s=WITHIN_S)
    finally:
        await errands.forget(db, errand_id)
        await errands.drop_parts(db, parts)
    told = done.result or {}
    row = await views.owned(db, tenant, session_id)
    about = {"id": session_id, "state": row["state"], "came_from": told["from"]}
    return Imported.model_validate({**about, **{name: told[name] for name in ("step", "tokens", "secrets")}})


async def _keep(request: Request, db: Database, tenant: str, parts: str) -> tuple[bytes, SessionConfig]:
    """Keep the body; its sha256, and the configuration that it begins with."""
    digest, piece, head, count = hashlib.sha256(), bytearray(), bytearray(), 0
    config: SessionConfig | None = None
    look_at = tarfile.BLOCKSIZE  # bytes of the head: pieces may be tiny, and each look reads all of it
    async for chunk in request.stream():
        digest.update(chunk)
        piece += chunk
        if config is None:
            head += chunk
            if len(head) >= look_at:
                config, look_at = _config(bytes(head)), 2 * len(head)
        if len(piece) >= PIECE:
            await errands.add_part(db, tenant, parts, count, bytes(piece))
            piece, count = bytearray(), count + 1
    await errands.add_part(db, tenant, parts, count, bytes(piece))
    config = config or _config(bytes(head))
    if config is None:
        raise InvalidRequest("the body is no archive of a session, or is cut off")
    return digest.digest(), config


def _config(head: bytes) -> SessionConfig | None:
    """Of `session.json`, the first member; None: more must come first. Raises InvalidRequest where it is none."""
    if len(head) < tarfile.BLOCKSIZE:
        return None
    try:
        member = tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        raise InvalidRequest("the body is no tar archive; send one as the export gave it, not packed") from None
    if member.name != FIRST or not 0 <= member.size <= MAX_SESSION_BYTES:
        raise InvalidRequest(f"the archive does not begin with {FIRST}: it is no export of a session")
    if len(head) < tarfile.BLOCKSIZE + member.size:
        return None
    text = head[tarfile.BLOCKSIZE : tarfile.BLOCKSIZE + member.size]
    try:
        told = json.loads(text)
        if wrong := fault(told):
            raise InvalidRequest(f"{FIRST} of the archive: {wrong}")
        return SessionConfig.model_validate(told["config"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"the archive's configuration cannot be: {where}: {first['msg']}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InvalidRequest(f"{FIRST} of the archive is not what an export has there") from None
