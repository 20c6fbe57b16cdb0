"""What a step's checkpoint names."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from engine import ModelCard
from runtime.store.database import Database
from runtime.store.values import Checkpoint


def digest(token_ids: Sequence[int]) -> bytes:
    """sha256 over the token ids as little-endian uint32."""
    words = array("I", token_ids)
    assert words.itemsize == 4
    return hashlib.sha256(words.tobytes()).digest()


@dataclass(frozen=True)
class Base:
    """What the checkpoints so far say: the workspace, the last page, and every page that one of them named."""

    workspace_root: str
    tail: bytes | None
    named: frozenset[bytes]


async def base(db: Database, session_id: str) -> Base:
    """The workspace is that of the last completed step; an empty one before the first."""
    at, named = await asyncio.gather(last(db, session_id), _named_so_far(db, session_id))
    return Base(*at, named)


def carried(card: ModelCard, token_ids: Sequence[int], workspace_root: str, tail: bytes | None) -> Checkpoint:
    """A checkpoint over the whole transcript, of a step that computed nothing. `tail`: that of the last think."""
    return _checkpoint(card, token_ids, workspace_root, tail, ())


def after_think(card: ModelCard, token_ids: Sequence[int], base: Base, pages: Sequence[str]) -> Checkpoint:
    """A checkpoint over the whole transcript. `pages`: keys (hex) of the session's pages now."""
    keys = [bytes.fromhex(key) for key in pages]
    new = [key for key in keys if key not in base.named]
    return _checkpoint(card, token_ids, base.workspace_root, keys[-1] if keys else base.tail, new)


def _checkpoint(
    card: ModelCard, token_ids: Sequence[int], root: str, tail: bytes | None, new: Sequence[bytes]
) -> Checkpoint:
    return Checkpoint(len(token_ids), digest(token_ids), card.fingerprint, tail, new, root)


async def last(db: Database, session_id: str) -> tuple[str, bytes | None]:
    """The workspace of the last completed step, an empty one before the first, and the last think's tail."""
    row = await db.fetchrow(
        "SELECT workspace_root, kv_tail FROM checkpoints WHERE session_id = $1 ORDER BY step_no DESC LIMIT 1",
        session_id,
    )
    return (row["workspace_root"], row["kv_tail"]) if row else ("", None)


async def _named_so_far(db: Database, session_id: str) -> frozenset[bytes]:
    rows = await db.fetch("SELECT unnest(kv_new) AS key FROM checkpoints WHERE session_id = $1", session_id)
    return frozenset(row["key"] for row in rows)
