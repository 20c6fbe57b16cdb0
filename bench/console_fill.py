"""Rows of sessions as a month of use leaves them, written with a few statements."""

from __future__ import annotations

import asyncpg

from runtime.config import SessionConfig

DAYS = 30
STEPS = 4  # of a session: a message, a think, its calls, a think
EVENTS = 12
CONFIG = (
    """'{"model": "bench", "system": null, "tools": [], "limits": {}, "sampling": {}, "kv": {}, "files": {}}'::jsonb"""
)

_FILL = (
    "INSERT INTO tenants (tenant_id, salt) SELECT 'tenant-' || n, sha256(('salt' || n)::bytea)"
    " FROM generate_series(0, 9) n ON CONFLICT DO NOTHING",
    "INSERT INTO api_keys (key_id, tenant_id, sha256, scope) VALUES ('key_bench', 'tenant-0', 'x', 'use')",
    # One in a hundred waits for a person, one in two hundred has failed, one in twenty is open; the rest have ended.
    f"""INSERT INTO sessions (session_id, tenant_id, state, waiting_for, config, seed, epoch, next_pos, node_id, error,
        created_at, updated_at, spent_tokens, spent_steps)
    SELECT 'ses_' || lpad(to_hex(n), 24, '0'), 'tenant-' || n % 10,
        CASE WHEN n % 100 = 0 THEN 'waiting' WHEN n % 200 = 1 THEN 'failed' WHEN n % 20 = 2 THEN 'idle'
            ELSE 'completed' END,
        CASE WHEN n % 100 = 0 THEN 'approval' END, {CONFIG}, n, 1, {EVENTS + 1}, 'node-1',
        CASE WHEN n % 200 = 1 THEN '{{"message": "it failed"}}'::jsonb END,
        now() - n * interval '{DAYS} days' / $1, now() - n * interval '{DAYS} days' / $1, 100, {STEPS}
    FROM generate_series(0, $1 - 1) n""",
    "INSERT INTO messages (message_id, tenant_id, session_id, content, options, state)"
    " SELECT 'msg_' || session_id, tenant_id, session_id, 'hello', '{}', 'consumed' FROM sessions",
    f"""INSERT INTO steps (session_id, step_no, tenant_id, parent_no, kind, state, token_start, token_count, attempts,
        message_id, output, started_at, ended_at)
    SELECT session_id, n, tenant_id, nullif(n - 1, 0), (ARRAY['input', 'think', 'tool', 'think'])[n], 'completed',
        50 * n, 50, 1, CASE WHEN n = 1 THEN 'msg_' || session_id END,
        '{{"kv": {{"device": 100, "computed": 50}}, "sampled": 40}}', created_at + n * interval '1 s',
        created_at + n * interval '1 s' + interval '400 ms'
    FROM sessions, generate_series(1, {STEPS}) n""",
    f"""INSERT INTO events (session_id, pos, tenant_id, type, step_no, data, created_at)
    SELECT session_id, n, tenant_id, 'model.delta', 2, '{{"text": "some words ", "token_ids": [1, 2]}}', created_at
    FROM sessions, generate_series(1, {EVENTS}) n""",
    """INSERT INTO usage (session_id, step_no, attempt_no, tenant_id, model, kind, settled_at, sampled, device, host,
        nvme, shared, recomputed, computed, prefill_ms, engine_ms, tool_ms)
    SELECT session_id, step_no, 1, tenant_id, 'bench', kind, ended_at, 40, 100, 0, 0, 0, 0, 50, 10, 300, 0 FROM steps
    ON CONFLICT DO NOTHING""",
    "INSERT INTO kv_residency (session_id, tenant_id, tier, detail)"
    " SELECT session_id, tenant_id, (ARRAY['none', 'device', 'host', 'nvme'])[1 + seed % 4], '{}' FROM sessions",
    """INSERT INTO questions (question_id, tenant_id, session_id, step_no, kind, about)
    SELECT 'qst_' || session_id, tenant_id, session_id, 3, 'approval', '{"name": "note", "arguments": {"text": "x"}}'
    FROM sessions WHERE state = 'waiting'""",
    """INSERT INTO admin_actions (tenant_id, key_id, action, target, request_id, outcome, detail)
    SELECT 'tenant-0', 'key_bench', 'sessions.cancel', session_id, 'req_bench', 'done', '{}' FROM sessions""",
    "INSERT INTO nodes (node_id, boot, queue, card, sandbox, heartbeat_at)"
    " VALUES ('node-1', 'b', 'q', '{\"model\": \"bench\"}', '{}', now() - interval '1 day')",
    "ANALYZE",
)


async def fill(dsn: str, sessions: int) -> None:
    connection = await asyncpg.connect(dsn)
    config = SessionConfig(model="bench").model_dump_json()
    try:
        for statement in _FILL:
            given = [value for mark, value in (("$1", sessions), ("$2", config)) if mark in statement]
            await connection.execute(statement, *given, timeout=300)
    finally:
        await connection.close()
