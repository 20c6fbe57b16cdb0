"""Hundreds of sandboxes whose controllers, agents and engine are killed at random; then one reap, and nothing is left.

    python -m bench.sandbox_chaos --sandboxes 200 --evidence DIR

Controllers are processes of their own, two at a time, each making sandboxes one after another. The seed decides what
becomes of each: released; abandoned with its call running; its agent killed; its controller killed after its call
began; its controller killed while it was being made. Docker's engine, one of our own, is killed and started again
twice meanwhile. Docker and bubblewrap play the same plan.

    left       what is there after the one reap: containers, processes, control groups, uids, records, sockets, mounts,
               networks, volumes, images half made

`--sabotage` must turn it red: `skip-reap` leaves out the reap, `leak-process` and `leak-uid` leave one of either.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from bench import evidence
from bench.evidence import Line, only
from bench.own_docker import Dockerd, own_dockerd
from bench.sandbox_chaos_left import left_behind
from bench.sandbox_chaos_play import FATES, open_driver
from bench.verdict import Figure, show, tell
from sandbox import host

BACKENDS = ("docker", "bubblewrap")
SABOTAGES = ("skip-reap", "leak-process", "leak-uid")
CONTROLLERS = 2
RESTARTS = 2


@dataclass(frozen=True)
class Wanted:
    sandboxes: int  # with every backend
    backends: Sequence[str] = BACKENDS
    seed: int = 1
    sabotage: str | None = None


class Storm:
    """One backend's run. `base` holds everything of it."""

    def __init__(self, wanted: Wanted, backend: str, base: Path, dockerd: Dockerd | None) -> None:
        self.wanted, self.backend, self.base, self.dockerd = wanted, backend, base, dockerd
        self.home, self.run_dir = base / "home", base / "run"
        self.mark = str(1_000_000 + secrets.randbelow(8_000_000))
        self.lines: list[Line] = []
        self.restarts = 0

    async def blow(self) -> list[Line]:
        driver = await open_driver(self.backend, self.home, self.run_dir)
        share = -(-self.wanted.sandboxes // CONTROLLERS)
        firsts = range(0, self.wanted.sandboxes, share)
        await asyncio.gather(*(self._lane(at, min(at + share, self.wanted.sandboxes)) for at in firsts))
        begun = time.monotonic()
        reaped = [] if self.wanted.sabotage == "skip-reap" else await driver.reap([])
        took_s = round(time.monotonic() - begun, 3)
        engine = self.dockerd.name if self.dockerd is not None else ""
        with _leak(self.wanted.sabotage, driver.home, self.mark):  # type: ignore[attr-defined]
            left = left_behind(driver, self.home, self.run_dir, self.base, self.mark, engine)
        await driver.reap([])
        self.lines.append({"kind": "reap", "reaped": len(reaped), "s": took_s})
        self.lines.append({"kind": "left", **left})
        return [{"backend": self.backend, **line} for line in self.lines]

    async def _lane(self, first: int, last: int) -> None:
        """Controllers one after another, each going on where the last one died."""
        while first < last:
            words = [self.backend, str(self.home), str(self.run_dir), str(first), str(last)]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench.sandbox_chaos_play", *words, str(self.wanted.seed), self.mark,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[1],
            )  # fmt: skip
            before = first
            assert process.stdout is not None
            async for text in process.stdout:
                line = json.loads(text)
                self.lines.append(line)
                if line["kind"] == "sandbox":
                    first = line["number"] + 1
                await self._restart_where_due()
            code = await process.wait()
            if code not in (0, -9) or first == before:
                assert process.stderr is not None
                said = (await process.stderr.read()).decode(errors="replace")[-500:]
                self.lines.append({"kind": "mishap", "code": code, "said": said})
                first += first == before

    async def _restart_where_due(self) -> None:
        done = len(only(self.lines, "sandbox"))
        if self.dockerd is None or done * (RESTARTS + 1) < self.wanted.sandboxes * (self.restarts + 1):
            return
        if self.restarts < RESTARTS:
            self.restarts += 1
            self.dockerd.kill()
            self.dockerd.start()
            answered = await asyncio.to_thread(self.dockerd.answers)
            self.lines.append({"kind": "engine", "after": done, "answered": answered})


@contextlib.contextmanager
def _leak(sabotage: str | None, home: str, mark: str) -> Iterator[None]:
    if sabotage == "leak-process":
        process = subprocess.Popen(["sleep", mark])
        try:
            yield
        finally:
            process.kill()
            process.wait()
    elif sabotage == "leak-uid":
        lock = host.UID_LOCKS / str(host.FIRST_UID + host.UIDS)  # no sandbox is given this one
        lock.symlink_to(f"{home}.nobody")
        try:
            yield
        finally:
            lock.unlink()
    else:
        yield


async def measure(wanted: Wanted) -> list[Line]:
    lines: list[Line] = []
    for backend in wanted.backends:
        with tempfile.TemporaryDirectory(prefix="tenuto-chaos-") as folder, contextlib.ExitStack() as stack:
            os.chmod(folder, 0o755)
            dockerd = None
            if backend == "docker":
                dockerd = stack.enter_context(own_dockerd())
                if dockerd is None:
                    tell("no Docker engine of our own can be started here, so Docker is left out")
                    continue
                stack.enter_context(_environment("DOCKER_HOST", dockerd.address))
            begun = time.monotonic()
            lines += await Storm(wanted, backend, Path(folder), dockerd).blow()
            lines.append({"kind": "took", "backend": backend, "s": round(time.monotonic() - begun, 1)})
    return lines


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def figures(wanted: Wanted, lines: Sequence[Line]) -> Figure:
    found: Figure = {"seed": wanted.seed, "sandboxes": wanted.sandboxes, "backends": {}}
    for backend in dict.fromkeys(line["backend"] for line in lines):
        ours = [line for line in lines if line["backend"] == backend]
        (left,), (reap,) = only(ours, "left"), only(ours, "reap")
        found["backends"][backend] = {
            "fates": dict(sorted(Counter(line["fate"] for line in only(ours, "sandbox")).items())),
            "engine_restarts": len(only(ours, "engine")),
            "mishaps": [line["said"] for line in only(ours, "mishap")],
            "reaped": reap["reaped"],
            "reap_s": reap["s"],
            "left": {kind: names for kind, names in left.items() if isinstance(names, list)},
            "took_s": only(ours, "took")[0]["s"],
        }
    return found


def misses(figure: Figure) -> list[str]:
    """What keeps a run from being green, as sentences."""
    said = [] if figure["backends"] else ["no backend could be tried"]
    for backend, facts in figure["backends"].items():
        said += [
            f"{backend}: {len(names)} {kind} are left: {names[:5]}" for kind, names in facts["left"].items() if names
        ]
        said += [f"{backend}: a controller failed: {text}" for text in facts["mishaps"]]
        if sum(facts["fates"].values()) < figure["sandboxes"]:
            said.append(f"{backend}: only {sum(facts['fates'].values())} sandboxes of {figure['sandboxes']} were tried")
        if never := set(FATES) - set(facts["fates"]):
            said.append(f"{backend}: no sandbox had the fate {', '.join(sorted(never))}")
        if backend == "docker" and facts["engine_restarts"] < RESTARTS:
            said.append(f"docker: the engine was restarted {facts['engine_restarts']} times of {RESTARTS}")
    return said


def report(figure: Figure) -> list[str]:
    return [
        f"{backend}: {sum(facts['fates'].values())} sandboxes in {facts['took_s']} s ({facts['fates']}), engine"
        f" restarted {facts['engine_restarts']} times, {facts['reaped']} reaped in {facts['reap_s']} s,"
        f" {sum(map(len, facts['left'].values()))} things left"
        for backend, facts in figure["backends"].items()
    ]


@click.command()
@click.option("--sandboxes", default=200, show_default=True)
@click.option("--backend", type=click.Choice(BACKENDS), help="One alone; both where not given.")
@click.option("--seed", default=1, show_default=True)
@click.option("--sabotage", type=click.Choice(SABOTAGES))
@click.option("--evidence", "folder", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True)
def main(
    sandboxes: int, backend: str | None, seed: int, sabotage: str | None, folder: Path | None, as_json: bool
) -> None:
    wanted = Wanted(sandboxes, (backend,) if backend else BACKENDS, seed, sabotage)
    lines = asyncio.run(measure(wanted))
    if folder is not None:
        evidence.leave(folder / "sandbox-chaos.jsonl", lines)
    figure = figures(wanted, lines)
    show(figure, misses(figure), lambda: report(figure), as_json=as_json)


if __name__ == "__main__":
    main()
