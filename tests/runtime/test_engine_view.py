"""What `tenuto engine` shows."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from rich.console import Console

from engine import EngineClient
from runtime import engine_view
from tests.engine.conftest import share_native
from tests.engine.process import Process, engine
from tests.engine.tiny import write_tiny


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Process]:
    root = tmp_path_factory.mktemp("engine")
    share_native(root)
    async with engine(write_tiny(root / "tiny.gguf"), root) as process:
        yield process


def shown(card: object, stats: dict[str, object]) -> str:
    out = io.StringIO()
    Console(width=100, file=out).print(engine_view.view(card, stats))  # type: ignore[arg-type]
    return out.getvalue()


async def test_an_engine_that_did_nothing_yet_shows_dashes(served: Process) -> None:
    text = shown(*await engine_view.ask(str(served.socket)))
    assert "books: ok" in text
    assert text.count("-") >= 20


async def test_tokens_appear_by_where_they_came_from(served: Process) -> None:
    async with await EngineClient.connect(served.socket) as client:
        for _ in range(2):
            async for _event in client.generate(request_id="r", session="s", token_ids=[5] * 40, max_tokens=2):
                pass
    card, stats = await engine_view.ask(str(served.socket))
    lines = {line.split("  ")[0].strip(): line for line in shown(card, stats).splitlines()}
    assert " 48 " in lines["computed"]
    assert " 32 " in lines["reused"]


def test_where_no_engine_answers_a_sentence_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "runtime.cli", "engine", "--address", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"no engine answers at {tmp_path}/none: No such file or directory" in done.stderr


async def test_json_is_card_and_stats(served: Process) -> None:
    card, stats = await engine_view.ask(str(served.socket))
    assert json.loads(json.dumps({**card.as_message(), **stats}))["metrics"]["step_s"]["count"] == stats["steps"]
