"""The sandbox of a session: attached while it lives, rebuilt from a workspace root where it does not."""

from __future__ import annotations

import contextlib

from runtime.config import SessionConfig
from runtime.steps.services import Services
from runtime.store import events, fleet
from runtime.store.sessions import new_id
from runtime.store.values import Attempt, Event, Owner
from sandbox import Handle, Limits, Sandbox, SandboxLost, SandboxSpec


async def open_box(
    s: Services, owner: Owner, attempt: Attempt, config: SessionConfig, root: str
) -> tuple[str, Sandbox]:
    """The session's sandbox and its id. A new one holds exactly the workspace `root`; a live one is left as it is,
    since its journal knows which calls ran, also where another node of this machine made it."""
    row = await fleet.sandbox_of(s.db, owner.session_id)
    if row is not None and row["handle"] is not None and row["driver"] == s.driver.name:
        handle = Handle.from_json(row["handle"])
        try:
            sandbox = await s.driver.attach(handle, epoch=owner.epoch)
            if row["node_id"] != s.node_id:
                await fleet.move_sandbox(s.db, row["sandbox_id"], s.node_id)
            return row["sandbox_id"], sandbox
        except SandboxLost as lost:
            await _tell(s, owner, attempt, "sandbox.lost", {"sandbox_id": row["sandbox_id"], "reason": str(lost)})
            await s.driver.release(handle)
    if row is not None:
        await fleet.close_sandbox(s.db, row["sandbox_id"])
    return await _create(s, owner, attempt, config, root)


async def _create(s: Services, owner: Owner, attempt: Attempt, config: SessionConfig, root: str) -> tuple[str, Sandbox]:
    sandbox_id = new_id("sb")
    tenant_id = attempt.session.tenant_id
    await fleet.open_sandbox(s.db, tenant_id, owner.session_id, sandbox_id, s.node_id, s.driver.name)
    limits = Limits(
        memory_bytes=config.limits.memory_bytes,
        pids=config.limits.pids,
        workspace_bytes=config.limits.workspace_bytes,
        output_bytes=config.limits.tool_output_bytes,
        call_timeout_s=config.limits.tool_timeout_s,
    )
    spec = SandboxSpec(sandbox_id, owner.session_id, tenant_id, owner.epoch, limits, s.volumes)
    handle = await s.driver.create(spec)
    try:
        sandbox = await s.driver.attach(handle, epoch=owner.epoch)
        await sandbox.restore(root, s.blobs)
        await fleet.keep_sandbox(s.db, sandbox_id, handle.to_json())
    except BaseException:
        # Not kept: the row stays `creating`, and the next attempt or the reaper removes what is left.
        with contextlib.suppress(Exception):
            await s.driver.release(handle)
        raise
    await _tell(s, owner, attempt, "sandbox.created", {"sandbox_id": sandbox_id, "driver": s.driver.name})
    return sandbox_id, sandbox


async def release_box(s: Services, session_id: str) -> bool:
    """Kill and remove the session's sandbox. True if there was one. Idempotent."""
    row = await fleet.sandbox_of(s.db, session_id)
    if row is None:
        return False
    if row["handle"] is not None:
        await s.driver.release(Handle.from_json(row["handle"]))
    await fleet.close_sandbox(s.db, row["sandbox_id"])
    return True


async def _tell(s: Services, owner: Owner, attempt: Attempt, kind: str, data: dict[str, str]) -> None:
    await events.write(s.db, owner.session_id, [Event(kind, data)], epoch=owner.epoch, step_no=attempt.step_no)
