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
from runtime.store.sessions import locked
from runtime.store.values import Attempt, Event, Owner

LEASE_S = 30


@dataclass(frozen=True)
class Call:
    """One tool call of a step. `key` names it everywhere: ledger, sandbox journal, the tool's environment."""

    call_no: int
    name: str
    arguments: Mapping[str, Any]
    effect: str

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

    async def work(connection: asyncpg.Connection) -> Claim:
        session = await locked(connection, owner.session_id, owner.epoch)
        made = await connection.fetchval(
            "INSERT INTO tool_calls (session_id, step_no, call_no, tenant_id, name, arguments, argument_digest, effect,"
            " fence, owner, lease_until, snapshot_before, runs, sandbox_id, started_at)"
            " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, now() + make_interval(secs => $11), $12,"
            " CASE WHEN $13::text IS NULL THEN 0 ELSE 1 END, $13, CASE WHEN $13::text IS NOT NULL THEN now() END)"
            " ON CONFLICT DO NOTHING RETURNING true",
            *place,
            session.tenant_id,
            call.name,
            dict(call.arguments),
            call.digest,
            call.effect,
            owner.epoch,
            owner.node_boot,
            LEASE_S,
            snapshot_before,
            run_in,
        )
        if made:
            told = [_requested(call), *([_started(call, 1)] if run_in is not None else [])]
            await events.append(
                connection, owner.session_id, told, step_no=attempt.step_no, attempt_no=attempt.attempt_no
            )
            runs = 0 if run_in is None else 1
            return Claim(None, b"", snapshot_before, None, runs, run_in, begins=run_in is not None)
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

    return await db.run(work)


def _requested(call: Call) -> Event:
    return Event("tool.requested", {"call": call.call_no, "name": call.name, "arguments": dict(call.arguments)})


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

    async def work(connection: asyncpg.Connection) -> None:
        session = await locked(connection, owner.session_id, owner.epoch)
        moved = await connection.fetchrow(
            "UPDATE tool_calls SET status = 'settled', result = $5, output = $6, snapshot_after = $7,"
            " settled_at = now() WHERE session_id = $1 AND step_no = $2 AND call_no = $3 AND fence = $4"
            " AND status <> 'settled'"
            " RETURNING (extract(epoch FROM coalesce(now() - started_at, '0')) * 1000)::bigint AS tool_ms",
            owner.session_id,
            attempt.step_no,
            call.call_no,
            owner.epoch,
            dict(result),
            output,
            snapshot_after,
        )
        if moved:
            if "told" not in result:  # what a person said afterwards took no tool's time
                await budgets.spend(connection, session, tool_ms=moved["tool_ms"])
            preview = output[:2000].decode("utf-8", "replace")
            settled = Event("tool.settled", {"call": call.call_no, "name": call.name, **result, "preview": preview})
            await events.append(
                connection,
                owner.session_id,
                [settled],
                step_no=attempt.step_no,
                attempt_no=attempt.attempt_no,
            )
            return
        status = await connection.fetchval(
            "SELECT status FROM tool_calls WHERE session_id = $1 AND step_no = $2 AND call_no = $3",
            owner.session_id,
            attempt.step_no,
            call.call_no,
        )
        if status != "settled":
            raise StaleEpoch(f"call {call.call_no} of step {attempt.step_no} was claimed by a newer owner")

    await db.run(work)
