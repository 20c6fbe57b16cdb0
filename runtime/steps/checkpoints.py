"""What a step's checkpoint names."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from runtime.steps.services import Services
from runtime.store.database import Database
from runtime.store.values import Checkpoint


def digest(token_ids: Sequence[int]) -> bytes:
    """sha256 over the token ids as little-endian uint32."""
    words = array("I", token_ids)
    assert words.itemsize == 4
    return hashlib.sha256(words.tobytes()).digest()


async def make(
    s: Services,
    session_id: str,
    token_ids: Sequence[int],
    workspace_root: str,
    pages: Sequence[str] | None = None,
) -> Checkpoint:
    """A checkpoint over the whole transcript `token_ids`.

    `pages`: keys (hex) of the session's pages now, after a think. Steps that compute nothing pass None and carry
    the last think's tail.
    """
    keys = [bytes.fromhex(k) for k in pages or ()]
    known = await _named_so_far(s.db, session_id) if keys else set()
    tail = keys[-1] if keys else await _last_tail(s.db, session_id)
    return Checkpoint(
        token_count=len(token_ids),
        token_digest=digest(token_ids),
        fingerprint=s.engine.card.fingerprint,
        kv_tail=tail,
        kv_new=[key for key in keys if key not in known],
        workspace_root=workspace_root,
    )


async def workspace_root(s: Services, session_id: str) -> str:
    """The workspace of the last completed step; an empty one before the first."""
    row = await s.db.fetchrow(
        "SELECT workspace_root FROM checkpoints WHERE session_id = $1 ORDER BY step_no DESC LIMIT 1",
        session_id,
    )
    return row["workspace_root"] if row else ""


async def _named_so_far(db: Database, session_id: str) -> set[bytes]:
    rows = await db.fetch("SELECT unnest(kv_new) AS key FROM checkpoints WHERE session_id = $1", session_id)
    return {row["key"] for row in rows}


async def _last_tail(db: Database, session_id: str) -> bytes | None:
    row = await db.fetchrow(
        "SELECT kv_tail FROM checkpoints WHERE session_id = $1 ORDER BY step_no DESC LIMIT 1", session_id
    )
    return row["kv_tail"] if row else None
