"""A whole stack as real processes, for the demo, the benches and the tests: start it, kill parts of it, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from runtime.errors import StartupError
from runtime.settings import Settings
from runtime.supervisor import die_with

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stack:
    """A running `tenuto up`. `pids` are read anew each time, since what dies is started again."""

    settings: Settings
    process: asyncio.subprocess.Process

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.settings.home / "up.json").read_text())
        return state

    @property
    def api_url(self) -> str:
        return str(self.state()["api_url"])

    @property
    def api_key(self) -> str:
        return (self.settings.home / "admin.key").read_text().strip()

    @property
    def postgres_dsn(self) -> str:
        return str(self.state()["dsn"])

    @property
    def engine_address(self) -> str:
        return str(self.state()["engine"])

    @property
    def engine_addresses(self) -> dict[str, str]:
        """By node."""
        return dict(self.state()["engines"])

    def pid(self, name: str) -> int | None:
        pid = self.state()["processes"].get(name)
        return pid if pid and psutil.pid_exists(pid) else None

    def kill(self, name: str) -> int:
        """SIGKILL one part, as a power cut would. Returns the pid that is gone."""
        return self.signal(name, signal.SIGKILL)

    def signal(self, name: str, number: int) -> int:
        """Any signal to one part. Returns its pid."""
        pid = self.pid(name)
        if pid is None:
            raise StartupError(f"{name} is not running; no signal was sent")
        os.kill(pid, number)
        return pid

    async def restarted(self, name: str, old_pid: int) -> int:
        """The new pid of a part that was killed."""
        while True:
            pid = self.pid(name)
            if pid is not None and pid != old_pid:
                return pid
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def running_stack(
    environment: Mapping[str, str],
    say: Say,
    argv: Sequence[str] = ("runtime.cli", "up", "--json"),
    *,
    cwd: Path | None = None,
) -> AsyncIterator[Stack]:
    """Start `tenuto up` with these TENUTO_* variables over the present ones; stop it on the way out.

    `argv`: a module that stands in for `tenuto up`, and its arguments. `cwd`: where another release is unpacked, which
    runs with that as PYTHONPATH.
    """
    variables = {**os.environ, **environment}
    settings = settings_with(environment)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *argv,
        env=variables,
        cwd=cwd,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with(os.getpid(), signal.SIGTERM),  # whoever started it may be killed
    )
    reading = None
    try:
        reading = asyncio.create_task(_until_ready(process, say))
        await reading
        draining = asyncio.create_task(_drain(process))
        yield Stack(settings, process)
        draining.cancel()
    finally:
        await _stop(process)


def settings_with(environment: Mapping[str, str]) -> Settings:
    """What a stack with these variables over the present ones is asked for."""
    variables = {**os.environ, **environment}
    return Settings.load({k: v for k, v in variables.items() if k.startswith("TENUTO_") or k in _PATHS})


_PATHS = ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR")


async def _until_ready(process: asyncio.subprocess.Process, say: Say) -> None:
    assert process.stdout is not None
    last = ""
    async for line in process.stdout:
        event = json.loads(line)
        if event["kind"] == "ready":
            return
        last = event.get("message", last)
        say(last)
    await process.wait()
    raise StartupError(f"the stack did not start: {last or f'exit status {process.returncode}'}")


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    async for _ in process.stdout:
        pass


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    await process.wait()


def leftovers(stack: Stack, pids: Mapping[str, int]) -> list[str]:
    """What a stopped stack left on the machine: processes, sockets, shared memory. Empty when all is well."""
    found = [f"process {name} ({pid})" for name, pid in pids.items() if psutil.pid_exists(pid)]
    home = str(stack.settings.home)
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if home in command and process.info["pid"] != os.getpid():
            found.append(f"process {process.info['pid']}: {command[:80]}")
    for path in (stack.settings.run_dir, stack.settings.host_arena.parent):
        if Path(path).exists():
            found.append(f"directory {path}")
    return found
