"""What ended sessions left in a stack that still runs."""

from __future__ import annotations

import asyncio
import time

import psutil

from engine import EngineClient
from runtime import kv_audit
from runtime.demo.run import left_in_stack
from runtime.demo.stack import Stack
from runtime.store import Database

PATIENCE_S = 45.0  # a sandbox whose maker was replaced in the middle goes with the next reaping


async def left_behind(stack: Stack, patience_s: float = PATIENCE_S) -> list[str]:
    """Sandboxes, agents, blobs, pages, attempts; empty when all is well."""
    deadline = time.monotonic() + patience_s
    while True:
        found = [*await left_in_stack(stack), *await _attempts(stack), *await _agents(stack), *await _audited(stack)]
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(1.0)


async def _attempts(stack: Stack) -> list[str]:
    async with Database(stack.postgres_dsn) as db:
        rows = await db.fetch(
            "SELECT session_id, step_no, attempt_no FROM attempts JOIN sessions USING (session_id)"
            " WHERE outcome = 'running' AND state IN ('cancelled', 'completed')"
        )
    return [f"attempt {row['attempt_no']} of step {row['step_no']} of {row['session_id']}" for row in rows]


async def _agents(stack: Stack) -> list[str]:
    """Processes of sandboxes that the record knows."""
    async with Database(stack.postgres_dsn) as db:
        known = {row["sandbox_id"] for row in await db.fetch("SELECT sandbox_id FROM sandboxes")}
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if "tenuto-agent" in words and known & set(words):
            found.append(f"agent {process.info['pid']}: {' '.join(words[-3:])}")
    return found


async def _audited(stack: Stack) -> list[str]:
    found: list[str] = []
    for address in stack.state()["engines"].values():
        async with Database(stack.postgres_dsn) as db, await EngineClient.connect(address) as client:
            found += _flaws(await kv_audit.audit(db, client), (await client.stats())["pinned_pages"])
    return found


def _flaws(audit: kv_audit.KvAudit, pinned: int) -> list[str]:
    found = [f"{len(keys)} pages in {tier} that nobody names" for tier, keys in audit.orphans.items()]
    found += [f"pages of {session}, which is not open" for session in audit.strangers]
    found += [f"{pinned} pinned pages"] if pinned else []
    return found + ([f"the engine's books: {audit.integrity}"] if audit.integrity != "ok" else [])
