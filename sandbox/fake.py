"""A sandbox that isolates nothing: the real agent as an ordinary process in a temporary folder. For tests only.

It keeps every promise of the contract but isolation: journal, epochs, killing of whole trees, snapshots, outliving its
maker. Commands see the host; /work is not mounted, so they must use paths relative to the folder they start in.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from types import MappingProxyType

from . import host, image
from .agent.workspace import Workspace
from .driver import Sandbox
from .errors import CreateFailed, SandboxLost
from .launch import confirmed, listen, pipe_with, refuse_image
from .spec import Description, Handle, SandboxSpec

BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from agent.main import main; main()"
ORPHAN = '"$@" </dev/null >/dev/null 2>"$0" & echo $!'


class FakeDriver:
    """Made by hand, never chosen: `FakeDriver(run_dir)`."""

    name = "fake"
    isolation = "none: tools run on this host as this user; for tests only"

    def __init__(self, run_dir: Path) -> None:
        self.home = host.home_id(run_dir)
        self.records = host.Records(run_dir / "fake")

    async def create(self, spec: SandboxSpec) -> Handle:
        handle = await asyncio.to_thread(self._create, spec)
        return await confirmed(self, handle, self.records.folder(spec.sandbox_id) / "agent.log")

    def _create(self, spec: SandboxSpec) -> Handle:
        host.must_fit(spec.limits)
        refuse_image(spec, self.name)
        folder = self.records.make(spec.sandbox_id)
        try:
            return self._start(spec, folder)
        except BaseException as error:
            self._remove(spec.sandbox_id)
            if isinstance(error, OSError | subprocess.SubprocessError):
                raise CreateFailed(f"the sandbox {spec.sandbox_id} could not be made: {error}") from error
            raise

    def _start(self, spec: SandboxSpec, folder: Path) -> Handle:
        (folder / "work").mkdir()
        token = secrets.token_hex(32)
        with listen(folder / "agent.sock") as listener:
            config = {
                "token": token, "epoch": spec.epoch, "work": str(folder / "work"), "ttl_s": spec.ttl_s,
                "outside_only": False, "memory_bytes": spec.limits.memory_bytes, "seccomp": "",
                "listen_fd": listener.fileno(), "oom_counters": [], "limits": {},
                "nice": 5, "tmpfs": [], "max_files": 0,
            }  # fmt: skip
            reader = pipe_with(json.dumps(config).encode())
            command = [sys.executable, "-I", "-S", "-B", "-c", BOOT, str(image.AGENT_SOURCE.parent)]
            command += ["tenuto-agent", self.home, spec.sandbox_id, str(reader)]
            try:
                answer = subprocess.run(
                    ["/bin/sh", "-c", ORPHAN, str(folder / "agent.log"), *command],
                    stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/",
                    pass_fds=(reader, listener.fileno()), start_new_session=True, timeout=20, check=True,
                )  # fmt: skip
            finally:
                os.close(reader)
        pid = int(answer.stdout)
        start = host.start_time(pid)
        self.records.write(spec.sandbox_id, {"sandbox_id": spec.sandbox_id, "pid": pid, "start": start})
        return Handle(
            driver=self.name, sandbox_id=spec.sandbox_id, session_id=spec.session_id, socket=str(folder / "agent.sock"),
            pid=pid, start=start, boot=host.boot_id(), epoch=spec.epoch, limits=spec.limits, token=token,
            extra=MappingProxyType({**spec.labels, "tenant": spec.tenant_id, "environment": "{}"}),
        )  # fmt: skip

    async def attach(self, handle: Handle, epoch: int | None = None) -> Sandbox:
        if not await host.settled(handle):
            raise SandboxLost(f"the sandbox {handle.sandbox_id} is gone: its agent no longer runs")
        return await Sandbox(handle, epoch).open()

    async def release(self, handle: Handle) -> None:
        await asyncio.to_thread(self._remove, handle.sandbox_id)

    async def found(self) -> list[str]:
        return sorted({*self.records, *(sandbox_id for sandbox_id, _, _ in host.agents(self.home))})

    async def reap(self, live: Collection[str], among: Collection[str] | None = None) -> list[str]:
        dead = sorted(set(await self.found() if among is None else among).difference(live))
        for sandbox_id in dead:
            await asyncio.to_thread(self._remove, sandbox_id)
        return dead

    def _remove(self, sandbox_id: str) -> None:
        """Without a pid namespace, killing the agent alone would leave its tools: the whole tree goes."""
        roots = {pid for found, pid, _ in host.agents(self.home) if found == sandbox_id}
        host.end_tree(roots)
        folder = self.records.folder(sandbox_id)
        if folder.is_dir():  # whatever tools made in it: a tree may be deeper than any path, and deny its owner
            place = Workspace(str(folder))
            fd = place.open_root(os.O_PATH)
            try:
                for name in os.listdir(folder):
                    place.remove_at(fd, name)
            finally:
                os.close(fd)
        shutil.rmtree(folder, ignore_errors=True)

    async def describe(self) -> Description:
        enforced = {"memory_bytes": "watchdog", "pids": None, "cpu": None, "workspace_bytes": None, "tmp_bytes": None}
        return Description(
            backend=self.name,
            isolation=self.isolation,
            limits_enforced=MappingProxyType({**enforced, "output_bytes": "agent", "call_timeout_s": "agent"}),
            notes=("nothing is isolated",),
        )
