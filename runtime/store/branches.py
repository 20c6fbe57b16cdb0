"""The transcript as a tree: rewind goes on from an earlier checkpoint, fork does so in a session of its own.

Both start from a row and copy no page and no file: pages and workspace blobs are named by what they hold.
"""

from __future__ import annotations

from typing import Any

import asyncpg

from runtime.errors import Conflict, InvalidRequest, NotFound
from runtime.store import children, events, quotas
from runtime.store.database import Database
from runtime.store.sessions import end_running_step, set_state, void_questions
from runtime.store.standing import progress, way_back
from runtime.store.values import Event
from workflows.policies import Next, next_action
from workflows.states import TERMINAL, State
from workflows.states import Event as Move

_CHAIN = (
    "WITH RECURSIVE chain AS (SELECT step_no, parent_no FROM steps WHERE session_id = $1 AND step_no = $2"
    " UNION ALL SELECT p.step_no, p.parent_no FROM steps p JOIN chain c"
    " ON p.session_id = $1 AND p.step_no = c.parent_no)"
)
_CHECKPOINT = (
    "token_count, token_digest, seed, sampler_pos, fingerprint, kv_group, kv_shard, kv_shards, kv_tail, kv_new,"
    " ledger_pos, workspace_root"
)


async def rewind(connection: asyncpg.Connection, session_id: str, step_no: int, seed: int | None, go_on: bool) -> None:
    """Go back to a checkpoint. The session's row is locked, and nothing of it runs. Raises InvalidRequest.

    Steps behind it stay in the record, off the branch. Where the checkpoint has work left, the session pauses there
    unless it is to `go_on`. With a `seed`, what is sampled from here on differs from what was.
    """
    target = await ensure_checkpoint(connection, session_id, step_no)
    await end_running_step(connection, session_id, "cancelled", "the session was rewound", keep_message=True)
    await void_questions(connection, session_id)
    decision = await _decide(connection, session_id, step_no, target)
    await connection.execute(
        f"{_CHAIN} UPDATE steps SET live = NOT live WHERE session_id = $1"
        " AND live <> (step_no IN (SELECT step_no FROM chain))",
        session_id,
        decision,
    )
    await children.end_left_behind(connection, session_id)
    # Whoever held the session is fenced off from now on, not only once it is placed anew.
    await connection.execute("UPDATE sessions SET epoch = epoch + 1 WHERE session_id = $1", session_id)
    await connection.execute(
        "UPDATE sandboxes SET state = 'released', released_at = coalesce(released_at, now()), left_root = NULL"
        " WHERE session_id = $1 AND (state <> 'released' OR left_root IS NOT NULL)",
        session_id,
    )
    if seed is not None:
        await connection.execute("UPDATE sessions SET seed = $2 WHERE session_id = $1", session_id, seed)
    rewound = Event("session.rewound", {"to": step_no, "tokens": target["token_count"], "seed": seed})
    await events.append(connection, session_id, [rewound], step_no=decision)
    await _settle(connection, session_id, go_on)


async def fork(
    db: Database, tenant_id: str, session_id: str, child_id: str, step_no: int | None, seed: int | None
) -> None:
    """Accept a session that begins as a copy of this one's record up to a checkpoint (the last one by default).

    Repeated with the same id: a no-op. Raises NotFound, InvalidRequest; Conflict where the session has ended, since
    its workspace and pages went with it; Forbidden where the tenant has all the sessions that it may have.
    """

    async def work(connection: asyncpg.Connection) -> None:
        parent = await connection.fetchrow(
            "SELECT * FROM sessions WHERE session_id = $1 AND tenant_id = $2 FOR UPDATE", session_id, tenant_id
        )
        if parent is None:
            raise NotFound(f"there is no session {session_id}")
        if await connection.fetchval("SELECT true FROM sessions WHERE session_id = $1", child_id):
            return
        if parent["state"] in (*TERMINAL, State.CANCELLING) or parent["ending"]:
            raise Conflict(
                f"session {session_id} is {parent['state']}; its workspace went with it, so fork before that"
            )
        at = step_no if step_no is not None else await _last_checkpoint(connection, session_id)
        if at is not None:
            await ensure_checkpoint(connection, session_id, at)
        await quotas.ensure_room_for_session(connection, tenant_id, child_id, parent["config"])
        await _copy(connection, parent, child_id, at, parent["seed"] if seed is None else seed)

    await db.run(work)


async def _copy(
    connection: asyncpg.Connection, parent: asyncpg.Record, child_id: str, at: int | None, seed: int
) -> None:
    session_id = parent["session_id"]
    await connection.execute(
        "INSERT INTO sessions (session_id, tenant_id, config, seed, kv_domain, budget, parent_id, parent_step,"
        " agent_name, agent_version, metadata, state)"
        " SELECT $2, tenant_id, config, $3, kv_domain, budget, session_id, $4, agent_name, agent_version, metadata,"
        " CASE WHEN $4::int IS NULL THEN 'created' ELSE 'idle' END FROM sessions WHERE session_id = $1",
        session_id,
        child_id,
        seed,
        at,
    )
    about = {"session_id": child_id, "model": parent["config"]["model"], "seed": seed}
    forked = {"from": session_id, "step": at}
    await events.append(connection, child_id, [Event("session.created", about), Event("session.forked", forked)])
    await events.append(connection, session_id, [Event("session.fork_made", {"session_id": child_id, "step": at})])
    if at is None:
        return
    await connection.execute(  # the transcript that is copied speaks of the tools that its servers offered
        "INSERT INTO session_tools (session_id, tenant_id, listings)"
        " SELECT $2, tenant_id, listings FROM session_tools WHERE session_id = $1",
        session_id,
        child_id,
    )
    await connection.execute(
        f"{_CHAIN} INSERT INTO steps (session_id, step_no, tenant_id, parent_no, kind, state, token_start,"
        " token_count, attempts, output, started_at, ended_at)"
        " SELECT $3, s.step_no, s.tenant_id, s.parent_no, s.kind, s.state, s.token_start, s.token_count, s.attempts,"
        " CASE WHEN m.options IS NULL THEN s.output"
        " ELSE s.output || jsonb_build_object('options', m.options) END, s.started_at, s.ended_at"
        " FROM steps s JOIN chain USING (step_no) LEFT JOIN messages m USING (message_id) WHERE s.session_id = $1",
        session_id,
        at,
        child_id,
    )
    await connection.execute(
        f"{_CHAIN} INSERT INTO segments (session_id, step_no, idx, tenant_id, kind, token_ids)"
        " SELECT $3, g.step_no, g.idx, g.tenant_id, g.kind, g.token_ids"
        " FROM segments g JOIN chain USING (step_no) WHERE g.session_id = $1",
        session_id,
        at,
        child_id,
    )
    await connection.execute(
        f"{_CHAIN} INSERT INTO checkpoints (session_id, step_no, tenant_id, {_CHECKPOINT})"
        f" SELECT $3, step_no, tenant_id, {_CHECKPOINT} FROM checkpoints JOIN chain USING (step_no)"
        " WHERE session_id = $1",
        session_id,
        at,
        child_id,
    )
    if next_action(await progress(connection, child_id)) is not Next.REST:
        await set_state(connection, child_id, State.IDLE, Move.PAUSE)
        await events.append(connection, child_id, [Event("session.paused")])


async def ensure_checkpoint(connection: asyncpg.Connection, session_id: str, step_no: int) -> asyncpg.Record:
    row = await connection.fetchrow(
        "SELECT * FROM checkpoints WHERE session_id = $1 AND step_no = $2", session_id, step_no
    )
    if row is None:
        raise InvalidRequest(
            f"step: session {session_id} has no checkpoint at step {step_no}; see its checkpoints", param="step"
        )
    return row


async def _last_checkpoint(connection: asyncpg.Connection, session_id: str) -> int | None:
    found: int | None = await connection.fetchval(
        "SELECT max(step_no) FROM checkpoints WHERE session_id = $1", session_id
    )
    return found


async def _decide(connection: asyncpg.Connection, session_id: str, to: int, target: asyncpg.Record) -> int:
    """The step that says so, with the checkpoint that it went back to. Returns its number."""
    row = await connection.fetchrow("SELECT * FROM steps WHERE session_id = $1 AND step_no = $2", session_id, to)
    output = row["output"] or {}
    after = output.get("after") or {"kind": row["kind"], "outcome": output.get("outcome", "")}
    if row["kind"] == "compaction":
        after = {**after, "compacted": True}
    return await add_decision(
        connection, session_id, parent_no=to, output={"decision": "rewind", "to": to, "after": after}, like=target
    )


async def add_decision(
    connection: asyncpg.Connection, session_id: str, *, parent_no: int, output: dict[str, Any], like: asyncpg.Record
) -> int:
    """A completed step that computes nothing, with a checkpoint like another. Returns its number."""
    step_no: int = await connection.fetchval(
        "INSERT INTO steps (session_id, step_no, tenant_id, parent_no, kind, state, token_start, output, ended_at)"
        " SELECT $1, max(step_no) + 1, $2, $3, 'decision', 'completed', $4, $5, now() FROM steps WHERE session_id = $1"
        " RETURNING step_no",
        session_id,
        like["tenant_id"],
        parent_no,
        like["token_count"],
        output,
    )
    copied = _CHECKPOINT.replace("kv_new", "'{}'::bytea[]")
    await connection.execute(
        f"INSERT INTO checkpoints (session_id, step_no, tenant_id, {_CHECKPOINT})"
        f" SELECT session_id, $3, tenant_id, {copied} FROM checkpoints WHERE session_id = $1 AND step_no = $2",
        session_id,
        like["step_no"],
        step_no,
    )
    return step_no


async def _settle(connection: asyncpg.Connection, session_id: str, go_on: bool) -> None:
    """The state that the record now calls for."""
    state = State(await connection.fetchval("SELECT state FROM sessions WHERE session_id = $1", session_id))
    way = await way_back(connection, session_id)
    if way is not Move.REST and not go_on:
        way = Move.PAUSE
    target = {Move.PAUSE: State.PAUSED, Move.REST: State.IDLE, Move.THINK: State.THINKING}.get(way, State.TOOL_RUNNING)
    if state != target:
        if state is State.IDLE and way is Move.RUN_TOOL:
            state = await set_state(connection, session_id, state, Move.PAUSE)
        await set_state(connection, session_id, state, way)
    kind = {State.PAUSED: "session.paused", State.IDLE: "session.idle"}.get(target)
    if kind is not None:
        await events.append(connection, session_id, [Event(kind)])
