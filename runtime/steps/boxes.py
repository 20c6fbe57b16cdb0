"""The sandbox of a session: attached while it lives, made from a workspace root where it does not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from runtime.config import SessionConfig
from runtime.steps.services import Services
from runtime.store import events, quotas, sandboxes
from runtime.store.sessions import new_id
from runtime.store.values import Attempt, Event, Owner
from sandbox import Handle, Limits, Sandbox, SandboxLost, SandboxSpec, snapshots

LOOK_EVERY_S = 0.5
EMPTY = snapshots.pack([])[0]


async def open_box(
    s: Services, owner: Owner, attempt: Attempt, config: SessionConfig, root: str
) -> tuple[str, Sandbox]:
    """The session's sandbox and its id. A new one holds the workspace `root`, with what was still written there when
    the last one was given up; a live one is left as it is, since its journal knows which calls ran, also where another
    node of this machine made it."""
    return await attached(s, owner, attempt.step_no) or await _create(s, owner, attempt, config, root)


async def attached(s: Services, owner: Owner, step_no: int) -> tuple[str, Sandbox] | None:
    """The session's sandbox where it lives, and its id. None: there is none, nor one of which the record thinks so."""
    row = await sandboxes.of_session(s.db, owner.session_id)
    if row is None:
        return None
    if row["handle"] is not None and row["driver"] == s.driver.name:
        handle = Handle.from_json(row["handle"])
        try:
            sandbox = await s.driver.attach(handle, epoch=owner.epoch)
            if not sandbox.is_earlier or await sandboxes.has_pending(s.db, owner.session_id, row["sandbox_id"]):
                if row["node_id"] != s.node_id:
                    await sandboxes.move(s.db, row["sandbox_id"], s.node_id)
                return row["sandbox_id"], sandbox
            await sandbox.close()
            await s.driver.release(handle)
            about = {"sandbox_id": row["sandbox_id"], "reason": "its agent was of an earlier release"}
            await _tell(s, owner, step_no, "sandbox.released", about)
        except SandboxLost as lost:
            await _tell(s, owner, step_no, "sandbox.lost", {"sandbox_id": row["sandbox_id"], "reason": str(lost)})
            await s.driver.release(handle)
    await sandboxes.close(s.db, row["sandbox_id"])
    return None


async def _create(s: Services, owner: Owner, attempt: Attempt, config: SessionConfig, root: str) -> tuple[str, Sandbox]:
    await _wait_for_turn(s, owner, attempt)
    begun = time.monotonic()
    tenant_id = attempt.session.tenant_id
    limits = limits_of(config)
    spec = SandboxSpec(new_id("sb"), owner.session_id, tenant_id, owner.epoch, limits, s.volumes, image=config.image)
    # In either case the record names the sandbox as the session's before it is used.
    spare = await s.pool.take(spec)
    ready = spare is not None
    if spare is None:
        await _open(s, spec, spec.sandbox_id)
    handle, sandbox = spare or await s.pool.start(spec)
    try:
        if ready:
            await _open(s, spec, handle.sandbox_id)
        root = await sandboxes.left(s.db, owner.session_id, root)
        if not (ready and root == EMPTY):
            await sandbox.restore(root, s.blobs)
        await sandboxes.keep(s.db, handle.sandbox_id, handle.to_json())
    except BaseException:
        # Not kept: the row stays `creating`, and the next attempt or the reaper removes what is left.
        with contextlib.suppress(Exception):
            await sandbox.close()
            await s.driver.release(handle)
        raise
    about = {"sandbox_id": handle.sandbox_id, "driver": s.driver.name, "was_ready": ready}
    await _tell(
        s, owner, attempt.step_no, "sandbox.created", {**about, "ms": round((time.monotonic() - begun) * 1000, 1)}
    )
    return handle.sandbox_id, sandbox


async def _wait_for_turn(s: Services, owner: Owner, attempt: Attempt) -> None:
    """Until the tenant may have one more sandbox, in the order in which its sessions came. Others are not held up."""
    tenant_id, told = attempt.session.tenant_id, False
    try:
        while not (turn := await quotas.turn_for_sandbox(s.db, tenant_id, owner.session_id)).may:
            if not told:
                about = {"quota": "sandboxes", "used": turn.used, "limit": turn.limit}
                await _tell(s, owner, attempt.step_no, "sandbox.waiting", about)
                told = True
            await asyncio.sleep(LOOK_EVERY_S)
    except BaseException:
        with contextlib.suppress(Exception):
            await asyncio.shield(quotas.leave_queue(s.db, owner.session_id))
        raise


async def _open(s: Services, spec: SandboxSpec, sandbox_id: str) -> None:
    await sandboxes.open_one(s.db, spec.tenant_id, spec.session_id, sandbox_id, s.node_id, s.driver.name)


def limits_of(config: SessionConfig) -> Limits:
    return Limits(
        memory_bytes=config.limits.memory_bytes,
        pids=config.limits.pids,
        workspace_bytes=config.limits.workspace_bytes,
        output_bytes=config.limits.tool_output_bytes,
        call_timeout_s=config.limits.tool_timeout_s,
    )


async def release_box(s: Services, session_id: str) -> bool:
    """Kill and remove the session's sandbox. True if there was one. Idempotent."""
    row = await sandboxes.of_session(s.db, session_id)
    if row is None:
        return False
    if row["handle"] is not None:
        await s.driver.release(Handle.from_json(row["handle"]))
    await sandboxes.close(s.db, row["sandbox_id"])
    return True


async def _tell(s: Services, owner: Owner, step_no: int, kind: str, data: Mapping[str, Any]) -> None:
    await events.write(s.db, owner.session_id, [Event(kind, dict(data))], epoch=owner.epoch, step_no=step_no)
