"""What checkpoints say of the workspace."""

from __future__ import annotations

from typing import Any

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


async def first(db: Database, session_id: str) -> str | None:
    """The workspace at the session's first checkpoint."""
    row = await db.fetchrow(
        "SELECT workspace_root FROM checkpoints WHERE session_id = $1 ORDER BY step_no LIMIT 1", session_id
    )
    return str(row["workspace_root"]) if row else None


async def roots(db: Database, session_id: str, limit: int, after: int) -> list[dict[str, Any]]:
    """The workspace at each checkpoint behind a step, in their order."""
    rows = await db.fetch(
        "SELECT c.step_no, c.workspace_root, c.created_at, s.kind, s.live FROM checkpoints c"
        " JOIN steps s USING (session_id, step_no) WHERE session_id = $1 AND c.step_no > $2 ORDER BY step_no LIMIT $3",
        session_id,
        after,
        limit,
    )
    return [
        {
            "id": row["step_no"],
            "root": row["workspace_root"],
            "kind": row["kind"],
            "live": row["live"],
            "created_at": row["created_at"].isoformat(),
        }
        for row in rows
    ]
