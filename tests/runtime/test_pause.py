"""Where a session's KV waits while its tool runs, as the engine hears of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine import KvReceipt, RequestError
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


def pause(engine: Engine, policy: str) -> Any:
    services = SimpleNamespace(engine=engine, db=None)
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
