"""Where a session's KV waits while its tool runs, as the engine hears of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine import KvReceipt, RequestError
from runtime.steps.coming_back import ComingBack
from runtime.steps.pause import Wait, kv_pause
from runtime.store.values import Owner


class Engine:
    """Takes intents down; refuses those named in `refuses`."""

    def __init__(self, refuses: str = "") -> None:
        self.intents: list[str] = []
        self.heard = asyncio.Event()
        self._refuses = refuses

    async def client(self) -> Engine:
        return self

    async def kv(self, intent: str, **_: Any) -> KvReceipt:
        self.intents.append(intent)
        self.heard.set()
        if intent == self._refuses:
            raise RequestError("stale_epoch", "a newer owner has it")
        return KvReceipt("missing", 0, 0, 0.0, "")


def pause(engine: Engine, policy: str, coming_back: ComingBack | None = None) -> Any:
    services = SimpleNamespace(engine=engine, db=None, shares=False, coming_back=coming_back)
    attempt = SimpleNamespace(step_no=3, session=SimpleNamespace(salt=b"s", tenant_id="t"))
    return kv_pause(services, Owner("ses", 1, "n", "boot"), attempt, policy, Wait("bash", 60.0), [1, 2])  # type: ignore[arg-type]


async def failing(engine: Engine, policy: str) -> None:
    async with pause(engine, policy):
        await engine.heard.wait()
        raise LookupError("unknown outcome")


async def test_a_pin_is_released_when_the_tool_has_ended() -> None:
    engine = Engine()
    async with pause(engine, "pin"):
        await engine.heard.wait()
    assert engine.intents == ["pin", "release"]


@pytest.mark.parametrize("refuses", ["", "release"])
async def test_a_pin_is_released_when_the_step_fails_and_the_failure_is_what_is_heard(refuses: str) -> None:
    engine = Engine(refuses)
    with pytest.raises(LookupError, match="unknown outcome"):
        await failing(engine, "pin")
    assert engine.intents == ["pin", "release"]


async def test_pages_of_a_step_that_failed_stay_below() -> None:
    engine = Engine()
    with pytest.raises(LookupError):
        await failing(engine, "nvme")
    assert engine.intents == ["offload"]


async def test_pages_are_asked_back_beside_the_step_and_before_the_next_think_asks_for_anything() -> None:
    engine, coming_back = Engine(), ComingBack()
    async with pause(engine, "host", coming_back):
        await engine.heard.wait()
    assert engine.intents == ["offload"], "the step goes on at once"
    await coming_back.asked("ses")
    assert engine.intents == ["offload", "prefetch"]


async def test_an_engine_that_refuses_to_bring_pages_back_ends_no_step() -> None:
    engine, coming_back = Engine(refuses="prefetch"), ComingBack()
    async with pause(engine, "host", coming_back):
        await engine.heard.wait()
    await coming_back.asked("ses")
    assert engine.intents == ["offload", "prefetch"]
