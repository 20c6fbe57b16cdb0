"""`GET /v1/sessions/{id}/export`: a session as one file (see runtime/archives.py), sent as it is made."""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import IO, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse

from runtime.api import views
from runtime.api.asking import of_workspace
from runtime.api.documented import Id, refusals
from runtime.api.guard import Db, Tenant
from runtime.api.models import served
from runtime.archives import FIRST, FORMAT, LAST
from runtime.errors import Conflict, Unavailable
from runtime.store import Database, exports
from runtime.store.exports import Part
from runtime.tools.kinds import names_a_secret
from sandbox import BlobCorrupt, snapshots
from workflows.states import TERMINAL

router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["sessions"])

_IN_MEMORY = 1 << 20
_PIECE = 1 << 20
_TAR: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}}
}


@router.get("/export", response_class=Response, responses={**_TAR, **refusals(404, 409)})
async def export(
    session_id: Id,
    request: Request,
    db: Db,
    tenant: Tenant,
    kept: Annotated[
        Literal["last", "all"], Query(alias="snapshots", description="Workspaces: the last one, or every checkpoint's.")
    ] = "last",
) -> Response:
    """The session as one tar: its record and its workspace, of one moment, without secrets and without KV. It can be
    imported wherever the same model is served."""
    row = await views.owned(db, tenant, session_id)
    if row["state"] in TERMINAL:
        raise Conflict(f"session {session_id} is {row['state']}; its workspace went with it, so export before that")
    record = await _Record.read(request, db, session_id, kept)
    roots = record.roots if kept == "all" else record.roots[-1:]

    async def blob(digest: str) -> bytes:
        _, data = await of_workspace(request, db, tenant, row, "blob", {"digest": digest})
        return data or b""

    headers = {
        "Content-Disposition": f"attachment; filename={session_id}.tar",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
    return StreamingResponse(_tar(record, roots, blob), media_type="application/x-tar", headers=headers)


class _Record:
    """What the record says, in files of its own until it is sent."""

    def __init__(self) -> None:
        self.session: dict[str, Any] = {}
        self.roots: list[str] = []
        self.parts: dict[str, IO[bytes]] = {}

    @classmethod
    async def read(cls, request: Request, db: Database, session_id: str, kept: str) -> _Record:
        found, text = cls(), await _decoder(request, db, session_id)

        def begin(row: Mapping[str, Any]) -> None:
            found.session, found.roots = dict(row), []
            for part in exports.PARTS:
                found.parts[part.name] = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 (sent later)

        def take(part: Part, row: dict[str, Any]) -> None:
            if part.name == "steps.jsonl":
                calls = (row["output"] or {}).get("calls")
                for call in calls if isinstance(calls, list) else ():  # of a step that runs some, how many
                    if isinstance(call, dict):
                        call.pop("sealed", None)  # arguments that told a secret
            if part.name == "transcript.jsonl":
                row["text"] = text.decode(row["token_ids"])
            elif part.name == "checkpoints.jsonl":
                found.roots.append(row["workspace_root"])
            found.parts[part.name].write(json.dumps(row, separators=(",", ":")).encode() + b"\n")

        await exports.read(db, session_id, begin, take)
        found.session = await _described(db, found.session, kept)
        return found


async def _decoder(request: Request, db: Database, session_id: str) -> Any:
    row = await db.fetchrow("SELECT config ->> 'model' AS model FROM sessions WHERE session_id = $1", session_id)
    here = (await served(db)).get(row["model"] if row else "")
    if here is None or here.chat is None:
        raise Unavailable(f"no node that is up serves {row['model'] if row else 'the model'}")
    return await request.app.state.chats.tokenizer(db, here.chat)


async def _described(db: Database, row: Mapping[str, Any], kept: str) -> dict[str, Any]:
    config, secrets = without_secrets(row["config"])
    card = (await served(db))[row["config"]["model"]].card
    return {
        "format": FORMAT,
        "id": row["session_id"],
        "state": row["state"],
        "created_at": row["created_at"].isoformat(),
        "exported_at": datetime.datetime.now(datetime.UTC).isoformat(),
        "release": "0.1.0",
        "model": {
            "name": card["model"],
            "fingerprint": card["fingerprint"],
            "tokenizer": card.get("tokenizer_digest", ""),
        },
        "seed": row["seed"],
        "config": config,
        "secrets": secrets,
        "listings": row["listings"],
        "budget": row["budget"],
        "spent": {"tokens": row["spent_tokens"], "steps": row["spent_steps"], "tool_ms": row["tool_ms"]},
        "snapshots": kept,
        "kv": "not included",
    }


def without_secrets(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The configuration without values of headers and environments, and the places of those. Names of secrets stay."""
    missing: list[str] = []

    def cleared(tool: Any, place: str) -> Any:
        if not isinstance(tool, dict):
            return tool
        here = f"{place}.{tool.get('name')}"
        kept = dict(tool)
        for kind in ("env", "headers"):
            values = tool.get(kind) or {}
            kept[kind] = {name: value for name, value in values.items() if names_a_secret(value)}
            missing.extend(f"{here}.{kind}.{name}" for name in values if name not in kept[kind])
            if not kept[kind]:
                del kept[kind]
        if isinstance(tool.get("tools"), list):
            kept["tools"] = [cleared(one, f"{here}.tools") for one in tool["tools"]]
        return kept

    return {**config, "tools": [cleared(one, "tools") for one in config.get("tools") or []]}, missing


async def _tar(record: _Record, roots: list[str], blob: Callable[[str], Awaitable[bytes]]) -> AsyncIterator[bytes]:
    """The archive in pieces. Blobs come one by one, so that nothing of any size is held."""
    manifest: list[dict[str, Any]] = []
    try:
        session = json.dumps(record.session, separators=(",", ":")).encode()
        for piece in _member(manifest, FIRST, io.BytesIO(session)):
            yield piece
        for name, part in record.parts.items():
            for piece in _member(manifest, name, part):
                yield piece
        async for digest, data in _blobs(roots, blob):
            for piece in _member(manifest, f"blobs/{digest}", io.BytesIO(data)):
                yield piece
        whole = json.dumps({"format": FORMAT, "members": manifest}, separators=(",", ":")).encode()
        for piece in _member([], LAST, io.BytesIO(whole)):
            yield piece
        yield b"\0" * (2 * tarfile.BLOCKSIZE)
    finally:
        for part in record.parts.values():
            part.close()


async def _blobs(roots: list[str], blob: Callable[[str], Awaitable[bytes]]) -> AsyncIterator[tuple[str, bytes]]:
    """All that the roots need, each once; a file may have the very bytes of a folder's blob."""
    sent: set[str] = set()
    walked: set[str] = set()
    todo = [(root, True) for root in roots]
    while todo:
        digest, is_folder = todo.pop()
        if digest in (walked if is_folder else sent):
            continue
        data = await blob(digest)
        if hashlib.sha256(data).hexdigest() != digest:
            raise BlobCorrupt(f"the blob {digest} is not what its name says")
        if digest not in sent:
            yield digest, data
        sent.add(digest)
        if is_folder:
            walked.add(digest)
            todo += [(entry[3], entry[1] == "d") for entry in snapshots.parse(digest, data) if entry[1] in "fsd"]


def _member(manifest: list[dict[str, Any]], name: str, source: IO[bytes]) -> Iterator[bytes]:
    size = source.seek(0, io.SEEK_END)
    source.seek(0)
    info = tarfile.TarInfo(name)
    info.size = size
    yield info.tobuf(tarfile.USTAR_FORMAT)
    digest = hashlib.sha256()
    while piece := source.read(_PIECE):
        digest.update(piece)
        yield piece
    if rest := size % tarfile.BLOCKSIZE:
        yield b"\0" * (tarfile.BLOCKSIZE - rest)
    manifest.append({"name": name, "size": size, "sha256": digest.hexdigest()})
