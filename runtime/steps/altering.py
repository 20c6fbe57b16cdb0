"""Changes of a workspace from outside, at the node that holds the session, between its steps.

Files are put and removed in the snapshot, and a sandbox that lives is made equal to it without ending what runs in it;
where none lives, none is made. A command runs in the session's sandbox as a call of its own key: a sandbox that is
still there when a node comes back knows whether it ran. Of one that is gone nobody does, and it is not run again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
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
    BlobStore,
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


class _Overlay:
    """A store over another one: what is put stays in memory until it is known to be wanted."""

    def __init__(self, below: BlobStore) -> None:
        self._below = below
        self._new: dict[str, bytes] = {}

    def get(self, digest: str) -> bytes:
        return self._new[digest] if digest in self._new else self._below.get(digest)

    def put_many(self, blobs: Iterable[bytes]) -> None:
        self._new |= {hashlib.sha256(one).hexdigest(): one for one in blobs}

    def keep(self, root: str) -> None:
        """Durable when it returns: what the root needs, folders after what is in them. Blocking."""
        wanted = snapshots.reachable(root, self)
        self._below.put_many(data for digest, data in self._new.items() if digest in wanted)


async def _files(s: Services, owner: Owner, attempt: Attempt, asked: Asked, config: SessionConfig) -> None:
    """Files in or out. Raises BadPath, NotFound, Conflict; SandboxUsageError for an archive that is refused."""
    box = await attached(s, owner, attempt.step_no)
    over = _Overlay(s.blobs)
    try:
        async with s.blob_lock:
            base, _ = await checkpoints.last(s.db, owner.session_id)
            base = base or await asyncio.to_thread(snapshots.seed, _contents(config), over)
            if box is None:
                now = await sandboxes.left(s.db, owner.session_id, base)
            else:
                now = str(await box[1].snapshot(s.blobs))
                await alterations.note_root(s.db, asked, now)
            after, told = await asyncio.to_thread(_edit, over, asked, base, now)
            await asyncio.to_thread(_ensure_room, over, config, after)
            await asyncio.to_thread(over.keep, after)
            if box is not None:
                await box[1].restore(after, s.blobs, spare=True)
            await alterations.settle(s.db, owner, asked, Made(after, told), s.engine.card.fingerprint)
    finally:
        if box is not None:
            await box[1].close()


def _contents(config: SessionConfig) -> dict[str, bytes]:
    return {name: text.encode() for name, text in config.files.items()}


def _edit(over: _Overlay, asked: Asked, base: str, now: str) -> tuple[str, dict[str, Any]]:
    """The workspace after the change, and what is told of it. Blocking."""
    work = {"write": _write, "remove": _remove, "unpack": _unpack}[asked.verb]
    return work(over, asked, base, now)


def _write(over: _Overlay, asked: Asked, _: str, now: str) -> tuple[str, dict[str, Any]]:
    path, data = asked.argument["path"], asked.body
    kind, blob = snapshots.form(data)
    over.put_many([blob])
    leaf = [kind, asked.argument["mode"], hashlib.sha256(blob).hexdigest(), len(data)]
    after = _put(over, workspaces.edited(over, now, put={path: leaf}))
    return after, {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _remove(over: _Overlay, asked: Asked, base: str, now: str) -> tuple[str, dict[str, Any]]:
    path = asked.argument["path"]
    try:
        after = _put(over, workspaces.edited(over, now, remove=path))
    except NotFound:
        workspaces.edited(over, base, remove=path)  # it is gone since: by an attempt at this that was lost
        after = now
    return after, {"path": path}


def _unpack(over: _Overlay, asked: Asked, _: str, now: str) -> tuple[str, dict[str, Any]]:
    came = seed_tar(asked.body, over)
    files, size = workspaces.size_bytes(over, came)
    return _put(over, workspaces.overlaid(over, now, came)), {"files": files, "size": size}


def _put(over: _Overlay, edited: tuple[str, dict[str, bytes]]) -> str:
    root, folders = edited
    over.put_many(folders.values())
    return root


def _ensure_room(over: _Overlay, config: SessionConfig, root: str) -> None:
    """Raises Conflict where the session's limits do not allow so much."""
    files, size = workspaces.size_bytes(over, root)
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
        base, _ = await checkpoints.last(s.db, owner.session_id)
        if not base:
            base = await asyncio.to_thread(snapshots.seed, _contents(config), s.blobs)
            await alterations.note_root(s.db, asked, base)
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
