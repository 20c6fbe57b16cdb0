"""Changes of a workspace from outside, at the node that holds the session, between its steps.

Files are put and removed in the snapshot, and a sandbox that lives is made equal to it without ending what runs in it;
where none lives, none is made. A command runs in the session's sandbox as a call of its own key: a sandbox that is
still there when a node comes back knows whether it ran. Of one that is gone nobody does, and it is not run again.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from runtime import workspaces
from runtime.config import SessionConfig
from runtime.errors import Conflict, InvalidRequest, NotFound, RequestError
from runtime.steps import checkpoints
from runtime.steps.boxes import attached, open_box
from runtime.steps.services import Services
from runtime.steps.way_out import WayOut
from runtime.store import alterations, sandboxes
from runtime.store.alterations import Asked, Made
from runtime.store.values import Attempt, Event, Owner, Session
from sandbox import (
    BlobCorrupt,
    BlobMissing,
    OperationFailed,
    Result,
    Sandbox,
    SandboxLost,
    SandboxUsageError,
    Snapshot,
    StaleEpoch,
    seed_tar,
    snapshots,
)
from sandbox.spec import MAX_FILES
from workflows.contract import StepIn

OUTPUT_BYTES = 262_144


async def alter(s: Services, what: StepIn) -> bool:
    """Make the changes that are asked for, in order, up to the first command of another kind; True if there is one."""
    owner = s.owner(what.session_id, what.epoch)
    while True:
        session, asked, other = await alterations.next_one(s.db, owner)
        if asked is None:
            return other
        try:
            await alterations.check(s.db, owner.session_id)
            await _one(s, owner, session, asked)
        except StaleEpoch:
            raise
        except (RequestError, SandboxUsageError, OperationFailed, BlobMissing, BlobCorrupt) as refusal:
            known = refusal if isinstance(refusal, RequestError) else _as_request(refusal)
            await alterations.refuse(s.db, owner.session_id, asked.command_id, str(refusal), known.as_told())


def _as_request(error: Exception) -> RequestError:
    """What a sandbox refuses is the caller's fault, or something that the workspace does not have."""
    missing = isinstance(error, BlobMissing | BlobCorrupt)
    return (Conflict if missing else InvalidRequest)(str(error))


async def _one(s: Services, owner: Owner, session: Session, asked: Asked) -> None:
    config = SessionConfig.model_validate(session.config)
    row = await s.db.fetchrow("SELECT max(step_no) AS last FROM steps WHERE session_id = $1", owner.session_id)
    step_no = 1 + (row["last"] or 0 if row else 0)
    work = _exec if asked.verb == "exec" else _files
    await work(s, owner, Attempt(session, step_no, 1, 0, (), None), asked, config)


async def _workspace(s: Services, owner: Owner, config: SessionConfig) -> str:
    """As the last checkpoint has it; before the first, the session's files. The lock of the blobs is held."""
    root, _ = await checkpoints.last(s.db, owner.session_id)
    files = {name: text.encode() for name, text in config.files.items()}
    return root or await asyncio.to_thread(snapshots.seed, files, s.blobs)


async def _files(s: Services, owner: Owner, attempt: Attempt, asked: Asked, config: SessionConfig) -> None:
    """Files in or out. Raises BadPath, NotFound, Conflict; SandboxUsageError for an archive that is refused."""
    box = await attached(s, owner, attempt.step_no)
    try:
        async with s.blob_lock:
            base = await _workspace(s, owner, config)
            now = str(await box[1].snapshot(s.blobs)) if box else await sandboxes.left(s.db, owner.session_id, base)
            after, told = await asyncio.to_thread(_edit, s, asked, base, now)
            await asyncio.to_thread(_ensure_room, s, config, after)
            if box is not None:
                await box[1].restore(after, s.blobs, spare=True)
            await alterations.settle(s.db, owner, asked, Made(after, told), s.engine.card.fingerprint)
    finally:
        if box is not None:
            await box[1].close()


def _edit(s: Services, asked: Asked, base: str, now: str) -> tuple[str, dict[str, Any]]:
    """The workspace after the change, in the store, and what is told of it. Blocking."""
    work = {"write": _write, "remove": _remove, "unpack": _unpack}[asked.verb]
    return work(s, asked, base, now)


def _write(s: Services, asked: Asked, _: str, now: str) -> tuple[str, dict[str, Any]]:
    path, data = asked.argument["path"], asked.body
    kind, blob = snapshots.form(data)
    leaf = [kind, asked.argument["mode"], s.blobs.put(blob), len(data)]
    after = _stored(s, workspaces.edited(s.blobs, now, put={path: leaf}))
    return after, {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _remove(s: Services, asked: Asked, base: str, now: str) -> tuple[str, dict[str, Any]]:
    path = asked.argument["path"]
    try:
        after = _stored(s, workspaces.edited(s.blobs, now, remove=path))
    except NotFound:
        workspaces.edited(s.blobs, base, remove=path)  # it is gone since: by an attempt at this that was lost
        after = now
    return after, {"path": path}


def _unpack(s: Services, asked: Asked, _: str, now: str) -> tuple[str, dict[str, Any]]:
    over = seed_tar(asked.body, s.blobs)
    files, size = workspaces.size_bytes(s.blobs, over)
    return _stored(s, workspaces.overlaid(s.blobs, now, over)), {"files": files, "size": size}


def _stored(s: Services, edited: tuple[str, dict[str, bytes]]) -> str:
    root, folders = edited
    s.blobs.put_many(folders.values())
    return root


def _ensure_room(s: Services, config: SessionConfig, root: str) -> None:
    """Raises Conflict where the session's limits do not allow so much."""
    files, size = workspaces.size_bytes(s.blobs, root)
    most = config.limits.workspace_bytes
    if size > most or files > MAX_FILES:
        raise Conflict(
            f"the workspace would have {files} files of {size} bytes; the session's limits are {MAX_FILES} files and"
            f" {most} bytes (limits.workspace_bytes)",
            code="workspace_full",
        )


async def _exec(s: Services, owner: Owner, attempt: Attempt, asked: Asked, config: SessionConfig) -> None:
    """Run a command, or find what became of it. Raises SandboxLost, after which it is not run again."""
    async with s.blob_lock:
        base = await _workspace(s, owner, config)
        sandbox_id, sandbox = await open_box(s, owner, attempt, config, base)
    way_out = WayOut(s, owner, attempt.step_no, config)
    try:
        result = None
        if asked.started_in in (None, sandbox_id):
            await way_out.open(sandbox)
            await alterations.note_start(s.db, owner, asked, sandbox_id)
            result = await _run(sandbox, owner, asked)
            await way_out.tell()
        async with s.blob_lock:
            taken = await sandbox.snapshot(s.blobs)
            await alterations.settle(s.db, owner, asked, _ran(asked, taken, result), s.engine.card.fingerprint)
    finally:
        await way_out.close()
        await sandbox.close()


async def _run(sandbox: Sandbox, owner: Owner, asked: Asked) -> Result:
    call = await sandbox.start(
        f"{owner.session_id}/{asked.command_id}",
        asked.argument["command"],
        epoch=owner.epoch,
        stdin=asked.body,
        timeout_s=asked.argument["timeout_s"],
        output_bytes=OUTPUT_BYTES,
    )
    result = await call.result()
    if result.reason == "lost":
        raise SandboxLost("the sandbox went away while the command ran in it")
    return result


def _ran(asked: Asked, root: Snapshot, result: Result | None) -> Made:
    """None: it was begun in a sandbox that is gone, and nobody knows how it ended."""
    if result is None:
        told: dict[str, Any] = {"exit": None, "reason": "outcome_unknown", "output_truncated": False}
        output = b""
    else:
        code = result.code if result.reason in ("exit", "signal") else None
        told = {"exit": code, "reason": result.reason, "output_truncated": result.truncated}
        told["duration_s"] = round(result.duration_s, 3)
        output = result.output
    told["not_kept"] = list(root.left_out[:20])
    preview = output[:2000].decode("utf-8", "replace")
    settled = Event("exec.settled", {"command_id": asked.command_id, **told, "preview": preview})
    return Made(str(root), told, output, (settled,))
