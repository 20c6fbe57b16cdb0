"""Doing to a running stack what a plan says, and undoing what does not last."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from typing import Any

import psutil

from bench.faults_bed import Bed, filled
from bench.faults_plan import Fault
from runtime.errors import Unavailable
from runtime.store import Database, sandboxes

Struck = dict[str, Any]


class Striker:
    """Strikes until `budget` faults have struck. One fault of a name at a time."""

    def __init__(self, bed: Bed, budget: int) -> None:
        self.bed = bed
        self.budget = budget
        self.struck: list[Struck] = []
        self._busy: set[str] = set()
        self._lasting: set[asyncio.Task[None]] = set()

    async def strike(self, fault: Fault, session_id: str) -> Struck | None:
        """Returns when the fault has begun, with what it hit; None if there is nothing to hit now."""
        if self.budget <= 0 or fault.name in self._busy:
            return None
        self.budget -= 1
        self._busy.add(fault.name)
        struck: Struck = {**fault.as_line(), "session": session_id, "struck_at": time.time(), "recovered_s": None}
        begun: asyncio.Future[dict[str, int] | None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(fault, session_id, begun))
        self._lasting.add(task)
        task.add_done_callback(self._lasting.discard)
        pids = await begun
        if pids is None:
            self.budget += 1
            return None
        self.struck.append({**struck, "pids": pids})
        return self.struck[-1]

    async def settled(self) -> None:
        """When nothing is stopped, full or cut any more."""
        while self._lasting:
            await asyncio.gather(*self._lasting)

    async def _run(self, fault: Fault, session_id: str, begun: asyncio.Future[dict[str, int] | None]) -> None:
        try:
            if fault.kind == "full":
                await self._fill(fault, begun)
            elif fault.kind == "cut":
                await self._cut(fault, begun)
            elif fault.target == "dockerd":
                await self._kill_dockerd(fault, begun)
            else:
                pids = await self._pids(fault, session_id)
                if fault.kind == "kill":
                    _signal(pids, signal.SIGKILL)
                else:
                    await _stop(pids, fault.for_s, begun)
                if not begun.done():
                    begun.set_result(pids or None)
        finally:
            self._busy.discard(fault.name)
            if not begun.done():
                begun.set_result(None)

    async def _pids(self, fault: Fault, session_id: str) -> dict[str, int]:
        if fault.target == "sandbox":
            try:
                async with Database(self.bed.stack.postgres_dsn, patience_s=5.0) as db:
                    row = await sandboxes.of_session(db, session_id)
            except Unavailable:  # another fault has Postgres
                return {}
            return {"sandbox": row["handle"]["pid"]} if row and row["handle"] else {}
        pids = self.bed.stack.state()["processes"]
        names = sorted(name for name in pids if re.fullmatch(rf"{fault.target}(-\d+)?", name))
        if not names:
            return {}
        name = names[int(fault.pick * len(names))]
        hit = {name: int(pids[name])} if psutil.pid_exists(pids[name]) else {}
        if hit and fault.kind == "stop" and fault.target == "postgres":  # its children do the work
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(pids[name]).children(recursive=True)
                hit |= {f"{name}/{child.pid}": child.pid for child in children}
        return hit

    async def _fill(self, fault: Fault, begun: asyncio.Future[dict[str, int] | None]) -> None:
        with filled(self.bed.disks[fault.target]):
            begun.set_result({"disk": 0})
            await asyncio.sleep(fault.for_s)

    async def _cut(self, fault: Fault, begun: asyncio.Future[dict[str, int] | None]) -> None:
        bridge = self.bed.bridges[fault.target]
        bridge.cut()
        begun.set_result({"bridge": 0})
        await asyncio.sleep(fault.for_s)
        bridge.mend()

    async def _kill_dockerd(self, fault: Fault, begun: asyncio.Future[dict[str, int] | None]) -> None:
        dockerd = self.bed.dockerd
        assert dockerd is not None
        pid = dockerd.pid
        if pid is None:
            return
        await asyncio.to_thread(dockerd.kill)
        begun.set_result({"dockerd": pid})
        await asyncio.sleep(fault.for_s)
        dockerd.start()
        await asyncio.to_thread(dockerd.answers)


async def _stop(pids: dict[str, int], for_s: float, begun: asyncio.Future[dict[str, int] | None]) -> None:
    _signal(pids, signal.SIGSTOP)
    begun.set_result(pids or None)
    try:
        await asyncio.sleep(for_s if pids else 0)
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: dict[str, int], number: signal.Signals) -> None:
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
