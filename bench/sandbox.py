"""Sandboxes beside the docker command: a claim and `docker run`, a call and `docker exec`, a snapshot and
`docker commit`, turn about in one run; and every known way out.

    python -m bench.sandbox --evidence DIR

Both sides have the same image and the same hardening. A claim lasts from the request to the first byte of what
`python -c` prints in a sandbox of a pool, which every round drains and which is filled again meanwhile; `docker run`
to the same byte. A snapshot is of 5,000 files of 10 KB, 10 of them changed, every blob synced to the disk; Docker's
container has the same files in an image, the same ten changed. Restores put that workspace into another sandbox.

`--sabotage` must turn it red: `no-pool` keeps no spares, `slow-call` sleeps in every call, `stale` snapshots what is
not there any more, `open` adds a way out that exists, `alter` improves the evidence.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path

import click

from bench import evidence
from bench.evidence import Line
from bench.sandbox_docker import FIRST, Beside
from bench.sandbox_figures import figures, misses, report
from bench.verdict import show, tell
from sandbox import BlobStore, Budget, Driver, Handle, Limits, Pool, Sandbox, SandboxSpec, Snapshot, choose_driver
from sandbox.bubblewrap import BubblewrapDriver
from sandbox.bubblewrap import why_not as no_bubblewrap
from sandbox.docker import DockerDriver
from sandbox.docker import why_not as no_docker
from tests.sandbox.escapes import Escape, attempt, every_escape
from tests.sandbox.witness import witness

FOLDERS, FILES, FILE_BYTES, CHANGED = 50, 100, 10_000, 10
FILL = f"""
import os, random
chance = random.Random(6)
for folder in range({FOLDERS}):
    os.makedirs(f"/work/{{folder}}", exist_ok=True)
    for name in range({FILES}):
        with open(f"/work/{{folder}}/{{name}}", "wb") as f:
            f.write(chance.randbytes({FILE_BYTES}))
"""
CALLS, BURST, EVERY = 10, 3, 4
LIMITS = Limits()
SABOTAGES = ("no-pool", "slow-call", "stale", "open", "alter")


def change(turn: int) -> str:
    """Python that changes ten files, other ones every turn."""
    return f"""
import random
chance = random.Random({turn})
for n in chance.sample(range({FOLDERS * FILES}), {CHANGED}):
    with open(f"/work/{{n // {FILES}}}/{{n % {FILES}}}", "wb") as f:
        f.write(chance.randbytes({FILE_BYTES}))
"""


class Bed:
    """One driver, its pool, a sandbox with the workspace, and the docker command's counterparts where there are any."""

    def __init__(self, driver: Driver, pool: Pool, store: BlobStore, scratch: Path, sabotage: str | None) -> None:
        self.driver, self.pool, self.store, self.scratch, self.sabotage = driver, pool, store, scratch, sabotage
        self.lines: list[Line] = []
        self.named = 0
        self.last = Snapshot("")

    def note(self, kind: str, s: float, **more: object) -> None:
        self.lines.append({"kind": kind, "s": s, **more})

    def spec(self) -> SandboxSpec:
        self.named += 1
        return SandboxSpec(f"b{self.named}", f"session-{self.named}", "bench", 1, LIMITS)

    async def full(self) -> None:
        """The pool has what it wants, and the machine is quiet again."""
        while (now := self.pool.figures()).ready < now.wanted or now.starting:
            await asyncio.sleep(0.02)

    async def claim(self) -> tuple[Handle, Sandbox]:
        begun = time.perf_counter()
        handle, sandbox, ready = await self.pool.claim(self.spec())
        call = await sandbox.start("first", ["python3", "-c", FIRST])
        async for chunk in call:
            self.note("claim", time.perf_counter() - begun, ready=ready, right=chunk.data.startswith(b"f"))
            break
        await call.result()
        return handle, sandbox

    async def claims(self) -> None:
        """As many as there are spares, one after another, and some at the same time: more than there are."""
        held = [await self.claim() for _ in range(self.pool.figures().ready or 1)]
        await asyncio.gather(*(self._let_go(*each) for each in held))
        await self.full()

    async def burst(self) -> None:
        held = await asyncio.gather(*(self.claim() for _ in range(self.pool.figures().ready + BURST)))
        await asyncio.gather(*(self._let_go(*each) for each in held))
        await self.full()

    async def _let_go(self, handle: Handle, sandbox: Sandbox) -> None:
        await sandbox.close()
        await self.driver.release(handle)

    async def call(self, sandbox: Sandbox, key: str) -> None:
        words = "sleep 0.1; echo hi" if self.sabotage == "slow-call" else "echo hi"
        begun = time.perf_counter()
        call = await sandbox.start(key, ["sh", "-c", words])
        result = await call.result()
        self.note("call", time.perf_counter() - begun, right=result.output == b"hi\n")

    async def snapshot(self, sandbox: Sandbox, turn: int) -> None:
        await (await sandbox.start(f"change-{turn}", ["python3", "-c", change(turn)])).result()
        begun = time.perf_counter()
        root = await sandbox.snapshot(self.store)
        took = time.perf_counter() - begun
        if self.sabotage == "stale" and self.last:
            root = self.last
        # What a fresh look at every byte says is what the snapshot must have said.
        right = await sandbox.snapshot(self.store, verify=True)
        self.note("snapshot", took, right=str(root) == str(right) and not right.stale)
        self.last = right

    async def restore(self) -> None:
        handle, sandbox, _ = await self.pool.claim(self.spec())
        begun = time.perf_counter()
        await sandbox.restore(self.last, self.store)
        took = time.perf_counter() - begun
        self.note("restore", took, right=str(await sandbox.snapshot(self.store, verify=True)) == str(self.last))
        await self._let_go(handle, sandbox)
        await self.full()


@asynccontextmanager
async def bedded(sabotage: str | None) -> AsyncIterator[tuple[Bed, Sandbox]]:
    base = Path(tempfile.mkdtemp(prefix="tenuto-bench-"))
    os.chmod(base, 0o755)
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        driver = await choose_driver(base / "home", base / "run")
        stack.push_async_callback(driver.reap, [])
        budget = Budget(cold_start_s=0.0, most=0 if sabotage == "no-pool" else 4)
        pattern = SandboxSpec("pattern", "pattern", "bench", 0, LIMITS)
        pool = await stack.enter_async_context(Pool(driver, pattern, budget))
        control = base / "control"
        control.mkdir()
        bed = Bed(driver, pool, BlobStore(base / "blobs"), control, sabotage)
        handle = await driver.create(bed.spec())
        sandbox = await driver.attach(handle)
        stack.push_async_callback(sandbox.close)
        await (await sandbox.start("fill", ["python3", "-c", FILL])).result()
        await sandbox.snapshot(bed.store)
        yield bed, sandbox


async def measure(rounds: int, sabotage: str | None) -> list[Line]:
    """Every raw measurement of a run, as lines of evidence."""
    async with bedded(sabotage) as (bed, sandbox):
        bed.lines.append(
            {"kind": "about", "driver": bed.driver.name, "python": sys.version, "load": evidence.load_average()}
        )
        side = Beside(bed.driver, FILL) if isinstance(bed.driver, DockerDriver) else None
        with side or nullcontext():
            for turn in range(rounds):
                tell(f"round {turn + 1} of {rounds}")
                await one_round(bed, sandbox, side, turn)
    return bed.lines


async def one_round(bed: Bed, sandbox: Sandbox, side: Beside | None, turn: int) -> None:
    """Ours and theirs in turns; who is first changes with the round."""
    await bed.full()
    if side is not None and turn % 2:
        await asyncio.to_thread(theirs, bed, side, turn)
    await (bed.burst() if turn % EVERY == EVERY - 1 else bed.claims())
    for n in range(CALLS):
        await bed.call(sandbox, f"call-{turn}-{n}")
    await bed.snapshot(sandbox, turn)
    if side is not None and not turn % 2:
        await asyncio.to_thread(theirs, bed, side, turn)
    if turn % EVERY == 0:
        await bed.restore()


def theirs(bed: Bed, side: Beside, turn: int) -> None:
    bed.note("docker_run", side.run(bed.spec(), bed.scratch))
    for _ in range(CALLS):
        took, right = side.call()
        bed.note("docker_exec", took, right=right)
    side.change(change(turn))
    bed.note("docker_commit", side.commit())


async def escapes(sabotage: str | None) -> list[Line]:
    """Every known way out, on each driver that this machine has."""
    lines: list[Line] = []
    known = every_escape()
    if sabotage == "open":
        known = (*known, Escape("a way out that exists", "return 'out'"))
    base = Path(tempfile.mkdtemp(prefix="tenuto-bench-"))
    os.chmod(base, 0o755)
    try:
        for opened, missing in ((DockerDriver, no_docker), (BubblewrapDriver, no_bubblewrap)):
            if reason := missing():
                tell(f"no attempts there: {reason}")
                continue
            driver: Driver = await opened.open(base / "home", base / "run")
            tell(f"{len(known)} ways out of {driver.name}")
            folder = base / f"witness-{driver.name}"
            folder.mkdir()
            limits = Limits(memory_bytes=128 << 20, pids=64, workspace_bytes=32 << 20, tmp_bytes=8 << 20)
            with witness(folder) as outside:
                handle = await driver.create(SandboxSpec("escapes", "session", "bench", 1, limits))
                sandbox = await driver.attach(handle)
                for escape in known:
                    outcome = await attempt(sandbox, escape, outside)
                    about = {"name": outcome.name, "got": outcome.got, "why": outcome.why}
                    lines.append({"kind": "escape", "driver": driver.name, **about})
                await sandbox.close()
            await driver.reap([])
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return lines


@click.command()
@click.option("--rounds", type=int, default=24, show_default=True)
@click.option(
    "--evidence", "directory", type=click.Path(path_type=Path), help="Leave the raw samples in this directory."
)
@click.option("--sabotage", type=click.Choice(SABOTAGES), help="Break a promise on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(rounds: int, directory: Path | None, sabotage: str | None, as_json: bool) -> None:
    """Claims, calls, snapshots and restores, beside the docker command; and attempts to get out."""
    lines = asyncio.run(measure(rounds, sabotage)) + asyncio.run(escapes(sabotage))
    with tempfile.TemporaryDirectory() as spare:
        path = (directory or Path(spare)) / "sandbox.jsonl"
        evidence.leave(path, lines)
        if sabotage == "alter":
            evidence.alter(path, "claim", "s", 0.1)
        figure = figures(*evidence.read(path))
    show(figure, misses(figure), lambda: report(figure), as_json=as_json)


if __name__ == "__main__":
    main()
