"""Place a session on a node that can run it now."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from runtime.errors import Unavailable
from runtime.steps.services import Services
from runtime.store import placement
from workflows.contract import PlaceIn

_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Home:
    node_id: str
    queue: str
    epoch: int


async def place(s: Services, what: PlaceIn) -> Home:
    """Returns once the engine of the chosen node answers. Raises NotFound, Unavailable; whoever asks asks again."""
    placed = await placement.place(s.db, what.session_id, what.lost, known=what.known, by=(s.node_id, s.boot))
    node = placed.node
    if node.node_id == s.node_id:
        if not await s.engine.ready(timeout_s=_PATIENCE_S):
            raise Unavailable("the engine does not answer")
    elif not placed.engine_answers:
        await _answers(s, node.node_id, node.boot)
    return Home(node.node_id, node.queue, placed.epoch)


async def _answers(s: Services, node_id: str, boot: str) -> None:
    asked = time.monotonic()
    while not await placement.engine_answered_since(s.db, node_id, boot, time.monotonic() - asked):
        if time.monotonic() - asked > _PATIENCE_S:
            raise Unavailable(f"the engine of {node_id} does not answer")
        await asyncio.sleep(0.2)
