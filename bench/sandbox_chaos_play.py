"""One controller of `bench.sandbox_chaos`: makes sandboxes one after another and treats each as its fate says, until
a fate ends this process too. Says what it did as one JSON object per line."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from sandbox import Driver, Limits, SandboxError, SandboxSpec
from sandbox.bubblewrap import BubblewrapDriver
from sandbox.docker import DockerDriver

T = TypeVar("T")
TRIALS = 40
FATES = ("release", "abandon", "kill-agent", "die", "die-young")
LIMITS = Limits(memory_bytes=64 << 20, pids=32, workspace_bytes=4 << 20, tmp_bytes=1 << 20)
# Leaves a process behind that is told apart from every other on the machine by its argument.
CALL = "echo work > file; (setsid sleep {mark} &) ; sleep {mark} & echo begun; wait"


async def main(backend: str, home: Path, run_dir: Path, first: int, last: int, seed: int, mark: str) -> None:
    driver = await _patiently(lambda _: open_driver(backend, home, run_dir), first)
    for number in range(first, last):
        fate = fate_of(seed, number)
        await _patiently(lambda trial: _play(driver, number, trial, fate, mark, run_dir / backend), number)  # noqa: B023


async def _patiently(do: Callable[[int], Awaitable[T]], number: int) -> T:
    """Again while the engine is away; the last refusal is raised."""
    for trial in range(TRIALS):
        try:
            return await do(trial)
        except SandboxError as error:
            print(json.dumps({"kind": "refused", "number": number, "why": str(error)[:200]}), flush=True)
            await asyncio.sleep(0.25)
    return await do(TRIALS)


async def open_driver(backend: str, home: Path, run_dir: Path) -> Driver:
    return await (DockerDriver if backend == "docker" else BubblewrapDriver).open(home, run_dir)


def fate_of(seed: int, number: int) -> str:
    """Every fate comes once in as many sandboxes as there are fates, in an order that the seed decides."""
    rounds, place = divmod(number, len(FATES))
    return random.Random(seed * 1_000_003 + rounds).sample(FATES, len(FATES))[place]


async def _play(driver: Driver, number: int, trial: int, fate: str, mark: str, records: Path) -> None:
    name = f"chaos-{number}-{trial}"
    if fate == "die-young":
        if trial == 0:
            _say(number, fate)
        _die_after_the_start_of(records / name, random.Random(number).uniform(0, 0.3))
    begun = time.monotonic()
    handle = await driver.create(SandboxSpec(name, f"session-{number}", "tenant", 1, LIMITS))
    took_ms = round((time.monotonic() - begun) * 1000, 1)
    sandbox = await driver.attach(handle)
    call = await sandbox.start("k", ["bash", "-c", CALL.format(mark=mark)])
    async for _ in call:
        break
    if fate == "die-young":
        await asyncio.sleep(60)  # the killer comes later than the start was done
    _say(number, fate, ms=took_ms)
    if fate == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "kill-agent":
        os.kill(handle.pid, signal.SIGKILL)
        assert (await call.result()).reason == "lost"
    if fate == "release":
        await driver.release(handle)
    await sandbox.close()


def _die_after_the_start_of(folder: Path, wait_s: float) -> None:
    def watch() -> None:
        while not folder.exists():
            time.sleep(0.001)
        time.sleep(wait_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _say(number: int, fate: str, **more: object) -> None:
    print(json.dumps({"kind": "sandbox", "number": number, "fate": fate, **more}), flush=True)


if __name__ == "__main__":
    kind, home, run_dir, first, last, seed, mark = sys.argv[1:]
    asyncio.run(main(kind, Path(home), Path(run_dir), int(first), int(last), int(seed), mark))
