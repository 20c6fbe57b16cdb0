"""Disk, RAM and record compared, with a real engine, real files and a real Postgres."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

from engine import EngineClient, KvState
from runtime.cli_kv import view
from runtime.kv_audit import KvAudit, audit, collect
from runtime.store import Database, fleet, steps
from runtime.store.values import Segment
from tests.engine.conftest import share_native
from tests.engine.process import Process, engine
from tests.engine.tiny import write_tiny
from tests.runtime.store.conftest import Story, checkpoint

PROMPT = [5 + i % 40 for i in range(90)]


def served(root: Path, **options: Any) -> Any:
    """An engine over the tiers of this folder; the second one finds what the first one left."""
    if not (root / "cache").exists():
        share_native(root)
    tiers = {"host-arena": root / "arena", "host-bytes": 1 << 24, "nvme-dir": root / "nvme", "nvme-bytes": 1 << 24}
    return engine(write_tiny(root / "tiny.gguf"), root, **tiers, **options)


async def think(client: EngineClient, session: str, first: int, salt: bytes = b"") -> KvState:
    async for _ in client.generate(
        request_id=session, session=session, token_ids=[first, *PROMPT], max_tokens=4, salt=salt
    ):
        pass
    return await client.kv_state(session)


async def named(story: Story, state: KvState) -> None:
    """A checkpoint of an open session that names these pages."""
    owner = await story.placed()
    await story.input(owner, 1, [1, 2])
    attempt = await story.begin(owner, 2)
    point = checkpoint(attempt.token_start + 1, *(bytes.fromhex(key) for key in state.keys))
    await steps.complete(
        story.db, owner, attempt, segments=[Segment("scaffold", [3])], output={"outcome": "final"}, checkpoint=point
    )


def shown(found: KvAudit) -> str:
    out = io.StringIO()
    Console(width=120, file=out).print(view(found))
    return out.getvalue()


async def forgotten(process: Process) -> None:
    """Kill the engine: what its sessions held lies in the tiers, and nobody in RAM knows whose it is."""
    await process.stop(signal.SIGKILL)


async def crashed(story: Story, root: Path, tier: str) -> tuple[KvState, KvState]:
    """A killed engine left pages in this tier: those of an open session, and those of one that nobody knows."""
    async with served(root) as process, await EngineClient.connect(process.socket) as client:
        story.session_id = "ses_kept"
        kept = await think(client, "ses_kept", 1)
        await named(story, kept)
        lost = await think(client, "ses_lost", 2)
        for name in ("ses_kept", "ses_lost"):
            await client.kv("offload", session=name, tier=tier, wait=True)
        await forgotten(process)
    return kept, lost


async def test_pages_that_an_open_session_names_are_the_set(db: Database, story: Story, tmp_path: Path) -> None:
    async with served(tmp_path) as process, await EngineClient.connect(process.socket) as client:
        story.session_id = "ses_kept"
        state = await think(client, "ses_kept", 1)
        await named(story, state)
        await client.kv("offload", session="ses_kept", tier="nvme", wait=True)
        found = await audit(db, client)
        assert found.clean, found
        assert (found.named, found.in_tiers["nvme"], found.verified) == (len(state.keys),) * 3
        assert "is named by an open session" in shown(found)


async def test_what_a_killed_engine_left_is_listed_and_repaired(db: Database, story: Story, tmp_path: Path) -> None:
    kept, lost = await crashed(story, tmp_path, "host")
    async with served(tmp_path) as process, await EngineClient.connect(process.socket) as client:
        found = await audit(db, client)
        assert not found.clean
        assert set(found.orphans["host"]) == set(lost.keys)
        assert f"orphan in host: {sorted(lost.keys)[0]}" in shown(found)
        repaired = await audit(db, client, repair=True)
        assert (repaired.clean, repaired.deleted) == (True, len(lost.keys))
        again = await audit(db, client)
        assert (again.clean, again.in_tiers["host"], again.orphans) == (True, len(kept.keys), {})


async def test_a_node_that_starts_collects_what_a_crash_left(db: Database, story: Story, tmp_path: Path) -> None:
    kept, lost = await crashed(story, tmp_path, "nvme")
    async with served(tmp_path) as process, await EngineClient.connect(process.socket) as client:
        assert await collect(db, client) == len(lost.keys)
        found = await audit(db, client)
        assert (found.clean, found.in_tiers["nvme"]) == (True, len(kept.keys))


async def test_a_session_that_is_not_open_is_a_stranger_and_goes(db: Database, tmp_path: Path) -> None:
    async with served(tmp_path) as process, await EngineClient.connect(process.socket) as client:
        await think(client, "ses_unknown", 2)
        await client.kv("offload", session="ses_unknown", tier="host", wait=True)
        found = await audit(db, client)
        assert (found.clean, found.strangers) == (False, ["ses_unknown"])
        assert "no open session" in shown(found)
        assert (await audit(db, client, repair=True)).clean
        assert (await audit(db, client)).in_tiers["host"] == 0


async def test_a_flipped_bit_is_a_finding(db: Database, story: Story, tmp_path: Path) -> None:
    async with served(tmp_path) as process, await EngineClient.connect(process.socket) as client:
        story.session_id = "ses_kept"
        await named(story, await think(client, "ses_kept", 1))
        await client.kv("offload", session="ses_kept", tier="nvme", wait=True)
        (segment,) = [path for path in (tmp_path / "nvme").rglob("*") if path.is_file() and path.stat().st_size > 8192]
        data = bytearray(segment.read_bytes())
        data[-100] ^= 1
        segment.write_bytes(data)
        found = await audit(db, client)
        assert not found.clean
        assert [one["flaw"] for one in found.findings] == ["damaged page"]
        assert "damaged page in nvme" in shown(found)
        assert json.dumps(found.findings)
        assert (await audit(db, client, repair=True)).findings[0]["repaired"]
        assert (await audit(db, client)).clean


async def test_what_is_encrypted_is_looked_at_with_the_records_salts(
    db: Database, story: Story, tmp_path: Path
) -> None:
    async with served(tmp_path, kv_encryption="on") as process, await EngineClient.connect(process.socket) as client:
        await fleet.ensure_admin(db, "key")
        (tenant,) = await db.fetch("SELECT salt FROM tenants")
        salt = tenant["salt"]
        story.session_id = "ses_kept"
        kept = await think(client, "ses_kept", 1, salt)
        await named(story, kept)
        gone = bytes(31) + b"1"  # of a domain that has ended: nobody has this salt any more
        await think(client, "ses_gone", 2, gone)
        for name, its in (("ses_kept", salt), ("ses_gone", gone)):
            receipt = await client.kv("offload", session=name, tier="nvme", salt=its, wait=True)
            assert receipt.status == "accepted"
        await forgotten(process)
    async with served(tmp_path, kv_encryption="on") as process, await EngineClient.connect(process.socket) as client:
        found = await audit(db, client)
        assert (found.clean, found.in_tiers["nvme"], found.verified) == (False, len(kept.keys), len(kept.keys))
        assert [one["flaw"] for one in found.findings] == ["locked"]
        assert "locked in nvme" in shown(found)
        assert (await audit(db, client, repair=True)).clean
        again = await audit(db, client)
        assert (again.clean, again.findings, again.in_tiers["nvme"]) == (True, [], len(kept.keys))
