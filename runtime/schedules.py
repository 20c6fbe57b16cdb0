"""Temporal's schedules as the record says that they are: told at once, and again where they were lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

import asyncpg
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleSpec,
    ScheduleState,
    ScheduleUpdate,
)
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from runtime.store import Database
from runtime.store import schedules as store
from workflows.contract import SESSIONS_QUEUE, FiringIn
from workflows.scheduled import ScheduledRunWorkflow

log = logging.getLogger(__name__)

PREFIX: Final = "schedule/"
RPC_TIMEOUT: Final = timedelta(seconds=3)  # the row is locked meanwhile
LOOK_EVERY_S: Final = 2.0
COMPARE_EVERY: Final = 15  # looks
OVERLAPS: Final[Mapping[str, ScheduleOverlapPolicy]] = {
    "skip": ScheduleOverlapPolicy.SKIP,
    "buffer_one": ScheduleOverlapPolicy.BUFFER_ONE,
    "cancel_other": ScheduleOverlapPolicy.CANCEL_OTHER,
    "allow_all": ScheduleOverlapPolicy.ALLOW_ALL,
}


async def apply(client: Client, db: Database, schedule_id: str, *, again: bool = False) -> None:
    """Let Temporal have what the row says. Raises RPCError."""

    async def tell(row: asyncpg.Record) -> None:
        handle = client.get_schedule_handle(PREFIX + schedule_id)
        if row["deleted_at"] is not None:
            try:
                await handle.delete(rpc_timeout=RPC_TIMEOUT)
            except RPCError as error:
                if error.status is not RPCStatusCode.NOT_FOUND:
                    raise
            return
        wanted = _schedule(row)
        try:
            await client.create_schedule(handle.id, wanted, rpc_timeout=RPC_TIMEOUT)
        except ScheduleAlreadyRunningError:
            await handle.update(lambda _: ScheduleUpdate(wanted), rpc_timeout=RPC_TIMEOUT)

    await store.apply(db, schedule_id, tell, again=again)


def _schedule(row: asyncpg.Record) -> Schedule:
    timing = row["timing"]
    return Schedule(
        action=ScheduleActionStartWorkflow(
            ScheduledRunWorkflow.run,
            FiringIn(row["schedule_id"]),
            id=f"scheduled/{row['schedule_id']}",  # Temporal adds the time
            task_queue=SESSIONS_QUEUE,
        ),
        spec=_spec(timing),
        policy=SchedulePolicy(
            overlap=OVERLAPS[timing["overlap"]], catchup_window=timedelta(seconds=timing["catchup_s"])
        ),
        state=ScheduleState(paused=row["paused_at"] is not None),
    )


def _spec(timing: Mapping[str, Any]) -> ScheduleSpec:
    jitter = timedelta(seconds=timing["jitter_s"]) if timing["jitter_s"] else None
    if timing["every_s"] is not None:
        every = [ScheduleIntervalSpec(every=timedelta(seconds=timing["every_s"]))]
        return ScheduleSpec(intervals=every, jitter=jitter, time_zone_name=timing["time_zone"])
    return ScheduleSpec(cron_expressions=[timing["cron"]], jitter=jitter, time_zone_name=timing["time_zone"])


async def next_times(client: Client, schedule_id: str) -> list[datetime] | None:
    """When it fires next; None where Temporal does not say."""
    try:
        about = await client.get_schedule_handle(PREFIX + schedule_id).describe(rpc_timeout=RPC_TIMEOUT)
    except RPCError:
        return None
    return list(about.info.next_action_times[:5])


async def trigger(client: Client, schedule_id: str, firing: str) -> None:
    """One run now, whatever its timing says. Repeated with the same firing: a no-op. Raises RPCError."""
    try:
        await client.start_workflow(
            ScheduledRunWorkflow.run,
            FiringIn(schedule_id, firing),
            id=firing,
            task_queue=SESSIONS_QUEUE,
            rpc_timeout=RPC_TIMEOUT,
        )
    except WorkflowAlreadyStartedError:
        return


async def compare(client: Client, db: Database) -> None:
    """What Temporal lost it is given again, and what it should have no more is deleted. Raises RPCError."""
    wanted = await store.living(db)
    found = {
        one.id.removeprefix(PREFIX)
        async for one in await client.list_schedules(rpc_timeout=RPC_TIMEOUT)
        if one.id.startswith(PREFIX)
    }
    for schedule_id in sorted(wanted - found):
        log.info("schedule %s is not known to Temporal, and is made again", schedule_id)
        await apply(client, db, schedule_id, again=True)
    for schedule_id in sorted(found - wanted):
        if not await store.exists(db, schedule_id):
            continue  # of another installation that uses this Temporal
        await apply(client, db, schedule_id, again=True)


async def reconcile_forever(client: Client, db: Database) -> None:
    look = 0
    while True:
        try:
            for schedule_id in await store.to_apply(db):
                await apply(client, db, schedule_id)
            if look % COMPARE_EVERY == 0:
                await compare(client, db)
            look += 1
        except RPCError as error:
            log.info("schedules are not told to Temporal yet: %s", error)
        except Exception:
            log.exception("schedules could not be told to Temporal; trying again")
        await asyncio.sleep(LOOK_EVERY_S)
