"""Sessions that run as a tool of another one, and whose answer nobody waits for any more."""

from __future__ import annotations

import asyncpg

from runtime.store import events
from runtime.store.sessions import set_state
from runtime.store.values import Event
from workflows.states import Event as Move
from workflows.states import State

_LEFT = (
    "SELECT c.session_id, c.state FROM sessions c"
    " JOIN steps s ON s.session_id = c.parent_id AND s.step_no = c.parent_step"
    " WHERE c.parent_id = $1 AND c.parent_call IS NOT NULL AND c.ending IS NULL"
    " AND c.state NOT IN ('cancelling', 'cancelled', 'completed')"
    " AND (NOT s.live OR s.state IN ('failed', 'cancelled')) ORDER BY c.session_id FOR UPDATE OF c"
)


async def end_left_behind(connection: asyncpg.Connection, session_id: str) -> None:
    """Cancel the children of steps that will not go on. The parent's row is locked; the reconciler does the rest."""
    for row in await connection.fetch(_LEFT, session_id):
        await connection.execute("UPDATE sessions SET ending = 'cancelled' WHERE session_id = $1", row["session_id"])
        await set_state(connection, row["session_id"], State(row["state"]), Move.CANCEL)
        await events.append(connection, row["session_id"], [Event("session.cancelling")])
