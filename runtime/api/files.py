"""`/v1/sessions/{id}/sandbox/files`: the workspace as it is, or as it was at any checkpoint, from its snapshots."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Literal
from urllib.parse import quote

import asyncpg
from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import ConfigDict, Field

from runtime.api import views
from runtime.api.asking import of_workspace
from runtime.api.documented import Id, Limit, Page, Shape, page_of, refusals
from runtime.api.guard import Db, Tenant
from runtime.config import SessionConfig
from runtime.errors import Conflict, InvalidRequest, NotFound
from runtime.store import Database, checkpoints, fleet, sandboxes
from runtime.workspaces import Answer, answered, of_files
from workflows.states import TERMINAL

router = APIRouter(prefix="/v1/sessions/{session_id}/sandbox", tags=["sandbox"])

MAX_PATH = 4000
PIECE = 1 << 20
_PATH = Path(min_length=1, max_length=MAX_PATH, description="Relative to the workspace.")
FilePath = Annotated[str, _PATH]
Step = Annotated[
    int | None, Query(ge=1, lt=2**31, description="The step at whose checkpoint; by default as it is now.")
]


class File(Shape):
    """A name in the workspace. `sha256` is of its content; a file of holes, a folder and a link have none."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [
                {
                    "id": "src/main.py",
                    "object": "file",
                    "path": "src/main.py",
                    "kind": "file",
                    "size": 120,
                    "mode": "0644",
                    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
                    "target": None,
                }
            ]
        },
    )

    id: str
    object: Literal["file"] = "file"
    path: str
    kind: Literal["file", "folder", "link"]
    size: int | None = Field(description="Bytes, of a file.")
    mode: str | None = Field(description="Permissions in octal.")
    sha256: str | None
    target: str | None = Field(description="What a link points to.")


class Change(Shape):
    """What differs between two checkpoints at a path. Sizes in bytes, of files."""

    id: str
    object: Literal["change"] = "change"
    path: str
    change: Literal["added", "removed", "changed"]
    kind: Literal["file", "folder", "link"]
    size_before: int | None
    size: int | None


@router.get("/files", responses=refusals(404, 409))
async def list_files(
    session_id: Id,
    request: Request,
    db: Db,
    tenant: Tenant,
    path: Annotated[str, Query(max_length=MAX_PATH, description="The folder; the workspace itself by default.")] = "",
    step: Step = None,
    recursive: Annotated[bool, Query(description="With all that is below.")] = False,
    limit: Limit = 1000,
    after: Annotated[str, Query(max_length=MAX_PATH, description="The `last_id` of the page before.")] = "",
) -> Page[File]:
    """The files of a folder in the order of their paths, now or at the checkpoint of a step."""
    folder = checked_path(path) if path else ""
    asked = {"path": folder, "deep": recursive, "after": after, "limit": limit}
    ask = await workspace_at(request, db, tenant, session_id, step)
    found, _ = await ask("list", asked)
    data = [File(id=one["path"], **one) for one in found["data"]]
    return page_of(data, found["has_more"])


@router.get(
    "/files/{path:path}",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}, **refusals(404, 409)},
)
async def read_file(
    session_id: Id, path: FilePath, request: Request, db: Db, tenant: Tenant, step: Step = None
) -> Response:
    """A file's bytes, now or at the checkpoint of a step; at most 64 MiB."""
    asked: dict[str, Any] = {"path": checked_path(path), "at": 0, "most": 4 * PIECE}
    ask = await workspace_at(request, db, tenant, session_id, step)
    about, first = await ask("read", asked)

    async def pieces() -> AsyncIterator[bytes]:
        at, piece = 0, first or b""
        while piece:
            yield piece
            at += len(piece)
            if at >= about["size"]:
                return
            _, more = await ask("read", {**asked, "at": at})
            piece = more or b""

    name = quote(path.rsplit("/", 1)[-1], safe="")
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
        "X-Content-Type-Options": "nosniff",
        "Content-Length": str(about["size"]),
        "X-File-Mode": about["mode"],
        "Cache-Control": "no-store",
    }
    return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)


@router.get("/diff", responses=refusals(404, 409))
async def diff(
    session_id: Id,
    request: Request,
    db: Db,
    tenant: Tenant,
    before: Annotated[
        int | None, Query(alias="from", ge=1, lt=2**31, description="The step that was before; its first checkpoint.")
    ] = None,
    to: Annotated[int | None, Query(ge=1, lt=2**31, description="The step to compare with; now by default.")] = None,
    limit: Limit = 1000,
    after: Annotated[str, Query(max_length=MAX_PATH, description="The `last_id` of the page before.")] = "",
) -> Page[Change]:
    """What was added, removed and changed in the workspace between two checkpoints, in the order of the paths."""
    row = await views.owned(db, tenant, session_id)
    new = await root_at(db, row, to)
    old = await root_at(db, row, before) if before else await checkpoints.first(db, session_id)
    if new is None:
        return page_of([], False)  # it has the files that it was made with
    roots = {"from": old, "to": new}
    found, _ = await of_workspace(request, db, tenant, row, "diff", roots)
    rest = [Change(id=one["path"], **one) for one in found["data"] if one["path"] > after]
    return page_of(rest[:limit], len(rest) > limit)


class Snapshot(Shape):
    """The workspace at a checkpoint: equal roots are equal workspaces."""

    id: int = Field(description="The step.")
    object: Literal["snapshot"] = "snapshot"
    root: str
    kind: str = Field(description="The step's kind.")
    live: bool = Field(description="Whether the step is on the session's branch.")
    created_at: str


class Described(Shape):
    """A session's sandbox. `state`: live, creating, or none: the next call makes one with the same files. `limits`: as
    the session asks for them; `enforced`: how each holds where the sandbox is, null where nothing enforces it."""

    session_id: str
    object: Literal["sandbox"] = "sandbox"
    state: Literal["live", "creating", "none"]
    backend: str | None
    isolation: str | None
    image: str | None
    egress: list[str]
    limits: dict[str, Any]
    enforced: dict[str, Any]
    workspace: dict[str, int] = Field(description="How many files, and how many bytes in all.")


@router.get("", responses=refusals(404, 409))
async def describe(session_id: Id, request: Request, db: Db, tenant: Tenant) -> Described:
    """What the session's tools run in: backend, limits, what is in the workspace now."""
    row = await views.owned(db, tenant, session_id)
    ask = await workspace_at(request, db, tenant, session_id, None)
    size, _ = await ask("size", {})
    box = await sandboxes.of_session(db, session_id)
    node_id = box["node_id"] if box else row["node_id"]
    about = next((node["sandbox"] for node in await fleet.nodes(db) if node["node_id"] == node_id), None) or {}
    config = SessionConfig.model_validate(row["config"])
    return Described(
        session_id=session_id,
        state=box["state"] if box else "none",
        backend=box["driver"] if box else about.get("backend"),
        isolation=about.get("isolation"),
        image=config.image,
        egress=[str(one) for one in config.egress],
        limits=config.limits.model_dump(),
        enforced=about.get("limits") or {},
        workspace=size,
    )


@router.get("/snapshots", responses=refusals(404))
async def list_snapshots(
    session_id: Id, db: Db, tenant: Tenant, limit: Limit = 100, after: Annotated[int, Query(ge=0, lt=2**31)] = 0
) -> Page[Snapshot]:
    """The workspace's root at every checkpoint, oldest first."""
    await views.owned(db, tenant, session_id)
    rows = await checkpoints.roots(db, session_id, limit + 1, after)
    return page_of([Snapshot(**row) for row in rows[:limit]], len(rows) > limit)


def checked_path(path: str) -> str:
    """Raises InvalidRequest where it names nothing in a workspace."""
    names = path.split("/")
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        raise InvalidRequest(
            f"path: {path[:200]!r} is not a plain path; name files relative to the workspace, without . and ..",
            param="path",
        )
    if any(len(name.encode("utf-8", "replace")) > 255 for name in names) or len(names) > 100:
        raise InvalidRequest("path: a name has at most 255 bytes, and a path 100 of them", param="path")
    return path


async def root_at(db: Database, row: asyncpg.Record, step: int | None) -> str | None:
    """The workspace at the checkpoint of a step, or now; None where the session has only the files that it was made
    with. Raises NotFound; Conflict where the session has ended, since its snapshots went with it."""
    if row["state"] in TERMINAL:
        raise Conflict(f"session {row['session_id']} is {row['state']}; its workspace went with it")
    root = await checkpoints.workspace(db, row["session_id"], step)
    if step is not None and root is None:
        raise NotFound(f"session {row['session_id']} has no checkpoint at step {step}; see its checkpoints")
    return root


Ask = Callable[[str, dict[str, Any]], Awaitable[Answer]]


async def workspace_at(request: Request, db: Database, tenant: str, session_id: str, step: int | None) -> Ask:
    """What answers about one workspace, whatever becomes of the session meanwhile. Raises NotFound, Conflict."""
    row = await views.owned(db, tenant, session_id)
    root = await root_at(db, row, step)
    if root is not None:
        return lambda kind, asked: of_workspace(request, db, tenant, row, kind, {**asked, "root": root})
    made, blobs = of_files(SessionConfig.model_validate(row["config"]).files)

    async def ask(kind: str, asked: dict[str, Any]) -> Answer:
        return answered(blobs, kind, {**asked, "root": made})

    return ask
