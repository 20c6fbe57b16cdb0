"""What checkpoints say of the workspace."""

from __future__ import annotations

from runtime.store import sandboxes
from runtime.store.database import Database


async def workspace(db: Database, session_id: str, step_no: int | None = None) -> str | None:
    """The root at a step's checkpoint; without a step, as the session would go on from it now. None: there is no such
    checkpoint."""
    row = await db.fetchrow(
        "SELECT workspace_root FROM checkpoints WHERE session_id = $1 AND ($2::int IS NULL OR step_no = $2)"
        " ORDER BY step_no DESC LIMIT 1",
        session_id,
        step_no,
    )
    if row is None:
        return None
    return str(row["workspace_root"]) if step_no is not None else await sandboxes.left(db, session_id, row[0])
