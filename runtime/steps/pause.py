"""Where the session's KV waits while its tool runs: copied eagerly, freed lazily, back at the pause's end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine import EngineError, EngineGone, KvReceipt
from runtime.errors import StaleEpoch
from runtime.steps.services import Services
from runtime.steps.sharing import share
from runtime.store import events, fleet
from runtime.store.values import Attempt, Event, Owner

_EVENT = {"pin": "kv.pinned", "offload": "kv.offloaded", "prefetch": "kv.prefetched", "drop": "kv.released"}


@dataclass(frozen=True)
class Wait:
    """What a session waits for: the policy learns how long each tool takes. `timeout_s` bounds the wait."""

    tool: str
    timeout_s: float | None
    state: str = "tool"


@contextlib.asynccontextmanager
async def kv_pause(
    s: Services, owner: Owner, attempt: Attempt, policy: str, wait: Wait, token_ids: Sequence[int]
) -> AsyncIterator[None]:
    """Hold the session's pages by `policy` (auto, pin, host, nvme, drop) for the duration of the block.

    `token_ids`: the transcript, by which an engine that was restarted finds the pages again.
    """
    pages = _Pages(s, owner, attempt, wait, token_ids)
    moving = asyncio.create_task(pages.move_out(policy))
    try:
        yield
    except BaseException:
        with contextlib.suppress(EngineError):  # the block's failure is the one to be told
            await _stopped(moving)
            if policy == "pin":  # nobody may come for it again: what a person must decide waits for days
                await pages.intend("release")
        raise
    if policy == "pin":
        await _stopped(moving)
        await pages.intend("release")
    else:
        s.coming_back.begin(owner.session_id, pages.come_back(moving, policy))


async def _stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@dataclass(frozen=True)
class _Pages:
    """The pages of one session, and what is wanted of them."""

    services: Services
    owner: Owner
    attempt: Attempt
    wait: Wait
    token_ids: Sequence[int]

    async def move_out(self, policy: str) -> None:
        pause = dataclasses.asdict(self.wait)
        if policy in ("pin", "drop"):
            await self.intend(policy, pause=pause)
        elif policy in ("host", "nvme"):
            await self.intend("offload", policy, evict=True, pause=pause)
        else:
            await self.intend("offload", "auto", pause=pause)
        if policy != "drop":
            await share(self.services, self.owner.session_id, self.owner.epoch)

    async def come_back(self, moving: asyncio.Task[None], policy: str) -> None:
        await _stopped(moving)
        if policy != "drop":
            await self.intend("prefetch")

    async def intend(
        self, intent: str, tier: str | None = None, *, evict: bool = False, pause: dict[str, Any] | None = None
    ) -> None:
        """One intent to the engine, its receipt in the log. An engine that is gone is the next think's concern."""
        try:
            client = await self.services.engine.client()
            receipt = await client.kv(
                intent,
                session=self.owner.session_id,
                epoch=self.owner.epoch,
                salt=self.attempt.session.salt,
                token_ids=self.token_ids,
                tier=tier,
                wait=intent != "prefetch",  # pages come while the result is written down; the next think waits for them
                evict=evict,
                pause=pause,
                step=self.attempt.step_no,
            )
        except EngineGone:
            return
        if intent in _EVENT and receipt.status not in ("missing", "rejected", "external"):
            await self._tell(Event(_EVENT[intent], _shown(receipt)))
            if intent != "prefetch":
                where = "none" if intent == "drop" else receipt.tier or "device"
                tenant, card = self.attempt.session.tenant_id, self.services.engine.card
                held_bytes = receipt.pages * card.page_size * card.kv_bytes_per_token
                detail = {**dataclasses.asdict(receipt), "held_bytes": held_bytes}
                await fleet.note_residency(self.services.db, self.owner.session_id, tenant, where, detail)

    async def _tell(self, event: Event) -> None:
        with contextlib.suppress(StaleEpoch):  # a newer owner tells its own story
            await events.write(
                self.services.db,
                self.owner.session_id,
                [event],
                epoch=self.owner.epoch,
                step_no=self.attempt.step_no,
            )


def _shown(receipt: KvReceipt) -> dict[str, Any]:
    """Without a tier where there is none to name."""
    return {name: value for name, value in dataclasses.asdict(receipt).items() if value is not None}
