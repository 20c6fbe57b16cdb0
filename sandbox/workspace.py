"""Files, snapshots and restores over a channel to an agent."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from . import snapshots
from .blobs import BlobStore
from .client import Channel
from .errors import OperationFailed, SandboxFailure
from .looking import Look, New
from .snapshots import Tree
from .spec import Entry, Restored, Snapshot

PIECE = 4 << 20
BATCH_FILES = 512
RUN = struct.Struct(">QQ")


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


async def snapshot(channel: Channel, store: BlobStore, verify: bool = False) -> Snapshot:
    """Stops all tools, stores what is new in the workspace, wakes them. Folders are stored after what is in them."""
    await channel.request("freeze")
    try:
        look = await Look.of(channel, verify)
        new = New(look, store)
        while missing := await asyncio.to_thread(new.find):
            await look.fetch(missing)
        blobs: list[bytes] = []
        for batch in batches(new.files):
            blobs += await read_batch(channel, batch)
            if len(blobs) > BATCH_FILES or sum(map(len, blobs)) > PIECE:
                await asyncio.to_thread(store.put_many, blobs)
                blobs = []
    finally:
        await channel.request("thaw")
    await asyncio.to_thread(store.put_many, [*blobs, *new.folders()])
    return Snapshot(look.root, look.left_out, look.stale)


Batch = list[tuple[str, str, str, int]]  # hash, path, kind, size


def batches(files: Mapping[str, tuple[str, str, int]]) -> Iterator[Batch]:
    batch: Batch = []
    room = PIECE
    for digest, (path, kind, size) in files.items():
        if batch and (kind == "s" or size > room or len(batch) == BATCH_FILES):
            yield batch
            batch, room = [], PIECE
        batch.append((digest, path, kind, size))
        room = -1 if kind == "s" else room - size
    if batch:
        yield batch


async def read_batch(channel: Channel, batch: Batch) -> list[bytes]:
    if batch[0][2] == "s":
        blobs = [await _runs(channel, batch[0][1], batch[0][3])]
    elif len(batch) == 1:
        blobs = [await get(channel, batch[0][1])]
    else:
        header, body = await channel.request("read", items=[[path, 0, size] for _, path, _, size in batch])
        blobs, at = [], 0
        for _, length, _, _ in header["found"]:
            blobs.append(body[at : at + length])
            at += length
    for (digest, path, _, _), data in zip(batch, blobs, strict=True):
        if hashlib.sha256(data).hexdigest() != digest:
            raise OperationFailed(f"{path} changed while the workspace was read")
    return blobs


async def _runs(channel: Channel, path: str, size: int) -> bytes:
    data, offset = bytearray(), 0
    while offset < size:
        header, body = await channel.request("runs", path=path, offset=offset)
        data += body
        offset = header["next"]
    return bytes(data)


async def restore(channel: Channel, root: str, store: BlobStore, *, spare: bool = False) -> Restored:
    """Makes the workspace equal to `root`, nothing merged. Kills all tools first and returns who they were; with
    `spare` it stops them instead, and wakes them in the end."""
    want = await asyncio.to_thread(snapshots.load, root, store)
    killed: list[str] = [] if spare else (await channel.request("killall"))[0]["killed"]
    await channel.request("freeze")  # where nothing is left to freeze, starts wait
    try:
        look = await Look.of(channel)
        bare: set[str] = set()
        if look.root != root or look.others:
            steps, modes = snapshots.changes(await look.tree(), want)
            await asyncio.to_thread(_check, steps, store)
            steps = [*(["rm", path] for path in look.others), *steps, *modes]
            bare = await _apply(channel, steps, store)
            look = await Look.of(channel)
            if look.root != root:
                await _must_be(look, root, await asyncio.to_thread(snapshots.load, root, store), store, bare)
    finally:
        await channel.request("thaw")
    why = "extended attributes, which the file system here does not have"
    return Restored(killed, [f"{path}: {why}" for path in sorted(bare)])


async def _apply(channel: Channel, steps: list[list[Any]], store: BlobStore) -> set[str]:
    """The next batch is read while the agent works on one. Returns the paths whose attributes could not be set."""
    bare: set[str] = set()
    batches = _with_bodies(steps, store)
    found = await asyncio.to_thread(next, batches, None)
    while found is not None:
        batch, body = found
        (header, _), found = await asyncio.gather(
            channel.request("apply", body, steps=batch), asyncio.to_thread(next, batches, None)
        )
        bare |= set(header["bare"])
    return bare


def _check(steps: list[list[Any]], store: BlobStore) -> None:
    """Before anything is removed. Raises BlobMissing, BlobCorrupt."""
    for digest in {step[4] for step in steps if step[0] in ("file", "sparse")}:
        if not store.has(digest):
            store.get(digest)  # another process may have promised it, and ended before it was in its place


async def _must_be(look: Look, root: str, want: Tree, store: BlobStore, bare: set[str]) -> None:
    """Where another root came of it, the reasons must be ours: files kept in an older form, attributes without a home.

    Raises SandboxFailure.
    """
    todo = [("", want, await look.tree())]
    while todo:
        prefix, wanted, found = todo.pop()
        there = {entry[0]: entry for entry in found}
        for entry in wanted:
            path, other = prefix + entry[0], there.get(entry[0], ["", ""])
            if path in bare:
                del entry[4 if entry[1] == "d" else 5 :]
            if entry[1] == other[1] == "d":
                todo.append((path + "/", entry[3], other[3]))
            elif entry[1] == "f" and other[1] == "s":
                blob = snapshots.sparse(await asyncio.to_thread(store.get, entry[3]))
                entry[1], entry[3] = "s", hashlib.sha256(blob).hexdigest()
    if snapshots.pack(want)[0] != look.root:
        raise SandboxFailure(
            f"the workspace is {look.root} after restoring {root}; release this sandbox and make a new one"
        )


def _with_bodies(steps: list[list[Any]], store: BlobStore) -> Iterator[tuple[list[list[Any]], bytes]]:
    """Batches of steps as the agent takes them, with the bytes of their files."""
    batch: list[list[Any]] = []
    body = bytearray()
    for step, data in _in_pieces(steps, store):
        if batch and (len(body) + len(data) > PIECE or len(batch) == BATCH_FILES):
            yield batch, bytes(body)
            batch, body = [], bytearray()
        batch.append(step)
        body += data
    if batch:
        yield batch, bytes(body)


def _in_pieces(steps: list[list[Any]], store: BlobStore) -> Iterator[tuple[list[Any], memoryview]]:
    for step in steps:
        kind, path, *rest = step
        if kind == "file":
            data = memoryview(store.get(rest[2]))
            yield ["file", path, rest[0], len(data[:PIECE])], data[:PIECE]
            for at in range(PIECE, len(data), PIECE):
                yield ["more", path, at, len(data[at : at + PIECE])], data[at : at + PIECE]
        elif kind == "sparse":
            yield ["file", path, rest[0], 0], memoryview(b"")
            yield from _of_runs(path, memoryview(store.get(rest[2])))
            yield ["more", path, rest[1], 0], memoryview(b"")  # to its full length
        else:
            yield step, memoryview(b"")


def _of_runs(path: str, blob: memoryview) -> Iterator[tuple[list[Any], memoryview]]:
    at = 0
    while at < len(blob):
        start, length = RUN.unpack_from(blob, at)
        at += RUN.size
        yield ["more", path, start, length], blob[at : at + length]
        at += length
