"""A node that is to take no more sessions: its steps end or move on, its pages and workspaces are left for others.

    asked        by an operator (`tenuto node drain`), or by the signal that ends the process
    no step      begins here any more; those that run have a deadline, then they are handed over at the last durable
                 token, or with their call still running in its sandbox
    pages        are copied to the shared store
    sandboxes    in which nothing runs are released: a snapshot was taken after each call
    workflows    are told, so that the next step of each is placed anew

Nothing of that is needed for a session to go on: it is what makes going on cheap.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from temporalio.client import Client
from temporalio.service import RPCError

from runtime.errors import StaleEpoch, TenutoError
from runtime.steps import Services
from runtime.steps.resting import release
from runtime.steps.sharing import share
from runtime.store import events, fleet, placement, sandboxes
from runtime.store.values import Event
from sandbox import Handle
from workflows.contract import node_queue, workflow_id
from workflows.session import SessionWorkflow

log = logging.getLogger(__name__)

STEPS_END_WITHIN_S: Final = 60.0
HAND_OVER_WITHIN_S: Final = 5.0
# On the way out: `tenuto up` waits ten seconds for a process.
STOP_WITHIN_S: Final = 3.0
STOP_HAND_OVER_WITHIN_S: Final = 1.0
STOP_SHARE_WITHIN_S: Final = 3.0
_AT_ONCE: Final = 4


class Drain:
    """At most one at a time, in the background."""

    def __init__(self, services: Services, client: Client) -> None:
        self._s, self._client = services, client
        self._task: asyncio.Task[None] | None = None

    @property
    def began(self) -> bool:
        return self._task is not None

    def begin(self) -> None:
        """Start draining, unless that has begun."""
        if self._task is None:
            log.warning("node %s drains", self._s.node_id)
            self._task = asyncio.create_task(self._whole())

    async def on_the_way_out(self) -> None:
        """The process was told to stop. Without another node to go on with, its sessions wait for it to come back, and
        its pages stay where they are."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await fleet.ask_to_drain(self._s.db, self._s.node_id)
            if not await placement.others_open(self._s.db, self._s.node_id):
                return
            await self._s.leaving.empty(STOP_WITHIN_S, STOP_HAND_OVER_WITHIN_S)
            async with asyncio.timeout(STOP_SHARE_WITHIN_S):
                await self._move_all()
        except (TenutoError, TimeoutError) as error:
            log.warning("node %s stops before everything was handed over: %s", self._s.node_id, error)

    async def _whole(self) -> None:
        try:
            late = await self._s.leaving.empty(STEPS_END_WITHIN_S, HAND_OVER_WITHIN_S)
            moved = await self._move_all()
            await self._s.pool.aclose()
            await fleet.note_drained(self._s.db, self._s.node_id, self._s.boot)
        except Exception:
            log.exception("draining failed")
            return
        log.warning("node %s is drained: %d sessions, %d steps handed over", self._s.node_id, moved, late)

    async def _move_all(self) -> int:
        rows = await fleet.sessions_on(self._s.db, self._s.node_id)
        slots = asyncio.Semaphore(_AT_ONCE)

        async def one(row: dict[str, Any]) -> None:
            async with slots:
                await self._move(row)

        await asyncio.gather(*(one(row) for row in rows))
        return len(rows)

    async def _move(self, row: dict[str, Any]) -> None:
        session_id: str = row["session_id"]
        receipt = await share(self._s, session_id, row["epoch"])
        if receipt is not None and receipt.status == "accepted":
            about = {"tier": "shared", "pages": receipt.pages, "bytes": receipt.bytes}
            await self._tell(row, Event("kv.offloaded", about))
        handle = await sandboxes.give_up(self._s.db, session_id, row["epoch"])
        if handle is not None:
            await release(self._s.driver, Handle.from_json(handle))
        await self._say_to(session_id)

    async def _tell(self, row: dict[str, Any], event: Event) -> None:
        try:
            await self._s.db.run(lambda c: events.append(c, row["session_id"], [event], epoch=row["epoch"]))
        except StaleEpoch:
            return  # it has moved on already

    async def _say_to(self, session_id: str) -> None:
        handle = self._client.get_workflow_handle(workflow_id(session_id))
        try:
            await handle.signal(SessionWorkflow.leave, node_queue(self._s.node_id, self._s.boot))
        except RPCError as error:
            log.info("%s has no workflow to tell: %s", session_id, error)
