"""Sandboxes whose agent is of an earlier release: it outlives the node that made it, and may be amid a call.

Such a call is followed to its end and its workspace is kept; then the sandbox is replaced. Agents say in their answer
to a ping which protocol they speak; the first one said nothing, had no secrets, and sent its tree whole.
"""

from __future__ import annotations

import asyncio
from typing import Any

from . import snapshots, workspace
from .blobs import BlobStore
from .client import Channel
from .spec import Snapshot


def request_of_first(request: dict[str, Any]) -> dict[str, Any]:
    """A start as the first protocol knew it, so that a call of that time is found again."""
    old = {name: value for name, value in request.items() if name not in ("secrets", "keep_background")}
    return {**old, "env": {**request["env"], **request.get("secrets", {})}}


async def snapshot(channel: Channel, store: BlobStore) -> Snapshot:
    await channel.request("freeze")
    try:
        header, _ = await channel.request("scan")
        root, folders = snapshots.pack(header["tree"])
        files = snapshots.files(header["tree"])
        new = {digest: (path, "f", size) for path, digest, size in files if not store.has(digest)}
        for batch in workspace.batches(new):
            await asyncio.to_thread(store.put_many, await workspace.read_batch(channel, batch))
        await asyncio.to_thread(store.put_many, list(folders.values()))
        return Snapshot(root)
    finally:
        await channel.request("thaw")
