"""A step's usual writes, each as one statement: what it changes, the events that tell of it, and who is woken by them.

A statement is a transaction by itself, in one round trip, where nothing is to be asked first; it then writes nothing
where the session is held by another or is not as expected. After a statement that locked the row it is the second half
of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import asyncpg

from runtime.store import budgets, standing
from runtime.store.database import Database
from runtime.store.events import CHANNEL
from runtime.store.held import HELD, WITHOUT_LIMITS, session_of
from runtime.store.standing import Standing
from runtime.store.values import Attempt, Checkpoint, Event, Owner, Segment, Session

Source: TypeAlias = Database | asyncpg.Connection  # a connection whose transaction has locked the session's row

# What a statement finds under `place` gets its events. $1 is the session, $2 the epoch, $3 the step.
WRITTEN = """
written AS (
    INSERT INTO events (session_id, pos, tenant_id, type, step_no, attempt_no, data)
    SELECT $1, place.next_pos - cardinality({types}) + nth - 1, place.tenant_id, one.type, $3, {attempt_no}, one.data
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
    FROM segments WHERE session_id = $1 AND step_no = $3
)
"""
# $15: the states in which a step may begin like this; none where the caller has looked. A new turn leaves behind what
# children still do for the last one, which takes more than this.
_MAY_BEGIN = (
    f"$15::text[] IS NULL OR (s.state = ANY($15) AND {WITHOUT_LIMITS} AND ($4 <> 'input' OR NOT EXISTS"
    " (SELECT FROM sessions c WHERE c.parent_id = $1 AND c.parent_call IS NOT NULL)))"
)

_BEGIN = f"""
WITH {HELD.format(condition=_MAY_BEGIN)}, parent AS (
    SELECT step_no, token_start + token_count AS ends FROM steps
    WHERE session_id = $1 AND live AND state = 'completed' AND step_no < $3 ORDER BY step_no DESC LIMIT 1
), step AS (
    INSERT INTO steps (session_id, step_no, tenant_id, parent_no, kind, state, token_start, message_id, attempts)
    SELECT $1, $3, held.tenant_id, parent.step_no, $4, 'running', coalesce(parent.ends, 0), $5, 1
    FROM held LEFT JOIN parent ON true
    ON CONFLICT (session_id, step_no) DO NOTHING RETURNING token_start, tenant_id
), attempt AS (
    INSERT INTO attempts (session_id, step_no, attempt_no, tenant_id, token, epoch, node_id, node_boot, resumed_at)
    SELECT $1, $3, 1, tenant_id, $6, $2, $7, $8, 0 FROM step
), opened AS (
    INSERT INTO segments (session_id, step_no, idx, tenant_id, kind, token_ids)
    SELECT $1, $3, 0, tenant_id, $9, $10 FROM step WHERE cardinality($10::int[]) > 0
), place AS (
    UPDATE sessions se SET next_pos = next_pos + 1, updated_at = now(), {_STATE.format(state="$11")}
    FROM step WHERE se.session_id = $1 RETURNING se.next_pos, se.tenant_id
), {WRITTEN.format(types="$12::text[]", data="$13::jsonb[]", attempt_no="1")}
SELECT held.*, step.token_start, pg_notify($14, $1) FROM held, step, place
"""

_APPEND = f"""
WITH {HELD.format(condition="true")}, {_DURABLE}, kept AS (
    INSERT INTO segments (session_id, step_no, idx, tenant_id, kind, token_ids)
    SELECT $1, $3, durable.next_idx, held.tenant_id, 'model', $5 FROM held, durable WHERE durable.tokens = $4
    RETURNING true
), place AS (
    UPDATE sessions se SET next_pos = next_pos + cardinality($8::text[]), updated_at = now(),
        spent_tokens = spent_tokens + $11, warned = warned || $6::text[]
    FROM kept WHERE se.session_id = $1 RETURNING se.next_pos, se.tenant_id
), {WRITTEN.format(types="$8::text[]", data="$9::jsonb[]", attempt_no="$7")}
SELECT durable.tokens, (SELECT pg_notify($10, $1) FROM place) FROM held, durable
"""

_COMPLETE = f"""
WITH {HELD.format(condition="$30::text[] IS NULL OR s.state = ANY($30)")}, {_DURABLE}, ended AS (
    UPDATE steps SET state = 'completed', output = $4, token_start = $5, token_count = $6, ended_at = now()
    FROM held, durable WHERE steps.session_id = $1 AND steps.step_no = $3 AND steps.state = 'running'
        AND ($7::bigint IS NULL OR durable.tokens = $7)
    RETURNING durable.next_idx, steps.tenant_id, steps.kind
), kept AS (
    INSERT INTO segments (session_id, step_no, idx, tenant_id, kind, token_ids)
    SELECT $1, $3, ended.next_idx + nth - 1, tenant_id, one.kind, ($8::int[])[one.first:one.last]
    FROM ended, unnest($9::text[], $10::int[], $11::int[]) WITH ORDINALITY AS one (kind, first, last, nth)
), closed AS (
    UPDATE attempts SET outcome = 'completed', ended_at = now() FROM ended
    WHERE session_id = $1 AND step_no = $3 AND attempt_no = $12 AND outcome = 'running'
), consumed AS (
    UPDATE messages SET state = 'consumed' FROM ended WHERE message_id = $13
), named AS (
    INSERT INTO checkpoints (session_id, step_no, tenant_id, token_count, token_digest, seed, sampler_pos,
        fingerprint, kv_group, kv_shard, kv_shards, kv_tail, kv_new, workspace_root, ledger_pos)
    SELECT $1, $3, tenant_id, $14, $15, $16, $14, $17, $18, $19, $20, $21, $22, $23,
        (SELECT count(*) FROM tool_calls WHERE session_id = $1 AND status = 'settled') FROM ended
), voided AS (
    UPDATE questions SET state = 'void', answered_at = now() FROM ended
    WHERE $24 AND session_id = $1 AND questions.state = 'open'
), place AS (
    UPDATE sessions se SET next_pos = next_pos + cardinality($28::text[]), updated_at = now(),
        spent_steps = spent_steps + 1, spent_tokens = spent_tokens + $26, warned = warned || $27::text[],
        {_STATE.format(state="coalesce($25, se.state)")}
    FROM ended WHERE se.session_id = $1 RETURNING se.next_pos, se.tenant_id, se.state
), {WRITTEN.format(types="$28::text[]", data="$29::jsonb[]", attempt_no="$12")}
SELECT pg_notify($31, $1), place.state AS session_state, ended.kind, entry.options,
    {standing.SINCE_ENTRY},
    (SELECT count(*) FROM messages WHERE session_id = $1 AND state = 'accepted' AND message_id IS DISTINCT FROM $13)
        AS unread
FROM place CROSS JOIN ended LEFT JOIN LATERAL {standing.ENTRY} entry ON true
"""


async def begin(
    source: Source,
    owner: Owner,
    step_no: int,
    kind: str,
    *,
    state: str,
    states: Sequence[str] | None,
    token: str,
    message_id: str | None,
    opening: Segment | None,
    started: Event,
) -> tuple[Session, int] | None:
    """A new step with its first attempt, its first segment and the session's `state`, if it is in one of `states` and
    has no limits. Returns the session as it was and where the step's tokens start; None, and nothing is written, where
    the step is not new either."""
    row = await source.fetchrow(
        _BEGIN,
        owner.session_id,
        owner.epoch,
        step_no,
        kind,
        message_id,
        token,
        owner.node_id,
        owner.node_boot,
        opening.kind if opening else "",
        list(opening.token_ids) if opening else [],
        state,
        *columns([started]),
        CHANNEL,
        states,
    )
    return None if row is None else (session_of(row), int(row["token_start"]))


async def append(
    source: Source,
    session: Session,
    attempt: Attempt,
    offset: int,
    ids: Sequence[int],
    delta: Event,
    spent: int | None = None,
) -> int | None:
    """Sampled tokens, if exactly `offset` of the step are durable. `spent`: what they count in the budget, where that
    is not their number. Returns how many were before; None where the session is held by another."""
    spent = len(ids) if spent is None else spent
    near = budgets.near_after(session, tokens=spent)
    row = await source.fetchrow(
        _APPEND,
        session.session_id,
        session.epoch,
        attempt.step_no,
        offset,
        list(ids),
        [event.data["measure"] for event in near],
        attempt.attempt_no,
        *columns([*near, delta]),
        CHANNEL,
        spent,
    )
    return None if row is None else int(row["tokens"])


async def complete(
    source: Source,
    session: Session,
    attempt: Attempt,
    *,
    segments: Sequence[Segment],
    output: Mapping[str, Any],
    checkpoint: Checkpoint,
    start: int,
    durable: int | None,
    tokens: int,
    state: str | None,
    states: Sequence[str] | None,
    voids: bool,
    told: Sequence[Event],
) -> Standing | None:
    """The end of a step. `durable`: how many sampled tokens it must have, if that matters; `tokens`: those that the
    budget does not know of yet; `state`: the session's from now on, None for no other, if it is in one of `states`;
    `voids`: open questions have no answer any more. None, and nothing is written, where the session is not, or the
    step is completed or has other tokens."""
    near = budgets.near_after(session, tokens=tokens, steps=1)
    kept = [segment for segment in segments if segment.token_ids]
    ends: list[int] = []
    for segment in kept:
        ends.append((ends[-1] if ends else 0) + len(segment.token_ids))
    row = await source.fetchrow(
        _COMPLETE,
        session.session_id,
        session.epoch,
        attempt.step_no,
        output,
        start,
        checkpoint.token_count - start,
        durable,
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
        *columns([*near, *told]),
        states,
        CHANNEL,
    )
    if row is None:
        return None
    return standing.after(row, attempt.step_no, output, checkpoint.token_count, session.config)


def columns(events: Sequence[Event]) -> tuple[list[str], list[dict[str, Any]]]:
    return [event.type for event in events], [dict(event.data) for event in events]
