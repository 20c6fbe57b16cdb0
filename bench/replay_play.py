"""A session played against an engine: thinks, pauses with the KV policy of the runtime, and what each think took."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.evidence import Line, load_average
from bench.replay_sessions import ANSWER_TOKENS, Recorded, drawn, result_after
from bench.wake_hear import Heard, hear
from engine import EngineClient, KvState

TIERS, NONE = "tiers", "none"
MODES = (TIERS, NONE)
RUNTIME_NVME_AFTER_S = 2.0  # the runtime's own, from the tool's start; compressed like the pauses


@dataclass(frozen=True)
class Player:
    """One engine and how time passes: `scale` is what a recorded second lasts here. `foreign` is sabotage."""

    client: EngineClient
    mode: str
    scale: float
    foreign: bool = False

    async def play(self, recorded: Recorded) -> list[Line]:
        """All of a session; its think lines in order. Its pages are gone afterwards."""
        name = recorded.name
        transcript = drawn(f"{name} elsewhere" if self.foreign else name, recorded.prompt)
        lines = [_line(self.mode, name, 0, await self._hear(name, transcript, ANSWER_TOKENS, 0), None)]
        for turn, step in enumerate(recorded.steps, start=1):
            said, known = lines[-1]["tokens"], len(transcript)
            transcript = [*transcript, *said, *drawn(f"{name} says {turn}", max(0, step.out - len(said)))]
            settled = await self._hear(name, transcript, 1, known)  # the rest of what was recorded is not decoded
            async with self._pause(name, transcript):
                await asyncio.sleep(step.pause_s * self.scale)
            known = len(transcript)
            transcript += result_after(transcript, f"{name} tool {turn}", step.result)
            lines.append(await self._wake(name, turn, transcript, known, settled))
        await self.client.kv("drop", session=name, wait=True)
        return lines

    async def _wake(self, name: str, turn: int, transcript: list[int], known: int, settled: Heard) -> Line:
        """A think after a tool: the clock runs from the pause's end. What the session had where at that moment is asked
        for first and read afterwards, so that the answer is not waited for."""
        asked = asyncio.create_task(self.client.kv_state(name))
        await asyncio.sleep(0)  # it is sent
        began = time.perf_counter()
        if self.mode == TIERS:
            await self.client.kv("prefetch", session=name, token_ids=transcript[:known])
        before_s = time.perf_counter() - began
        heard = await self._hear(name, transcript, ANSWER_TOKENS, known)
        line = _line(self.mode, name, turn, heard, await asked)
        settle = {"sources": settled.sources, "preempted": settled.preempted}
        return {**line, "first_token_s": before_s + heard.first_token_s, "settle": settle}

    async def _hear(self, name: str, transcript: Sequence[int], count: int, known: int) -> Heard:
        return await hear(self.client, name, transcript, count, request_id=f"{name}-{len(transcript)}", known=known)

    @contextlib.asynccontextmanager
    async def _pause(self, name: str, transcript: Sequence[int]) -> AsyncIterator[None]:
        """The runtime's policy where there are tiers; where there are none, pages stay until someone needs the room."""
        if self.mode == NONE:
            yield
            return
        moving = asyncio.create_task(self._move_out(name, transcript))
        try:
            yield
        finally:
            moving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await moving

    async def _move_out(self, name: str, transcript: Sequence[int]) -> None:
        began = time.monotonic()
        common: dict[str, Any] = {"session": name, "token_ids": transcript, "wait": True}
        await self.client.kv("offload", tier="host", **common)
        await asyncio.sleep(max(0.0, RUNTIME_NVME_AFTER_S * self.scale - (time.monotonic() - began)))
        await self.client.kv("offload", tier="nvme", evict=True, **common)


def _line(mode: str, name: str, turn: int, heard: Heard, state: KvState | None) -> Line:
    waited = None
    if state is not None:
        pages = {"device": state.device_pages, "host": state.host_pages, "nvme": state.nvme_pages}
        waited = {"tokens": state.tokens, **pages}
    return {
        "kind": "think",
        "mode": mode,
        "session": name,
        "turn": turn,
        "first_token_s": heard.first_token_s,
        "tokens": heard.tokens,
        "sources": heard.sources,
        "preempted": heard.preempted,
        "waited": waited,
        "load": load_average(),
    }
