"""What the API shows of the record: rows as JSON, lists with cursors."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg

from runtime.errors import InvalidRequest, NotFound
from runtime.store import Database, decisions
from runtime.store.steps import branch
from runtime.tools.kinds import shown


def page(rows: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A list object; `rows` holds one more than `limit` if there are more."""
    data = list(rows[:limit])
    return {
        "object": "list",
        "data": data,
        "has_more": len(rows) > limit,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


async def owned(db: Database, tenant: str, session_id: str) -> asyncpg.Record:
    """The session's row if it is the tenant's; another tenant's looks like none. Raises NotFound."""
    row = await db.fetchrow("SELECT * FROM sessions WHERE session_id = $1 AND tenant_id = $2", session_id, tenant)
    if row is None:
        raise NotFound(f"there is no session {session_id}")
    return row


async def exists(db: Database, session_id: str) -> bool:
    return await db.fetchrow("SELECT 1 FROM sessions WHERE session_id = $1", session_id) is not None


async def session(db: Database, tenant: str, session_id: str) -> dict[str, Any]:
    row = await owned(db, tenant, session_id)
    return {**_session(row), "tokens": await token_count(db, session_id)}


async def session_list(
    db: Database,
    tenant: str,
    limit: int,
    after: str | None,
    agent: str | None = None,
    version: int | None = None,
    states: Sequence[str] | None = None,
) -> dict[str, Any]:
    if after is not None:
        await owned(db, tenant, after)
    rows = await db.fetch(
        "SELECT * FROM sessions s WHERE tenant_id = $1 AND ($2::text IS NULL OR (created_at, session_id) <"
        " (SELECT created_at, session_id FROM sessions WHERE session_id = $2))"
        " AND ($4::text IS NULL OR agent_name = $4) AND ($5::int IS NULL OR agent_version = $5)"
        " AND ($6::text[] IS NULL OR state = ANY($6))"
        " ORDER BY created_at DESC, session_id DESC LIMIT $3",
        tenant,
        after,
        limit + 1,
        agent,
        version,
        states,
    )
    return page([_session(row) for row in rows], limit)


async def token_count(db: Database, session_id: str) -> int:
    """Length of the transcript in tokens, completed steps only."""
    row = await db.fetchrow(
        "SELECT token_count FROM checkpoints WHERE session_id = $1 ORDER BY step_no DESC LIMIT 1", session_id
    )
    return int(row["token_count"]) if row else 0


async def steps(db: Database, session_id: str) -> dict[str, Any]:
    rows = await db.fetch("SELECT * FROM steps WHERE session_id = $1 ORDER BY step_no", session_id)
    return _list(
        {
            "id": row["step_no"],
            "object": "step",
            "kind": row["kind"],
            "state": row["state"],
            "live": row["live"],
            "parent": row["parent_no"],
            "attempts": row["attempts"],
            "token_start": row["token_start"],
            "token_count": row["token_count"],
            "output": row["output"],
            "error": row["error"],
            "started_at": _time(row["started_at"]),
            "ended_at": _time(row["ended_at"]),
        }
        for row in rows
    )


async def attempts(db: Database, session_id: str) -> dict[str, Any]:
    rows = await db.fetch("SELECT * FROM attempts WHERE session_id = $1 ORDER BY step_no, attempt_no", session_id)
    return _list(
        {
            "id": f"{row['step_no']}.{row['attempt_no']}",
            "object": "attempt",
            "step": row["step_no"],
            "attempt": row["attempt_no"],
            "epoch": row["epoch"],
            "node": row["node_id"],
            "resumed_at": row["resumed_at"],
            "outcome": row["outcome"],
            "error": row["error"],
            "started_at": _time(row["started_at"]),
            "ended_at": _time(row["ended_at"]),
        }
        for row in rows
    )


async def checkpoints(db: Database, session_id: str) -> dict[str, Any]:
    rows = await db.fetch(
        "SELECT c.*, s.live, s.parent_no, s.kind FROM checkpoints c JOIN steps s USING (session_id, step_no)"
        " WHERE session_id = $1 ORDER BY step_no",
        session_id,
    )
    return _list(
        {
            "id": row["step_no"],
            "object": "checkpoint",
            "kind": row["kind"],
            "live": row["live"],
            "parent": row["parent_no"],
            "tokens": row["token_count"],
            "token_digest": row["token_digest"].hex(),
            "seed": row["seed"],
            "sampler_pos": row["sampler_pos"],
            "fingerprint": row["fingerprint"],
            "kv": {
                "group": row["kv_group"],
                "shard": row["kv_shard"],
                "shards": row["kv_shards"],
                "tail": row["kv_tail"].hex() if row["kv_tail"] else None,
                "new_pages": len(row["kv_new"]),
            },
            "ledger_pos": row["ledger_pos"],
            "workspace_root": row["workspace_root"],
            "created_at": _time(row["created_at"]),
        }
        for row in rows
    )


async def transcript(db: Database, session_id: str) -> dict[str, Any]:
    return _list(
        {"id": i, "step": step_no, "kind": kind, "token_ids": token_ids}
        for i, (step_no, kind, token_ids) in enumerate(await branch(db, session_id))
    )


async def questions(
    db: Database, tenant: str, limit: int, state: str | None, session_id: str | None, after: str | None
) -> dict[str, Any]:
    if after is not None and await question(db, tenant, after) is None:
        raise NotFound(f"after: there is no question {after}; the last_id of a page is needed")
    rows = await db.fetch(
        "SELECT * FROM questions WHERE tenant_id = $1 AND ($2::text IS NULL OR state = $2)"
        " AND ($3::text IS NULL OR session_id = $3) AND ($4::text IS NULL OR (created_at, question_id) >"
        " (SELECT created_at, question_id FROM questions WHERE question_id = $4 AND tenant_id = $1))"
        " ORDER BY created_at, question_id LIMIT $5",
        tenant,
        state,
        session_id,
        after,
        limit + 1,
    )
    return page([as_question(row) for row in rows], limit)


async def question(db: Database, tenant: str, question_id: str) -> dict[str, Any] | None:
    row = await db.fetchrow("SELECT * FROM questions WHERE question_id = $1 AND tenant_id = $2", question_id, tenant)
    return as_question(row) if row else None


def as_question(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": row["question_id"],
        "object": "approval",
        "kind": row["kind"],
        "session_id": row["session_id"],
        "step": row["step_no"],
        "call": row["call_no"] if row["call_no"] >= 0 else None,
        "about": row["about"],
        "state": row["state"],
        "answer": row["answer"],
        "expires_at": _time(row["expires_at"]),
        "created_at": _time(row["created_at"]),
        "answered_at": _time(row["answered_at"]),
    }


async def kv(db: Database, session_id: str) -> dict[str, Any]:
    row = await db.fetchrow("SELECT * FROM kv_residency WHERE session_id = $1", session_id)
    if row is None:
        return {"object": "kv", "tier": "none", "detail": {}, "updated_at": None}
    return {
        "object": "kv",
        "tier": row["tier"],
        "detail": row["detail"],
        "updated_at": _time(row["updated_at"]),
    }


async def kv_decisions(db: Database, session_id: str, limit: int, after: str | None) -> dict[str, Any]:
    rows = await decisions.of_session(db, session_id, limit=limit + 1, after=None if after is None else _place(after))
    shown = [
        {
            "id": f"{row.pop('engine_boot')}:{row.pop('seq')}",
            "object": "kv.decision",
            "step": row.pop("step_no"),
            "decided_at": _time(row.pop("decided_at")),
            **row,
        }
        for row in rows
    ]
    return page(shown, limit)


def _place(cursor: str) -> tuple[str, int]:
    boot, _, seq = cursor.partition(":")
    if not boot or not seq.isdigit() or int(seq) >= 2**63:
        raise InvalidRequest(f"after is {cursor!r}; the last_id of a page is needed")
    return boot, int(seq)


def _list(rows: Any) -> dict[str, Any]:
    data = list(rows)
    return page(data, max(len(data), 1))


def _session(row: asyncpg.Record) -> dict[str, Any]:
    config = row["config"]
    return {
        "id": row["session_id"],
        "object": "session",
        "state": row["state"],
        "waiting_for": row["waiting_for"],
        "ending": row["ending"],
        "model": config["model"],
        "system": config["system"],
        "tools": [shown(tool) for tool in config["tools"]],
        "image": config.get("image"),
        "egress": config.get("egress", []),
        "limits": config["limits"],
        "sampling": config["sampling"],
        "response_format": config.get("response_format"),
        "parallel_tool_calls": config.get("parallel_tool_calls"),
        "kv": config["kv"],
        "approvals": config.get("approvals", {}),
        "on_busy": config.get("on_busy", "enqueue"),
        "context_policy": config.get("context_policy", "fail"),
        "budget": {**config.get("budget", {}), **(row["budget"] or {})},
        "spent": {
            "tokens": row["spent_tokens"],
            "steps": row["spent_steps"],
            "tool_s": row["tool_ms"] / 1000,
            "wall_s": row["busy_ms"] / 1000,
        },
        "agent": {"name": row["agent_name"], "version": row["agent_version"]} if row["agent_name"] else None,
        "schedule": row["schedule_id"],
        "metadata": row["metadata"],
        "parent": row["parent_id"] if row["parent_call"] is not None else None,
        "forked_from": _forked_from(row),
        "seed": row["seed"],
        "epoch": row["epoch"],
        "node": row["node_id"],
        "error": row["error"],
        "last_event": row["next_pos"] - 1,
        "created_at": _time(row["created_at"]),
        "updated_at": _time(row["updated_at"]),
    }


def _forked_from(row: asyncpg.Record) -> dict[str, Any] | None:
    if row["parent_id"] is None or row["parent_call"] is not None:
        return None
    return {"session_id": row["parent_id"], "step": row["parent_step"]}


def _time(value: datetime.datetime | None) -> str | None:
    return value.isoformat() if value else None
