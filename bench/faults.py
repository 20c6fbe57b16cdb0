"""Sessions of a whole stack while its parts are killed, stopped, cut off and filled up, against undisturbed ones.

    python -m bench.faults --kills 300 --evidence DIR

Several sessions run at once, each with a few faults at named moments: in a think after so many tokens, in a tool after
so many seconds, while its snapshot is written, while pages come back, between steps, while the session is idle. The
seed decides what breaks when; `--seed` plays the same plan again. Every fault strikes all sessions that run.

    lost       something acknowledged is not there: a message, a token, a result, a checkpoint, an event's position
    repeated   a call left its mark twice, in the workspace or outside
    diverged   token ids differ from the undisturbed run of the same seed
    leaked     what ended sessions left: sandboxes, processes, pages, blobs, attempts that still run
    stuck      a session that does not come to rest

An unsafe call whose sandbox was killed is not run again: its session asks (`outcome_unknown`), and the bench looks for
the call's mark outside and answers.
`--sabotage` must turn a figure red: `skip-fence` writes into the record as an owner that was replaced would,
`rerun-tool` leaves the mark of a second run, `leak-process` leaves a process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import tenuto

from bench import evidence
from bench.evidence import Line
from bench.faults_bed import Bed, bed
from bench.faults_figures import figures, misses, report
from bench.faults_left import PATIENCE_S, left_behind
from bench.faults_plan import Fault, plan
from bench.faults_play import Player, Watch
from bench.faults_strike import Striker
from bench.verdict import show, tell
from runtime.cli import ensure_model
from runtime.demo.play import outside_log
from runtime.settings import Settings
from runtime.store import Database

SABOTAGES = ("skip-fence", "rerun-tool", "leak-process")
SEEDS = 6  # undisturbed sessions to compare with


@dataclass(frozen=True)
class Wanted:
    kills: int
    seed: int
    sessions: int  # at once
    each: int  # faults of a session
    seeds: int = SEEDS
    sabotage: str | None = None
    patience_s: float = PATIENCE_S


async def measure(wanted: Wanted, model: str, nodes: int, sandbox: str) -> list[Line]:
    """Every raw fact of a run, as lines of evidence."""
    async with bed(model, nodes, sandbox) as made:
        calm = await undisturbed(made, wanted)
        lines = await disturbed(made, wanted, calm)
    return [*lines, {"kind": "left", "when": "stopped", "what": made.left}]


async def undisturbed(made: Bed, wanted: Wanted) -> list[Line]:
    """A session of every seed, to compare with."""
    seeds = [wanted.seed * 1000 + number for number in range(wanted.seeds)]
    return await _played(made, Striker(made, 0), iter([(seed, []) for seed in seeds]), wanted, {})


async def disturbed(made: Bed, wanted: Wanted, calm: Sequence[Line], faults: list[Fault] | None = None) -> list[Line]:
    """Sessions until enough faults have struck, and what they left in the end; with the undisturbed ones.

    `faults`: for every session these, not those of the seed.
    """
    striker = Striker(made, wanted.kills)
    outputs = {line["seed"]: line["outputs"] for line in calm}
    lines: list[Line] = [{"kind": "about", "without": sorted(made.without), "seed": wanted.seed}, *calm]
    plans = _plans(made, striker, wanted, sorted(outputs), faults)
    lines += await _played(made, striker, plans, wanted, outputs)
    await striker.settled()
    lines += [{**struck, "kind": "fault", "kind_of_fault": struck["kind"]} for struck in striker.struck]
    with await left_running(made) if wanted.sabotage == "leak-process" else contextlib.nullcontext():
        left = await left_behind(made.stack, wanted.patience_s)
    return [*lines, {"kind": "left", "when": "ended", "what": left}]


def _plans(
    made: Bed, striker: Striker, wanted: Wanted, seeds: list[int], faults: list[Fault] | None
) -> Iterator[tuple[int, list[Fault]]]:
    for number in itertools.count():
        if striker.budget <= 0:
            return
        rng = random.Random(f"{wanted.seed}/{number}")
        yield seeds[number % len(seeds)], faults or plan(rng, wanted.each, made.without)


async def _played(
    made: Bed,
    striker: Striker,
    plans: Iterator[tuple[int, list[Fault]]],
    wanted: Wanted,
    outputs: Mapping[int, Sequence[str]],
) -> list[Line]:
    lines: list[Line] = []

    async def play_on() -> None:
        async with tenuto.AsyncClient(made.stack.api_url, made.stack.api_key) as client:
            for seed, faults in plans:
                watch = _sabotage(made, wanted.sabotage) if faults else _nothing
                player = Player(client, striker, seed, faults, outputs=outputs.get(seed, ()), watch=watch)
                line = await player.play()
                lines.append(line)
                _tell(line, striker)

    async with asyncio.TaskGroup() as group:
        for _ in range(wanted.sessions):
            group.create_task(play_on())
    return lines


def _tell(line: Line, striker: Striker) -> None:
    struck = [one for one in striker.struck if one["session"] == line["session"]]
    faults = "; ".join(f"{one['kind']} {one['target']} ({one['moment']} {one['nth']})" for one in struck)
    how = "STUCK" if line["stuck"] else "; ".join(line["failures"]) or line["ended_as"]
    tell(f"{len(striker.struck)} faults; {line['session']} of seed {line['seed']}: {how}. {faults}")


# --- sabotage ------------------------------------------------------------------------------------------------------


def _nothing(player: Player, event: tenuto.Event) -> None:
    pass


def _sabotage(made: Bed, name: str | None) -> Watch:
    return {"rerun-tool": _mark_again(made), "skip-fence": _write_as_a_zombie(made)}.get(name or "", _nothing)


def _mark_again(made: Bed) -> Watch:
    """The mark that a second run of each call would leave."""

    def watch(player: Player, event: tenuto.Event) -> None:
        if event.type == "tool.settled":
            with outside_log(made.stack, player.session_id).open("a") as log:
                log.write(f"{player.session_id}/{event.step}/{event.data['call']}\n")

    return watch


def _write_as_a_zombie(made: Bed) -> Watch:
    """Tokens that an owner would append that was replaced and that no epoch keeps out: once, in the last think, which
    no grammar guides."""
    rested: set[str] = set()
    writing: list[asyncio.Task[None]] = []

    async def write(session_id: str, step: int, token_ids: list[int]) -> None:
        # Far behind what the owner writes meanwhile, so that the two do not collide.
        async with Database(made.stack.postgres_dsn) as db:
            await db.execute(
                "INSERT INTO segments (session_id, step_no, idx, tenant_id, kind, token_ids) SELECT $1, $2,"
                " max(idx) + 100, max(tenant_id), 'model', $3 FROM segments WHERE session_id = $1 AND step_no = $2",
                session_id,
                step,
                token_ids,
            )

    def watch(player: Player, event: tenuto.Event) -> None:
        if event.type == "session.idle":
            rested.add(player.session_id)
        if event.type == "model.delta" and player.session_id in rested and not writing:
            assert event.step is not None
            writing.append(asyncio.create_task(write(player.session_id, event.step, event.data["token_ids"])))

    return watch


async def left_running(made: Bed) -> contextlib.AbstractContextManager[None]:
    """The agent of a sandbox that was released, as far as anybody can see."""
    async with Database(made.stack.postgres_dsn) as db:
        row = await db.fetchrow("SELECT sandbox_id FROM sandboxes WHERE state = 'released' LIMIT 1")
    assert row is not None, "a session with a sandbox has ended"
    words = [sys.executable, "-c", "import signal; signal.pause()", "tenuto-agent", "nobody", row["sandbox_id"]]
    return _running(words)


@contextlib.contextmanager
def _running(words: list[str]) -> Iterator[None]:
    process = subprocess.Popen(words, start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@click.command()
@click.option("--kills", type=int, default=30, show_default=True, help="Faults that must have struck.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--sessions", type=int, default=4, show_default=True, help="At once.")
@click.option("--each", type=int, default=3, show_default=True, help="Faults planned for a session.")
@click.option("--nodes", type=int, default=1, show_default=True)
@click.option("--sandbox", type=click.Choice(["auto", "docker", "bubblewrap"]), default="auto", show_default=True)
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--evidence", "directory", type=click.Path(path_type=Path), help="Leave the raw facts in this directory.")
@click.option("--sabotage", type=click.Choice(SABOTAGES), help="Break a promise on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(
    kills: int,
    seed: int,
    sessions: int,
    each: int,
    nodes: int,
    sandbox: str,
    model: str,
    directory: Path | None,
    sabotage: str | None,
    as_json: bool,
) -> None:
    """Faults of every kind against undisturbed runs."""
    ensure_model(Settings.load(overrides={"TENUTO_MODEL": model}))
    wanted = Wanted(kills, seed, sessions, each, sabotage=sabotage)
    for number in (signal.SIGTERM, signal.SIGHUP):  # what was mounted and started goes on the way out
        signal.signal(number, signal.default_int_handler)
    lines = asyncio.run(measure(wanted, model, nodes, sandbox))
    if directory is not None:
        evidence.leave(directory / "faults.jsonl", lines)
    figure = figures(lines)
    show(figure, misses(figure), lambda: report(figure), as_json=as_json)


if __name__ == "__main__":
    main()
