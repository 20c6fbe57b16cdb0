"""Sandboxes whose agent is of an earlier release: it outlives the node that made it, and may be amid a call.

Such a call is followed to its end and its workspace is kept; then the sandbox is replaced. Agents say in their answer
to a ping which protocol they speak; the first one said nothing, had no secrets, and sent its tree whole.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from . import snapshots
from .blobs import BlobStore
from .client import Channel
from .errors import OperationFailed
from .spec import Snapshot

PIECE = 4 << 20


def request_of_first(request: dict[str, Any]) -> dict[str, Any]:
    """A start as the first protocol knew it, so that a call of that time is found again."""
    old = {name: value for name, value in request.items() if name not in ("secrets", "keep_background")}
    return {**old, "env": {**request["env"], **request.get("secrets", {})}}


async def snapshot(channel: Channel, store: BlobStore) -> Snapshot:
    await channel.request("freeze")
    try:
        header, _ = await channel.request("scan")
        root, folders = snapshots.pack(header["tree"])
        new = {digest: (path, size) for path, digest, size in snapshots.files(header["tree"])}
        for digest, (path, size) in new.items():
            if not store.has(digest):
                await asyncio.to_thread(store.put, await _file(channel, path, size, digest))
        await asyncio.to_thread(store.put_many, list(folders.values()))
        return Snapshot(root)
    finally:
        await channel.request("thaw")


async def _file(channel: Channel, path: str, size: int, digest: str) -> bytes:
    data = bytearray()
    while len(data) < size:
        _, body = await channel.request("read", items=[[path, len(data), PIECE]])
        if not body:
            break
        data += body
    if hashlib.sha256(data).hexdigest() != digest:
        raise OperationFailed(f"{path} changed while the workspace was read")
    return bytes(data)
