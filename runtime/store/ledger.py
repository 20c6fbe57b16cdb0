"""The tool ledger: claim, run, settle. A call that settled never runs again; one that may have run says so."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg

from runtime.errors import StaleEpoch, TenutoError
from runtime.store import budgets, events
from runtime.store.database import Database
from runtime.store.held import HELD, locked
from runtime.store.values import Attempt, Event, Owner
from runtime.store.whole import WRITTEN, Source, columns

LEASE_S = 30

# A new call, and one that ends, each in one statement (see `whole`). $1 is the session, $2 the epoch, $3 the step.
_CLAIM = f"""
WITH {HELD.format(condition="true")}, made AS (
    INSERT INTO tool_calls (session_id, step_no, call_no, tenant_id, name, arguments, argument_digest, effect,
        fence, owner, lease_until, snapshot_before, runs, sandbox_id, started_at)
    SELECT $1, $3, $4, held.tenant_id, $5, $6, $7, $8, $2, $9, now() + make_interval(secs => $10), $11,
        CASE WHEN $12::text IS NULL THEN 0 ELSE 1 END, $12, CASE WHEN $12::text IS NOT NULL THEN now() END
    FROM held ON CONFLICT DO NOTHING RETURNING true
), place AS (
    UPDATE sessions se SET next_pos = next_pos + cardinality($14::text[]), updated_at = now()
    FROM made WHERE se.session_id = $1 RETURNING se.next_pos, se.tenant_id
), {WRITTEN.format(types="$14::text[]", data="$15::jsonb[]", attempt_no="$13")}
SELECT pg_notify($16, $1) FROM place
"""
_SETTLE = f"""
WITH {HELD.format(condition="true")}, ended AS (
    UPDATE tool_calls t SET status = 'settled', result = $5, output = $6, snapshot_after = $7, settled_at = now()
    FROM held WHERE t.session_id = $1 AND t.step_no = $3 AND t.call_no = $4 AND t.fence = $2 AND t.status <> 'settled'
    RETURNING (extract(epoch FROM coalesce(now() - t.started_at, '0')) * 1000)::bigint AS tool_ms
), place AS (
    UPDATE sessions se SET next_pos = next_pos + cardinality($10::text[]), updated_at = now(),
        tool_ms = se.tool_ms + CASE WHEN $8 THEN ended.tool_ms ELSE 0 END
    FROM ended WHERE se.session_id = $1 RETURNING se.next_pos, se.tenant_id
), {WRITTEN.format(types="$10::text[]", data="$11::jsonb[]", attempt_no="$9")}
SELECT pg_notify($12, $1) FROM place
"""


@dataclass(frozen=True)
class Call:
    """One tool call of a step. `arguments` are what it runs with, `shown` what is kept and told of them: without the
    secrets that they may hold."""

    call_no: int
    name: str
    arguments: Mapping[str, Any]
    effect: str
    shown: Mapping[str, Any] | None = None

    @property
    def told(self) -> dict[str, Any]:
        return dict(self.arguments if self.shown is None else self.shown)

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps([self.name, self.arguments], sort_keys=True).encode()).digest()


@dataclass(frozen=True)
class Claim:
    """`result` is set if the call has settled; `runs` counts the runs begun so far, the last one in `sandbox_id`.
    `begins`: that one is noted with this claim, and has not happened yet."""

    result: Mapping[str, Any] | None
    output: bytes
    snapshot_before: str
    snapshot_after: str | None
    runs: int
    sandbox_id: str | None
    begins: bool = False


def call_key(session_id: str, step_no: int, call_no: int) -> str:
    return f"{session_id}/{step_no}/{call_no}"


async def claim(
    db: Database, owner: Owner, attempt: Attempt, call: Call, snapshot_before: str, *, run_in: str | None = None
) -> Claim:
    """Claim a call for this owner. Raises StaleEpoch; TenutoError if the same place held another call.

    `run_in`: the sandbox in which a new call is to run at once; its first run is recorded too, as by `note_run`.
    """
    place = (owner.session_id, attempt.step_no, call.call_no)
    told = [_requested(call), *([_started(call, 1)] if run_in is not None else [])]

    async def made(source: Source) -> bool:
        return (
            await source.fetchrow(
                _CLAIM,
                owner.session_id,
                owner.epoch,
                attempt.step_no,
                call.call_no,
                call.name,
                call.told,
                call.digest,
                call.effect,
                owner.node_boot,
                LEASE_S,
                snapshot_before,
                run_in,
                attempt.attempt_no,
                *columns(told),
                events.CHANNEL,
            )
            is not None
        )

    new = Claim(None, b"", snapshot_before, None, 0 if run_in is None else 1, run_in, begins=run_in is not None)

    async def work(connection: asyncpg.Connection) -> Claim:
        await locked(connection, owner.session_id, owner.epoch)
        if await made(connection):
            return new
        row = await connection.fetchrow(
            "SELECT * FROM tool_calls WHERE session_id = $1 AND step_no = $2 AND call_no = $3 FOR UPDATE",
            *place,
        )
        if row["argument_digest"] != call.digest:
            raise TenutoError(f"call {call_key(*place)} was recorded with other arguments; the transcript was altered")
        if row["status"] != "settled":
            await connection.execute(
                "UPDATE tool_calls SET fence = $4, owner = $5, lease_until = now() + make_interval(secs => $6)"
                " WHERE session_id = $1 AND step_no = $2 AND call_no = $3",
                *place,
                owner.epoch,
                owner.node_boot,
                LEASE_S,
            )
        return Claim(
            row["result"],
            row["output"] or b"",
            row["snapshot_before"],
            row["snapshot_after"],
            row["runs"],
            row["sandbox_id"],
        )

    return new if await made(db) else await db.run(work)


def _requested(call: Call) -> Event:
    return Event("tool.requested", {"call": call.call_no, "name": call.name, "arguments": call.told})


def _started(call: Call, run: int) -> Event:
    return Event("tool.started", {"call": call.call_no, "name": call.name, "run": run})


async def note_run(db: Database, owner: Owner, attempt: Attempt, call: Call, runs: int, sandbox_id: str) -> None:
    """Record, before it happens, that the call begins its run number `runs` in a sandbox."""

    async def work(connection: asyncpg.Connection) -> None:
        await locked(connection, owner.session_id, owner.epoch)
        moved = await connection.fetchval(
            "UPDATE tool_calls SET runs = $4, sandbox_id = $5, status = 'pending', started_at = now()"
            " WHERE session_id = $1 AND step_no = $2 AND call_no = $3 AND runs < $4 RETURNING true",
            owner.session_id,
            attempt.step_no,
            call.call_no,
            runs,
            sandbox_id,
        )
        if moved:
            await events.append(
                connection,
                owner.session_id,
                [_started(call, runs)],
                step_no=attempt.step_no,
                attempt_no=attempt.attempt_no,
            )

    await db.run(work)


async def settle(
    db: Database,
    owner: Owner,
    attempt: Attempt,
    call: Call,
    result: Mapping[str, Any],
    output: bytes,
    snapshot_after: str,
) -> None:
    """Record the outcome. A repeat is a no-op; an older owner is refused (StaleEpoch)."""

    preview = output[:2000].decode("utf-8", "replace")
    settled = Event("tool.settled", {"call": call.call_no, "name": call.name, **result, "preview": preview})
    took_time = "told" not in result  # what a person said afterwards took no tool's time

    async def moved(source: Source) -> bool:
        return (
            await source.fetchrow(
                _SETTLE,
                owner.session_id,
                owner.epoch,
                attempt.step_no,
                call.call_no,
                dict(result),
                output,
                snapshot_after,
                took_time,
                attempt.attempt_no,
                *columns([settled]),
                events.CHANNEL,
            )
            is not None
        )

    async def work(connection: asyncpg.Connection) -> None:
        await locked(connection, owner.session_id, owner.epoch)
        if await moved(connection):
            await budgets.warn(connection, await locked(connection, owner.session_id, owner.epoch))
            return
        status = await connection.fetchval(
            "SELECT status FROM tool_calls WHERE session_id = $1 AND step_no = $2 AND call_no = $3",
            owner.session_id,
            attempt.step_no,
            call.call_no,
        )
        if status != "settled":
            raise StaleEpoch(f"call {call.call_no} of step {attempt.step_no} was claimed by a newer owner")

    if budgets.limits(attempt.session) or not await moved(db):
        await db.run(work)
