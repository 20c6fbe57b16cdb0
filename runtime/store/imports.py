"""A session from an archive that was looked through: its rows, in one transaction."""

from __future__ import annotations

import base64
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

from runtime.archive_shapes import CallRow, CheckpointRow, Segments, StepRow
from runtime.store import domains, events, quotas
from runtime.store.database import Database
from runtime.store.sessions import set_state
from runtime.store.standing import progress
from runtime.store.values import Event
from workflows.policies import Next, next_action
from workflows.states import Event as Move
from workflows.states import State


@dataclass(frozen=True)
class Imported:
    """A session as an archive has it, up to its last checkpoint."""

    came_from: str
    config: Mapping[str, Any]
    seed: int
    budget: Mapping[str, Any] | None
    listings: Mapping[str, Any] | None
    secrets: Sequence[str]
    steps: Sequence[StepRow]
    segments: Sequence[Segments]
    calls: Sequence[CallRow]
    checkpoints: Sequence[CheckpointRow]
    fingerprint: str


async def create(db: Database, tenant_id: str, session_id: str, made: Imported, domain: str | None) -> None:
    """The session stands at its last checkpoint: at rest, or paused where there is work left. Repeated with the same
    id: a no-op. Raises Forbidden where the tenant has all the sessions, or workspaces, that it may have."""

    async def work(connection: asyncpg.Connection) -> None:
        await quotas.ensure_room_for_session(connection, tenant_id, session_id, made.config)
        if domain is not None:
            await domains.ensure(connection, tenant_id, domain)
        new = await connection.fetchval(
            "INSERT INTO sessions (session_id, tenant_id, config, seed, kv_domain, budget, state)"
            " VALUES ($1, $2, $3, $4, $5, $6, 'idle') ON CONFLICT DO NOTHING RETURNING true",
            session_id,
            tenant_id,
            dict(made.config),
            made.seed,
            domain,
            None if made.budget is None else dict(made.budget),
        )
        if not new:
            return
        last = made.checkpoints[-1]
        about = {"session_id": session_id, "model": made.config["model"], "seed": made.seed}
        came = {"from": made.came_from, "step": last.step, "tokens": last.tokens}
        told = [Event("session.created", about), Event("session.imported", came)]
        await events.append(connection, session_id, told)
        await _write(connection, tenant_id, session_id, made)
        if next_action(await progress(connection, session_id)) is not Next.REST:
            await set_state(connection, session_id, State.IDLE, Move.PAUSE)
            await events.append(connection, session_id, [Event("session.paused")])

    await db.run(work)


async def _write(connection: asyncpg.Connection, tenant_id: str, session_id: str, made: Imported) -> None:
    key = (session_id, tenant_id)
    if made.listings is not None:
        await connection.execute(
            "INSERT INTO session_tools (session_id, tenant_id, listings) VALUES ($1, $2, $3)",
            *key,
            dict(made.listings),
        )
    await connection.executemany(
        "INSERT INTO steps (session_id, tenant_id, step_no, parent_no, kind, state, token_start, token_count, attempts,"
        " output, started_at, ended_at) VALUES ($1, $2, $3, $4, $5, 'completed', $6, $7, $8, $9, $10, $11)",
        [
            (
                *key,
                one.step,
                one.parent,
                one.kind,
                one.token_start,
                one.token_count,
                one.attempts,
                one.output or {},
                _time(one.started_at),
                _time(one.ended_at or one.started_at),
            )
            for one in made.steps
        ],
    )
    await connection.executemany(
        "INSERT INTO segments (session_id, tenant_id, step_no, idx, kind, token_ids) VALUES ($1, $2, $3, $4, $5, $6)",
        [(*key, one.step, one.idx, one.kind, one.token_ids) for one in made.segments],
    )
    await connection.executemany(
        "INSERT INTO checkpoints (session_id, tenant_id, step_no, token_count, token_digest, seed, sampler_pos,"
        " fingerprint, kv_group, kv_shard, kv_shards, kv_new, ledger_pos, workspace_root)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, 0, 0, 1, '{}', $9, $10)",
        [
            (
                *key,
                one.step,
                one.tokens,
                bytes.fromhex(one.token_digest),
                one.seed,
                one.sampler_pos,
                made.fingerprint,
                one.ledger_pos,
                one.workspace_root,
            )
            for one in made.checkpoints
        ],
    )
    # Which workspaces its calls began and ended with is not taken over: no blob of theirs may be here.
    root = made.checkpoints[-1].workspace_root
    await connection.executemany(
        "INSERT INTO tool_calls (session_id, tenant_id, step_no, call_no, name, arguments, argument_digest, effect,"
        " status, fence, owner, lease_until, runs, snapshot_before, snapshot_after, result, output, settled_at)"
        " VALUES ($1, $2, $3, $4, $5, $6, ''::bytea, $7, 'settled', 0, 'import', now(), $8, $9, $9, $10, $11, now())",
        [
            (
                *key,
                one.step,
                one.call,
                one.name,
                one.arguments,
                one.effect,
                one.runs,
                root,
                one.result or {},
                base64.b64decode(one.output or ""),
            )
            for one in made.calls
        ],
    )


def _time(text: str) -> datetime.datetime:
    found = datetime.datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
