"""The lock over the store of snapshots, between processes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from runtime.errors import Unavailable
from runtime.steps import blob_lock
from runtime.steps.blob_lock import BlobLock

HOLD = """\
import asyncio, sys
from pathlib import Path
from runtime.steps.blob_lock import BlobLock

async def main():
    lock = BlobLock(Path(sys.argv[1]))
    async with lock.deleting() if sys.argv[2] == "deleting" else lock:
        print("held", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def holder(path: Path, how: str) -> asyncio.subprocess.Process:
    """Another process that holds the lock."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLD, str(path), how, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"held\n"
    return process


async def entered(context: object) -> None:
    async with context:  # type: ignore[attr-defined]
        pass


async def test_many_write_at_once_and_nobody_deletes_meanwhile(tmp_path: Path) -> None:
    lock = BlobLock(tmp_path / "lock")
    async with lock, BlobLock(tmp_path / "lock"), lock:
        deleting = asyncio.create_task(entered(lock.deleting()))
        await asyncio.wait([deleting], timeout=0.05)
        assert not deleting.done()
    await deleting


async def test_who_waits_to_delete_is_not_kept_out_by_writers_that_come_later(tmp_path: Path) -> None:
    lock = BlobLock(tmp_path / "lock")
    order: list[str] = []

    async def delete() -> None:
        async with lock.deleting():
            order.append("deleted")

    async def write() -> None:
        async with lock:
            order.append("written")

    async with lock:
        deleting = asyncio.create_task(delete())
        await asyncio.wait([deleting], timeout=0.02)
        writing = asyncio.create_task(write())
        await asyncio.wait([writing], timeout=0.02)
    await asyncio.gather(deleting, writing)
    assert order == ["deleted", "written"]


@pytest.mark.parametrize("how", ["deleting", "writing"])
async def test_what_a_killed_process_held_is_free(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    other = await holder(path, how)
    with monkeypatch.context() as impatient:
        impatient.setattr(blob_lock, "PATIENCE_S", 0.05)
        with pytest.raises(Unavailable, match="held by a process that does not go on"):
            await entered(BlobLock(path).deleting())
    other.kill()
    await other.wait()
    await entered(BlobLock(path).deleting())
    await entered(BlobLock(path))
