"""Sandboxes that wait for nobody: those kept ready, and those that a session has not used for a while.

A sandbox in which nothing runs is snapshotted once more, since a process that was left in the background may have
written after the last call, and goes; the next call gets another one with the same files. Where something runs (a
server that a call left behind), it may be what the session waits for, and is given more time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from runtime.config import SessionConfig
from runtime.errors import StaleEpoch
from runtime.steps import checkpoints
from runtime.steps.boxes import limits_of
from runtime.steps.services import Services
from runtime.store import Database, events, sandboxes
from runtime.store.values import Event
from sandbox import Driver, Handle, SandboxError, SandboxLost, SandboxSpec, SandboxUsageError, Volume

log = logging.getLogger(__name__)

BUSY_TIMES = 15  # a sandbox in which something runs may be idle so many times longer


@dataclass(frozen=True)
class SpareBook:
    """Spares in the record, where the reapers of other nodes see them."""

    db: Database
    node_id: str
    boot: str

    async def announce(self, sandbox_id: str) -> None:
        await sandboxes.announce_spare(self.db, sandbox_id, self.node_id, self.boot)

    async def withdraw(self, sandbox_id: str) -> None:
        await sandboxes.withdraw_spare(self.db, sandbox_id)


def usual_spec(volumes: tuple[Volume, ...]) -> SandboxSpec:
    """What the sandbox of a session is that asks for nothing special."""
    return SandboxSpec("spare", "spare", "spare", 0, limits_of(SessionConfig(model="any")), volumes)


async def release_idle(s: Services, idle_s: float) -> int:
    """Releases this node's sandboxes that nobody has used for so long; returns how many.

    Of another backend, which this node was started with before, there is only the record: no session would use them.
    """
    released = 0
    for row in await sandboxes.idle(s.db, s.node_id, idle_s):
        handle = Handle.from_json(row["handle"])
        ours = handle.driver == s.driver.name
        patient = row["idle_s"] < idle_s * BUSY_TIMES
        if not await (_give_up(s, row, handle, patient) if ours else _forget(s, row)):
            continue  # something runs in it, or it has been taken up again
        released += 1
        if ours:
            await release(s.driver, handle)
        await _tell(s, row)
    return released


async def _give_up(s: Services, row: dict[str, Any], handle: Handle, patient: bool) -> bool:
    """In the record, with the workspace as it is now: what was left in the background may have written since."""
    try:
        sandbox = await s.driver.attach(handle, epoch=row["epoch"])
    except SandboxLost:
        return await _forget(s, row)
    except (SandboxError, SandboxUsageError):
        return False  # a newer holder has it
    try:
        if patient and await sandbox.busy() > 0:
            return False
        base, _ = await checkpoints.last(s.db, row["session_id"])
        async with s.blob_lock:
            root = str(await sandbox.snapshot(s.blobs))
            left = None if root == base else root
            return await sandboxes.give_up(s.db, row["session_id"], row["epoch"], base, left) is not None
    except SandboxError as error:
        log.warning("the idle sandbox of %s is kept: %s", row["session_id"], error)
        return False
    finally:
        await sandbox.close()


async def _forget(s: Services, row: dict[str, Any]) -> bool:
    return await sandboxes.give_up(s.db, row["session_id"], row["epoch"]) is not None


async def release(driver: Driver, handle: Handle) -> None:
    try:
        await driver.release(handle)
    except SandboxError as error:
        log.warning("the sandbox of %s is left to the reaper: %s", handle.session_id, error)


async def _tell(s: Services, row: dict[str, Any]) -> None:
    about = {"sandbox_id": row["sandbox_id"], "reason": "idle", "idle_s": round(row["idle_s"], 1)}
    event = Event("sandbox.released", about)
    try:
        await s.db.run(lambda c: events.append(c, row["session_id"], [event], epoch=row["epoch"]))
    except StaleEpoch:
        return  # it has moved on already
