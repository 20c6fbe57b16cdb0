"""A session over the Triton backend in the interpreter: its KV leaves, its engine is killed, and it goes on."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import asyncpg
import numpy as np
import pytest
import tenuto

from engine.client import EngineClient
from runtime.demo.run import demo_environment
from runtime.demo.stack import Stack, running_stack
from tests.engine.process import engine, hear
from tests.engine.tiny import write_tiny

PROMPT = [3 + (5 * i) % 250 for i in range(37)]
KNOWN = 32  # tokens in whole pages


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For engines that a test starts."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def talkative(tmp_path: Path) -> Path:
    """A tiny model with room for a session, that never says its last word."""
    rows = np.random.default_rng(0).standard_normal((265, 64)).astype(np.float32)
    rows[2] = 0
    return write_tiny(tmp_path / "long.gguf", llama__context_length=8192, tensors={"token_embd.weight": rows})


async def test_what_went_to_nvme_is_restored_after_a_kill_and_the_tokens_are_those_of_the_undisturbed_run(
    talkative: Path, tmp_path: Path
) -> None:
    async with engine(talkative, tmp_path, backend="triton", kv_tokens=256) as process:
        client = await EngineClient.connect(process.socket)
        assert (client.card.backend, client.card.mode) == ("triton", "exact")
        whole = await hear(client, "s", PROMPT, 8)
        for tier in ("host", "nvme"):
            receipt = await client.kv("offload", session="s", tier=tier, wait=True)
            assert receipt.status == "accepted"
        assert await process.stop(signal.SIGKILL) == -signal.SIGKILL
        await client.close()
    (tmp_path / "arena").unlink()  # so that only NVMe has it
    async with engine(talkative, tmp_path, backend="triton", kv_tokens=256) as process:
        async with await EngineClient.connect(process.socket) as client:
            left = PROMPT + whole.tokens[:4]
            resumed = await hear(client, "s", left, 4, replay=4, known_tokens=KNOWN, epoch=1)
            assert whole.tokens[:4] + resumed.tokens == whole.tokens
            assert resumed.prefill is not None
            assert (resumed.prefill.nvme, resumed.prefill.recomputed) == (KNOWN, 0)
            assert (await client.stats())["integrity"] == "ok"


@pytest.mark.soak
@pytest.mark.stack
@pytest.mark.sandbox
async def test_a_session_whose_engine_is_killed_while_its_tool_runs_says_what_it_says_undisturbed(
    talkative: Path,
) -> None:
    """Think, tool in a sandbox, offload to host memory and NVMe, kill -9 of the engine, restore, think."""
    home = Path(tempfile.mkdtemp(prefix="tenuto-test-"))
    environment = demo_environment(home, str(talkative))
    environment |= {"TENUTO_ENGINE_BACKEND": "triton", "TENUTO_KV_TOKENS": "4096"}
    async with running_stack(environment, lambda _: None) as stack:
        async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
            calm, _ = await told(stack, client, kills=False)
            rough, restored = await told(stack, client, kills=True)
            assert rough == calm
            assert restored["recomputed"] == 0
            assert restored["restored_pages"] > 20
    shutil.rmtree(home)


async def told(stack: Stack, client: Any, *, kills: bool) -> tuple[list[int], dict[str, int]]:
    """The whole transcript as tokens, and where the last think had its prompt from."""
    nothing = {"type": "object", "properties": {}}
    tool = {"name": "wait", "description": "Wait.", "command": ["sleep", "4"], "parameters": nothing}
    restored = 0
    session = await client.sessions.create(system="Wait.", tools=[tool], limits={"max_think_tokens": 80}, seed=3)
    await session.send("Go.", tool_choice="required", max_tool_rounds=1)
    async for event in session.stream():
        if event.type == "kv.offloaded" and event.data["tier"] == "host":
            await to_nvme(stack, session.id)
            if kills:
                stack.kill("engine")
        if event.type in ("kv.prefetched", "kv.restored"):
            restored += event.data.get("pages", 0) + event.data.get("tokens", 0) // 16
        if event.type == "session.idle":
            break
    think = [step for step in await session.steps() if step["kind"] == "think"][-1]
    return await session.token_ids(), {**think["output"]["kv"], "restored_pages": restored}


async def to_nvme(stack: Stack, session: str) -> None:
    """What the operator's demotion does, for pages that host memory has already."""
    database = await asyncpg.connect(stack.postgres_dsn)
    epoch, salt = await database.fetchrow(
        "SELECT epoch, salt FROM sessions JOIN tenants USING (tenant_id) WHERE session_id = $1", session
    )
    await database.close()
    async with await EngineClient.connect(stack.engine_address) as engine:
        assert engine.card.backend == "triton"
        receipt = await engine.kv("offload", session=session, epoch=epoch, salt=salt, tier="nvme", wait=True)
        assert receipt.status == "accepted"
        assert (await engine.kv_state(session)).nvme_pages > 0
