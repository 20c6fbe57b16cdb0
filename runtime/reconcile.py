"""Every open session has a workflow: what the record says is started again where Temporal does not have it.

Temporal decides and schedules, and Postgres is the truth, so a Temporal that was lost, or given back from an old copy,
costs nothing but this. The loop of `runtime.delivery` does the same for sessions with work, some seconds late.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from temporalio.client import Client, WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError

from runtime import delivery
from runtime.store import Database

_AT_ONCE = 8
_OPEN = (
    "SELECT s.session_id, s.state, s.ending, array(SELECT message_id FROM messages m WHERE m.session_id = s.session_id"
    " AND m.state = 'accepted' ORDER BY m.seq) AS waiting FROM sessions s"
    " WHERE s.state NOT IN ('cancelled', 'completed') ORDER BY s.created_at"
)


@dataclass
class Reconciled:
    """`open`: sessions that have not ended; of these, `not_begun` have had no message and need no workflow, `running`
    had one, `restarted` have one now, `failed` could not be reached."""

    open: int = 0
    not_begun: int = 0
    running: int = 0
    restarted: int = 0
    failed: int = 0

    def as_json(self) -> dict[str, int]:
        return dataclasses.asdict(self)


async def everything(client: Client, db: Database) -> Reconciled:
    """Start what is missing, and send again what was not taken. Repeated: a no-op."""
    rows = await db.fetch(_OPEN)
    found = Reconciled(open=len(rows))
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(row: Mapping[str, Any]) -> str:
        async with slots:
            return await _one(client, row["session_id"], row["state"], row["ending"], row["waiting"])

    for outcome in await asyncio.gather(*(one(row) for row in rows)):
        setattr(found, outcome, getattr(found, outcome) + 1)
    return found


async def _one(client: Client, session_id: str, state: str, ending: str | None, waiting: list[str]) -> str:
    if state == "created" and not waiting:
        return "not_begun"
    try:
        try:
            await delivery.start(client, session_id)
            outcome = "restarted"
        except WorkflowAlreadyStartedError:
            outcome = "running"
        if state == "cancelling":
            await delivery.end(client, session_id, ending or "cancelled")
        for message_id in waiting:
            await delivery.deliver(client, session_id, message_id)
    except (RPCError, WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError):
        return "failed"
    return outcome
