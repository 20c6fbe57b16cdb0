"""A schedule that fires: one session with one message, under names that follow from the firing, so that a repeat finds
what there is."""

from __future__ import annotations

import contextlib
import hashlib

import asyncpg

from runtime import delivery
from runtime.agents import Origin
from runtime.config import Wanted
from runtime.errors import Conflict, Forbidden, NotFound, RequestError
from runtime.steps.services import Services
from runtime.store import agents, domains, schedules, sessions, tenants
from workflows.contract import FiringIn, RunOut
from workflows.states import TERMINAL, State

_OVER = RunOut(over=True)
_GOES_ON = RunOut(over=False)


def session_of(firing: str) -> str:
    return f"ses_{_digest('session', firing)}"


def _digest(what: str, firing: str) -> str:
    return hashlib.sha256(f"{what} {firing}".encode()).hexdigest()[:24]


async def fire(s: Services, what: FiringIn) -> RunOut:
    """Make the session of a firing. Where none can be made, the run says why, and is over."""
    schedule = await schedules.to_fire(s.db, what.schedule_id)
    if schedule is None:
        return _OVER
    tenant_id, session_id = schedule["tenant_id"], session_of(what.firing)
    message_id = f"msg_{_digest('message', what.firing)}"
    try:
        if not await sessions.message_exists(s.db, message_id):
            await _ensure_enabled(s, tenant_id)
            await _make(s, schedule, what, session_id)
            message = dict(schedule["message"])
            content = message.pop("content")
            await sessions.accept_message(s.db, tenant_id, session_id, message_id, content, message)
    except RequestError as refused:
        # Whatever was made of it before that was refused holds nothing.
        with contextlib.suppress(NotFound, Conflict):
            await _end(s, tenant_id, session_id, "cancelled")
        await schedules.note_run(s.db, schedule, what.firing, None, str(refused))
        return _OVER
    await schedules.note_run(s.db, schedule, what.firing, session_id, None)
    if s.temporal is not None and not await sessions.has_ended(s.db, session_id):
        await delivery.quietly(delivery.deliver(s.temporal, session_id, message_id))
    return _GOES_ON


async def _ensure_enabled(s: Services, tenant_id: str) -> None:
    """Raises Forbidden where an operator disabled the tenant: what its keys may not begin, its schedules do not."""
    if (await tenants.get(s.db, tenant_id))["disabled_at"] is not None:
        raise Forbidden(f"the tenant {tenant_id} is disabled; an operator can enable it", code="tenant_disabled")


async def _make(s: Services, schedule: asyncpg.Record, what: FiringIn, session_id: str) -> None:
    tenant_id = schedule["tenant_id"]
    version = await agents.usable(s.db, tenant_id, schedule["agent_name"], schedule["agent_version"])
    wanted = Wanted.model_validate(version["config"])
    config = wanted.config(wanted.model or s.engine.card.model)
    metadata = {**version["metadata"], **schedule["metadata"]}
    origin = Origin(version["name"], version["version"], schedule["schedule_id"], metadata)
    domain = domains.domain_of(tenant_id, session_id, config.kv.share, s.kv_encryption)
    seed = int(_digest("seed", what.firing)[:15], 16)
    await sessions.create(s.db, tenant_id, session_id, config.model_dump(), seed, domain=domain, origin=origin)


async def look(s: Services, what: FiringIn) -> RunOut:
    """Whether the session has come to rest; where the schedule says so, it ends then. One that failed stays for
    somebody to retry, one that waits or is paused goes on."""
    session_id = session_of(what.firing)
    row = await s.db.fetchrow(
        "SELECT s.state, s.tenant_id, coalesce(c.complete_when_idle, false) AS ends, EXISTS (SELECT FROM messages m"
        "  WHERE m.session_id = s.session_id AND m.state = 'accepted') AS waiting"
        " FROM sessions s LEFT JOIN schedules c USING (schedule_id) WHERE s.session_id = $1",
        session_id,
    )
    if row is None or row["state"] in TERMINAL:
        return _OVER
    state = State(row["state"])
    if row["waiting"] or state not in (State.IDLE, State.FAILED):
        return _GOES_ON
    if state is State.IDLE and row["ends"]:
        with contextlib.suppress(Conflict):  # it was given more to do just now
            await _end(s, row["tenant_id"], session_id, "completed")
    return _OVER


async def cancel(s: Services, what: FiringIn) -> RunOut:
    """Another run takes its place. A session that was never made stays so."""
    session_id = session_of(what.firing)
    row = await s.db.fetchrow("SELECT tenant_id FROM sessions WHERE session_id = $1", session_id)
    if row is not None:
        await _end(s, row["tenant_id"], session_id, "cancelled")
    return _OVER


async def _end(s: Services, tenant_id: str, session_id: str, how: str) -> None:
    if await sessions.request_end(s.db, tenant_id, session_id, how) not in TERMINAL and s.temporal is not None:
        await delivery.quietly(delivery.end(s.temporal, session_id, how))
