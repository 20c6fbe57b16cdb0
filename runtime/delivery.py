"""From Postgres to Temporal: what is accepted reaches its workflow, once, however often it is sent.

A message is an update whose id is the message's id. Whatever was not consumed is sent again by `reconcile`, and a
workflow that Temporal lost is started anew: it reads the record and goes on at the step that was not completed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from datetime import timedelta

from temporalio.client import (
    Client,
    WithStartWorkflowOperation,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
    WorkflowUpdateStage,
)
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError

from runtime.store import Database
from workflows.contract import SESSIONS_QUEUE, SessionState, workflow_id
from workflows.session import SessionWorkflow

log = logging.getLogger(__name__)

RPC_TIMEOUT = timedelta(seconds=10)
RECONCILE_EVERY_S = 2.0

_UNCONSUMED = (
    # One of each session: its workflow sees by it that there are more. Those that are held take them when they go on.
    "SELECT DISTINCT ON (m.session_id) m.session_id, m.message_id, m.options ->> 'on_busy' = 'interrupt' AS interrupt"
    " FROM messages m JOIN sessions s USING (session_id)"
    " WHERE m.state = 'accepted' AND m.created_at < now() - interval '3 s' AND s.updated_at < now() - interval '3 s'"
    " AND s.state NOT IN ('paused', 'waiting', 'cancelling', 'cancelled', 'completed')"
    " ORDER BY m.session_id, m.options ->> 'on_busy' = 'interrupt' DESC, m.seq LIMIT 1000"
)
_UNAPPLIED = (
    "SELECT c.session_id, c.command_id, c.verb FROM commands c JOIN sessions s USING (session_id)"
    " WHERE c.state = 'accepted' AND c.created_at < now() - interval '3 s'"
    " AND s.state NOT IN ('cancelling', 'cancelled', 'completed') ORDER BY c.seq LIMIT 200"
)
_UNFINISHED = (
    "SELECT session_id, coalesce(ending, 'cancelled') AS how FROM sessions"
    " WHERE (state = 'cancelling' OR ending IS NOT NULL) AND state NOT IN ('cancelled', 'completed')"
    " AND updated_at < now() - interval '3 s' LIMIT 200"
)
_SILENT = (
    "SELECT session_id FROM sessions s WHERE updated_at < now() - interval '15 s'"
    " AND (state IN ('provisioning', 'thinking', 'tool_running') OR (state = 'waiting' AND EXISTS ("
    " SELECT FROM questions WHERE session_id = s.session_id AND state = 'open'"
    " AND expires_at < now() - interval '15 s'))) LIMIT 200"
)


async def deliver(client: Client, session_id: str, message_id: str, *, interrupt: bool = False) -> None:
    """Hand a message to its workflow, starting the workflow if there is none."""
    await client.start_update_with_start_workflow(
        SessionWorkflow.deliver,
        args=[message_id, interrupt],
        id=message_id,
        wait_for_stage=WorkflowUpdateStage.ACCEPTED,
        start_workflow_operation=_start(session_id),
        rpc_timeout=RPC_TIMEOUT,
    )


async def command(client: Client, session_id: str, command_id: str, verb: str) -> None:
    """Tell the workflow that a command waits in the record."""
    await client.start_update_with_start_workflow(
        SessionWorkflow.command,
        args=[command_id, verb],
        id=command_id,
        wait_for_stage=WorkflowUpdateStage.ACCEPTED,
        start_workflow_operation=_start(session_id),
        rpc_timeout=RPC_TIMEOUT,
    )


async def end(client: Client, session_id: str, how: str) -> None:
    """Tell the workflow to free what the session holds."""
    await client.start_update_with_start_workflow(
        SessionWorkflow.end,
        how,
        id=f"end-{how}",
        wait_for_stage=WorkflowUpdateStage.ACCEPTED,
        start_workflow_operation=_start(session_id),
        rpc_timeout=RPC_TIMEOUT,
    )


async def revive(client: Client, session_id: str) -> None:
    """Make sure that the session has a workflow; one that runs is left alone."""
    with contextlib.suppress(WorkflowAlreadyStartedError):
        await start(client, session_id)


async def start(client: Client, session_id: str) -> None:
    """Start a session's workflow. Raises WorkflowAlreadyStartedError where one runs."""
    await client.start_workflow(
        SessionWorkflow.run,
        SessionState(session_id),
        id=workflow_id(session_id),
        task_queue=SESSIONS_QUEUE,
        id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
        rpc_timeout=RPC_TIMEOUT,
    )


async def reconcile(client: Client, db: Database) -> None:
    """Send again whatever the record says was not taken. Every send is idempotent."""
    for row in await db.fetch(_UNCONSUMED):
        await quietly(deliver(client, row["session_id"], row["message_id"], interrupt=bool(row["interrupt"])))
    for row in await db.fetch(_UNAPPLIED):
        await quietly(command(client, row["session_id"], row["command_id"], row["verb"]))
    for row in await db.fetch(_UNFINISHED):
        await quietly(end(client, row["session_id"], row["how"]))
    for row in await db.fetch(_SILENT):
        await quietly(revive(client, row["session_id"]))


async def reconcile_forever(client: Client, db: Database) -> None:
    while True:
        try:
            await reconcile(client, db)
        except Exception:
            log.exception("reconciling failed; trying again")
        await asyncio.sleep(RECONCILE_EVERY_S)


def _start(session_id: str) -> WithStartWorkflowOperation[SessionWorkflow, str]:
    return WithStartWorkflowOperation(
        SessionWorkflow.run,
        SessionState(session_id),
        id=workflow_id(session_id),
        task_queue=SESSIONS_QUEUE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
    )


async def quietly(sending: Awaitable[None]) -> None:
    """One session that cannot be reached does not keep the others waiting."""
    try:
        await sending
    except (RPCError, WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
        log.info("not delivered yet: %s", error)
