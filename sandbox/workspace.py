"""Files, snapshots and restores over a channel to an agent."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from . import snapshots
from .blobs import BlobStore
from .client import Channel
from .errors import BadPath, OperationFailed, SandboxFailure
from .snapshots import Tree
from .spec import Entry

PIECE = 4 << 20
BATCH_FILES = 512


async def put(channel: Channel, path: str, data: bytes, mode: int) -> None:
    view = memoryview(data)
    first = True
    while first or view:
        piece, view = view[:PIECE], view[PIECE:]
        await channel.request("put", bytes(piece), path=path, mode=mode, first=first, last=not view)
        first = False


async def get(channel: Channel, path: str) -> bytes:
    """Raises OperationFailed if the file changed while it was read."""
    data = bytearray()
    signature = None
    while True:
        header, body = await channel.request("read", items=[[path, len(data), PIECE]])
        seen, _, size, _ = header["found"][0]
        data += body
        if signature not in (None, seen):
            raise OperationFailed(f"{path} changed while it was read; read it again")
        signature = seen
        if len(data) >= size or not body:
            return bytes(data)


async def listing(channel: Channel, path: str) -> list[Entry]:
    header, _ = await channel.request("list", path=path)
    return [Entry(*entry) for entry in header["entries"]]


async def snapshot(channel: Channel, store: BlobStore) -> str:
    """Stops all tools, stores what is new in the workspace, wakes them; returns the root's hash."""
    await channel.request("freeze")
    try:
        header, _ = await channel.request("scan")
        tree: Tree = header["tree"]
        root, folders = snapshots.pack(tree)
        missing = await asyncio.to_thread(_missing, tree, store)
        for batch in _batches(missing):
            blobs = await _read_batch(channel, batch)
            await asyncio.to_thread(store.put_many, blobs)
        await asyncio.to_thread(store.put_many, list(folders.values()))
        return root
    finally:
        await channel.request("thaw")


def _missing(tree: Tree, store: BlobStore) -> list[tuple[str, str, int]]:
    new = {digest: (path, digest, size) for path, digest, size in snapshots.files(tree)}
    return [item for digest, item in new.items() if not store.has(digest)]


def _batches(items: list[tuple[str, str, int]]) -> Iterator[list[tuple[str, str, int]]]:
    batch: list[tuple[str, str, int]] = []
    room = PIECE
    for item in items:
        if batch and (item[2] > room or len(batch) == BATCH_FILES):
            yield batch
            batch, room = [], PIECE
        batch.append(item)
        room -= item[2]
    if batch:
        yield batch


async def _read_batch(channel: Channel, batch: list[tuple[str, str, int]]) -> list[bytes]:
    if len(batch) == 1:
        blobs = [await get(channel, batch[0][0])]
    else:
        header, body = await channel.request("read", items=[[path, 0, size] for path, _, size in batch])
        blobs, at = [], 0
        for _, length, _, _ in header["found"]:
            blobs.append(body[at : at + length])
            at += length
    for (path, digest, _), data in zip(batch, blobs, strict=True):
        if hashlib.sha256(data).hexdigest() != digest:
            raise OperationFailed(f"{path} changed while the workspace was read")
    return blobs


async def restore(channel: Channel, root: str, store: BlobStore) -> list[str]:
    """Makes the workspace equal to `root`, nothing merged. Kills all tools first and returns who they were."""
    want = await asyncio.to_thread(snapshots.load, root, store)
    header, _ = await channel.request("killall")
    killed: list[str] = header["killed"]
    await channel.request("freeze")  # nothing is left to freeze, but starts wait
    try:
        steps, modes = snapshots.changes(await _scan_or_empty(channel), want)
        batches = _with_bodies([*steps, *modes], store)
        while (found := await asyncio.to_thread(next, batches, None)) is not None:
            batch, body = found
            if len(body) > PIECE:
                await put(channel, batch[0][1], body, batch[0][2])
            else:
                await channel.request("apply", body, steps=batch)
        check, _ = await channel.request("scan")
    finally:
        await channel.request("thaw")
    got, _ = snapshots.pack(check["tree"])
    if got != root:
        raise SandboxFailure(f"the workspace is {got} after restoring {root}; release this sandbox and make a new one")
    return killed


async def _scan_or_empty(channel: Channel) -> Tree:
    """What is there now; a tree too deep to be read is removed, since a restore must work whatever a tool made."""
    try:
        scanned, _ = await channel.request("scan")
    except BadPath:
        steps = [["rm", entry.name] for entry in await listing(channel, "/work")]
        await channel.request("apply", steps=steps)
        return []
    tree: Tree = scanned["tree"]
    return tree


def _with_bodies(steps: Iterable[list[Any]], store: BlobStore) -> Iterator[tuple[list[list[Any]], bytes]]:
    """Batches of steps with the bytes of their files; a file larger than a batch comes alone."""
    batch: list[list[Any]] = []
    body = bytearray()
    for step in steps:
        data = store.get(step[4]) if step[0] == "file" else b""
        if batch and (len(body) + len(data) > PIECE or len(batch) == BATCH_FILES):
            yield batch, bytes(body)
            batch, body = [], bytearray()
        batch.append(step[:4])
        body += data
    if batch:
        yield batch, bytes(body)
