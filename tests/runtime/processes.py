"""What tests of processes need: a child in a line, waiting for its end, a stack in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil

from runtime.settings import Settings
from runtime.supervisor import Child
from runtime.up import Component, Stack, postgres, temporal, up

READY = "print('{\"ready\": true}', flush=True);"
SERVE = f"import time; {READY} time.sleep(600)"
PATIENCE_S = 240.0  # a net, on machines that do much else


def python(name: str, code: str, **how: Any) -> Child:
    """A child that runs a line of Python."""
    return Child(name, [sys.executable, "-S", "-c", code], {"PATH": os.defpath}, **how)


def is_gone(pid: int) -> bool:
    """Ended, waited for or not."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def until_gone(*pids: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not all(map(is_gone, pids)):
            await asyncio.sleep(0.01)


class Events:
    """Collects what a supervisor tells, and waits for more of it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self._more = asyncio.Event()

    def __call__(self, kind: str, **data: Any) -> None:
        assert data["message"]
        self.seen.append((kind, data))
        self._more.set()

    def of(self, kind: str, name: str | None = None) -> list[dict[str, Any]]:
        return [data for seen, data in self.seen if seen == kind and name in (None, data.get("name"))]

    async def wait(self, kind: str, name: str | None = None, count: int = 1) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.of(kind, name)) < count:
                self._more.clear()
                await self._more.wait()
        return self.of(kind, name)[count - 1]


def stand_in(name: str) -> Component:
    async def start(stack: Stack) -> None:
        await stack.supervisor.start(python(name, SERVE))

    return start


SETS: dict[str, tuple[Component, ...]] = {
    "small": (stand_in("one"), stand_in("two")),
    "embedded": (postgres, temporal, stand_in("node")),
}


class UpProcess:
    """`up` with stand-ins in its own process, whose events arrive here."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process, self.events = process, Events()
        self._reader = asyncio.create_task(self._read())
        self.refusal = ""

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            event = json.loads(line)
            kind = event.pop("kind")
            self.refusal = event["message"] if kind == "refused" else self.refusal
            self.events(kind, **event)

    async def signal(self, number: int) -> int:
        self.process.send_signal(number)
        return await self.end()

    async def end(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            await self._reader
            return await self.process.wait()


@contextlib.asynccontextmanager
async def up_process(home: Path, which: str) -> AsyncIterator[UpProcess]:
    """Does not wait until it is ready. Ends it the way it is meant to end, if the test has not."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.runtime.processes", str(home), which),
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
    )
    running = UpProcess(process)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
        await running.end()


def _print(kind: str, **data: Any) -> None:
    print(json.dumps({"kind": kind, **data}), flush=True)


def main(home: str, which: str) -> None:
    from runtime.errors import StartupError

    settings = Settings.load(overrides={"TENUTO_HOME": home})
    try:
        asyncio.run(up(settings, _print, components=SETS[which]))
    except StartupError as error:
        _print("refused", message=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
