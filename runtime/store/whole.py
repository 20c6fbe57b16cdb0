"""A step's usual writes, each as one statement: what it changes, the events that tell of it, and who is woken by them.

The session's row is locked by the caller, in a statement before: what is read here was committed before the lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg

from runtime.store import budgets
from runtime.store.events import CHANNEL
from runtime.store.values import Attempt, Checkpoint, Event, Owner, Segment, Session

# What a statement finds under `place` gets its events. $1 is the session, $2 the step.
_WRITTEN = """
written AS (
    INSERT INTO events (session_id, pos, tenant_id, type, step_no, attempt_no, data)
    SELECT $1, place.next_pos - cardinality({types}) + nth - 1, place.tenant_id, one.type, $2, {attempt_no}, one.data
    FROM place, unnest({types}, {data}) WITH ORDINALITY AS one (type, data, nth)
)
"""
# A change of state forgets why there was another one; the same state again changes nothing.
_STATE = (
    "state = {state}, error = CASE WHEN se.state = {state} THEN se.error END,"
    " waiting_for = CASE WHEN se.state = {state} THEN se.waiting_for END"
)
_DURABLE = """
durable AS (
    SELECT coalesce(sum(cardinality(token_ids)) FILTER (WHERE kind = 'model'), 0) AS tokens,
        coalesce(max(idx) + 1, 0) AS next_idx
    FROM segments WHERE session_id = $1 AND step_no = $2
)
"""

_BEGIN = f"""
WITH parent AS (
    SELECT step_no, token_start + token_count AS ends FROM steps
    WHERE session_id = $1 AND live AND state = 'completed' AND step_no < $2 ORDER BY step_no DESC LIMIT 1
), step AS (
    INSERT INTO steps (session_id, step_no, tenant_id, parent_no, kind, state, token_start, message_id, attempts)
    SELECT $1, $2, $3, parent.step_no, $4, 'running', coalesce(parent.ends, 0), $5, 1
    FROM (VALUES (1)) AS one LEFT JOIN parent ON true
    ON CONFLICT (session_id, step_no) DO NOTHING RETURNING token_start
), attempt AS (
    INSERT INTO attempts (session_id, step_no, attempt_no, tenant_id, token, epoch, node_id, node_boot, resumed_at)
    SELECT $1, $2, 1, $3, $6, $7, $8, $9, 0 FROM step
), opened AS (
    INSERT INTO segments (session_id, step_no, idx, tenant_id, kind, token_ids)
    SELECT $1, $2, 0, $3, $10, $11 FROM step WHERE cardinality($11::int[]) > 0
), place AS (
    UPDATE sessions se SET next_pos = next_pos + 1, updated_at = now(), {_STATE.format(state="$12")}
    FROM step WHERE se.session_id = $1 RETURNING se.next_pos, se.tenant_id
), {_WRITTEN.format(types="$13::text[]", data="$14::jsonb[]", attempt_no="1")}
SELECT step.token_start, pg_notify($15, $1) FROM step, place
"""

_APPEND = f"""
WITH {_DURABLE}, kept AS (
    INSERT INTO segments (session_id, step_no, idx, tenant_id, kind, token_ids)
    SELECT $1, $2, durable.next_idx, $3, 'model', $5 FROM durable WHERE durable.tokens = $4 RETURNING true
), place AS (
    UPDATE sessions se SET next_pos = next_pos + cardinality($8::text[]), updated_at = now(),
        spent_tokens = spent_tokens + cardinality($5::int[]), warned = warned || $6::text[]
    FROM kept WHERE se.session_id = $1 RETURNING se.next_pos, se.tenant_id
), {_WRITTEN.format(types="$8::text[]", data="$9::jsonb[]", attempt_no="$7")}
SELECT durable.tokens, (SELECT pg_notify($10, $1) FROM place) FROM durable
"""

_COMPLETE = f"""
WITH {_DURABLE}, ended AS (
    UPDATE steps SET state = 'completed', output = $3, token_start = $4, token_count = $5, ended_at = now()
    FROM durable WHERE session_id = $1 AND step_no = $2 AND state = 'running'
        AND ($6::bigint IS NULL OR durable.tokens = $6)
    RETURNING durable.next_idx
), kept AS (
    INSERT INTO segments (session_id, step_no, idx, tenant_id, kind, token_ids)
    SELECT $1, $2, ended.next_idx + nth - 1, $7, one.kind, ($8::int[])[one.first:one.last]
    FROM ended, unnest($9::text[], $10::int[], $11::int[]) WITH ORDINALITY AS one (kind, first, last, nth)
), closed AS (
    UPDATE attempts SET outcome = 'completed', ended_at = now() FROM ended
    WHERE session_id = $1 AND step_no = $2 AND attempt_no = $12 AND outcome = 'running'
), consumed AS (
    UPDATE messages SET state = 'consumed' FROM ended WHERE message_id = $13
), named AS (
    INSERT INTO checkpoints (session_id, step_no, tenant_id, token_count, token_digest, seed, sampler_pos,
        fingerprint, kv_group, kv_shard, kv_shards, kv_tail, kv_new, workspace_root, ledger_pos)
    SELECT $1, $2, $7, $14, $15, $16, $14, $17, $18, $19, $20, $21, $22, $23,
        (SELECT count(*) FROM tool_calls WHERE session_id = $1 AND status = 'settled') FROM ended
), voided AS (
    UPDATE questions SET state = 'void', answered_at = now() FROM ended
    WHERE $24 AND session_id = $1 AND state = 'open'
), place AS (
    UPDATE sessions se SET next_pos = next_pos + cardinality($28::text[]), updated_at = now(),
        spent_steps = spent_steps + 1, spent_tokens = spent_tokens + $26, warned = warned || $27::text[],
        {_STATE.format(state="$25")}
    FROM ended WHERE se.session_id = $1 RETURNING se.next_pos, se.tenant_id
), {_WRITTEN.format(types="$28::text[]", data="$29::jsonb[]", attempt_no="$12")}
SELECT pg_notify($30, $1) FROM place
"""


async def begin(
    connection: asyncpg.Connection,
    owner: Owner,
    session: Session,
    step_no: int,
    kind: str,
    *,
    state: str,
    token: str,
    message_id: str | None,
    opening: Segment | None,
    started: Event,
) -> int | None:
    """A new step with its first attempt, its first segment and the session's `state`. Returns where its tokens start;
    None, and nothing is written, where the step is not new."""
    row = await connection.fetchrow(
        _BEGIN,
        owner.session_id,
        step_no,
        session.tenant_id,
        kind,
        message_id,
        token,
        owner.epoch,
        owner.node_id,
        owner.node_boot,
        opening.kind if opening else "",
        list(opening.token_ids) if opening else [],
        state,
        *_columns([started]),
        CHANNEL,
    )
    return None if row is None else int(row["token_start"])


async def append(
    connection: asyncpg.Connection, session: Session, attempt: Attempt, offset: int, ids: Sequence[int], delta: Event
) -> int:
    """Sampled tokens, if exactly `offset` of the step are durable. Returns how many were before."""
    near = budgets.near_after(session, tokens=len(ids))
    row = await connection.fetchrow(
        _APPEND,
        session.session_id,
        attempt.step_no,
        session.tenant_id,
        offset,
        list(ids),
        [event.data["measure"] for event in near],
        attempt.attempt_no,
        *_columns([*near, delta]),
        CHANNEL,
    )
    return int(row["tokens"])


async def complete(
    connection: asyncpg.Connection,
    session: Session,
    attempt: Attempt,
    *,
    segments: Sequence[Segment],
    output: Mapping[str, Any],
    checkpoint: Checkpoint,
    start: int,
    durable: int | None,
    tokens: int,
    state: str,
    voids: bool,
    told: Sequence[Event],
) -> bool:
    """The end of a step. `durable`: how many sampled tokens it must have, if that matters; `tokens`: those that the
    budget does not know of yet; `voids`: open questions have no answer any more. False, and nothing is written, where
    the step is completed or has other tokens."""
    near = budgets.near_after(session, tokens=tokens, steps=1)
    kept = [segment for segment in segments if segment.token_ids]
    ends: list[int] = []
    for segment in kept:
        ends.append((ends[-1] if ends else 0) + len(segment.token_ids))
    row = await connection.fetchrow(
        _COMPLETE,
        session.session_id,
        attempt.step_no,
        output,
        start,
        checkpoint.token_count - start,
        durable,
        session.tenant_id,
        [token for segment in kept for token in segment.token_ids],
        [segment.kind for segment in kept],
        [end - len(segment.token_ids) + 1 for segment, end in zip(kept, ends, strict=True)],
        ends,
        attempt.attempt_no,
        output.get("message_id"),
        checkpoint.token_count,
        checkpoint.token_digest,
        session.seed,
        checkpoint.fingerprint,
        checkpoint.kv_group,
        checkpoint.kv_shard,
        checkpoint.kv_shards,
        checkpoint.kv_tail,
        list(checkpoint.kv_new),
        checkpoint.workspace_root,
        voids,
        state,
        tokens,
        [event.data["measure"] for event in near],
        *_columns([*near, *told]),
        CHANNEL,
    )
    return row is not None


def _columns(events: Sequence[Event]) -> tuple[list[str], list[dict[str, Any]]]:
    return [event.type for event in events], [dict(event.data) for event in events]
