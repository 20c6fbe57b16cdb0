"""Snapshots end with their session: what no open session's record names is deleted.

A snapshot is a set of blobs until the record names its root. `Services.blob_lock` is held from the first blob to the
record, and by whoever deletes, so that nothing is deleted in between, by no node of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from runtime.steps.services import Services
from sandbox import BlobMissing, BlobStore, snapshots

_ROOTS = (
    "SELECT workspace_root AS root FROM checkpoints JOIN sessions s USING (session_id) WHERE {which}"
    " UNION SELECT snapshot_before FROM tool_calls JOIN sessions s USING (session_id) WHERE {which}"
    " UNION SELECT snapshot_after FROM tool_calls JOIN sessions s USING (session_id)"
    " WHERE snapshot_after IS NOT NULL AND {which}"
    " UNION SELECT unnest(c.roots) FROM commands c JOIN sessions s USING (session_id) WHERE {which}"
    " UNION SELECT left_root FROM sandboxes JOIN sessions s USING (session_id) WHERE left_root IS NOT NULL AND {which}"
)
_OPEN = "s.state NOT IN ('cancelled', 'completed') AND s.session_id <> $1"


async def collect_session(s: Services, session_id: str) -> int:
    """Delete the blobs that only this session names; returns how many."""
    async with s.blob_lock.deleting():
        own = await s.db.fetch(_ROOTS.format(which="s.session_id = $1"), session_id)
        kept = await s.db.fetch(_ROOTS.format(which=_OPEN), session_id)
        roots = [row["root"] for row in kept]
        candidates = await asyncio.to_thread(_reachable, [row["root"] for row in own], s.blobs)
        return await asyncio.to_thread(_delete, s.blobs, candidates, roots)


async def collect_all(s: Services) -> int:
    """Delete every blob that no open session names: what a crash left. For the start of a node."""
    async with s.blob_lock.deleting():
        kept = await s.db.fetch(_ROOTS.format(which=_OPEN), "")
        await asyncio.to_thread(s.blobs.sweep)
        return await asyncio.to_thread(_delete, s.blobs, None, [row["root"] for row in kept])


def _delete(store: BlobStore, candidates: set[str] | None, kept_roots: Iterable[str]) -> int:
    """`candidates`: None for all there are."""
    dead = (set(store) if candidates is None else candidates) - _reachable(kept_roots, store)
    with store.removing(everything=candidates is None):
        for digest in dead:
            store.remove(digest)
    return len(dead)


def _reachable(roots: Iterable[str], store: BlobStore) -> set[str]:
    found: set[str] = set()
    for root in roots:
        with contextlib.suppress(BlobMissing):  # a collection that was interrupted had begun with it
            found |= snapshots.reachable(root, store)
    return found
