"""What followers of sessions cost the engine: five hundred streams with random drops and slow readers.

    python -m bench.api --evidence DIR

Rounds take turns: in one nobody follows, in the next every session is followed by as many streams as it takes for five
hundred. In each round new sessions get a message at once, after their followers have come, and think; the token rate is
what they sampled over the time from the first token that was written to the last. Followers are a process of its own at
the lowest priority, since they stand for machines elsewhere; what the API does for them counts. Each follower must be
given every event of its session's log once: what the log holds is read afterwards. `rps` is of GET /v1/sessions/ID,
eight at once, on a stack that rests.

`--sabotage` must turn a figure red: `lose` has followers that come back with a cursor one too far, `alter` makes the
evidence look better than it was.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import httpx
import tenuto

from bench import evidence
from bench.api_figures import figures, misses, report
from bench.evidence import Line
from bench.steps_cost import cpu_seconds
from bench.verdict import show, tell
from runtime.cli import ensure_model
from runtime.demo.run import demo_environment
from runtime.demo.stack import Stack, running_stack
from runtime.settings import Settings
from runtime.store import Database

ROOT = Path(__file__).parent.parent
TOKENS = 48
AT_ONCE = 8
REQUESTS = 2000
LOOK_EVERY_S = 0.3


async def measure(model: str, rounds: int, count: int, each: int, sabotage: str | None) -> list[Line]:
    """Every raw measurement of a run, as lines of evidence."""
    home = Path(tempfile.mkdtemp(prefix="tenuto-bench-"))
    environment = {**demo_environment(home, model), "TENUTO_KV_TOKENS": "32768"}
    try:
        async with running_stack(environment, tell) as stack:
            async with (
                tenuto.AsyncClient(stack.api_url, stack.api_key) as client,
                Database(stack.postgres_dsn) as db,
            ):
                lines: list[Line] = [{"kind": "about", "python": sys.version, "load": evidence.load_average()}]
                await round_of(stack, client, db, 0, AT_ONCE, 0)  # warms up
                for number in range(1, rounds + 1):
                    for followed in (False, True) if number % 2 else (True, False):
                        tell(f"round {number} of {rounds}, {'followed' if followed else 'alone'}")
                        lines += await round_of(stack, client, db, number, count, each * followed, sabotage)
                lines += await _requests(stack)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return lines


async def round_of(
    stack: Stack,
    client: tenuto.AsyncClient,
    db: Database,
    number: int,
    count: int,
    each: int,
    sabotage: str | None = None,
) -> list[Line]:
    """`count` new sessions answer one message each, followed by `each` streams a session."""
    limits = {"max_think_tokens": TOKENS}
    sampling = {"temperature": 1.0}
    made = [await client.sessions.create(limits=limits, sampling=sampling, seed=n) for n in range(count)]
    ids = [one.id for one in made]
    watching = await _followers(stack, ids, each, number, sabotage) if each else None
    cpu = cpu_seconds(stack)
    await asyncio.gather(*(one.send(f"Write a long story about the number {n}.") for n, one in enumerate(made)))
    await _rest(db, ids)
    spent = {name: seconds - cpu.get(name, 0.0) for name, seconds in cpu_seconds(stack).items()}
    seen = await _seen(watching) if watching else []
    about = {"round": number, "followed": bool(each)}
    lines: list[Line] = [{"kind": "round", **about, **await _tokens(db, ids), "cpu_s": spent}]
    if each:
        lines += [{"kind": "log", **about, "session": one, "ids": await _log(db, one)} for one in ids]
        lines += [{"kind": "seen", **about, **one} for one in seen]
    await asyncio.gather(*(one.cancel(wait=False) for one in made))
    return lines


async def _rest(db: Database, ids: list[str]) -> None:
    """Until all of them have answered; nobody follows them for that."""
    asked = "SELECT count(*) AS left FROM sessions WHERE session_id = ANY($1) AND state NOT IN ('idle', 'failed')"
    while (await db.fetch(asked, ids))[0]["left"]:
        await asyncio.sleep(LOOK_EVERY_S)


async def _followers(
    stack: Stack, ids: list[str], each: int, seed: int, sabotage: str | None
) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.api_clients", stack.api_url, stack.api_key),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
        cwd=ROOT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    plan = {"sessions": ids, "each": each, "seed": seed, "sabotage": sabotage}
    process.stdin.write(json.dumps(plan).encode() + b"\n")
    assert json.loads(await process.stdout.readline())["ready"] == len(ids) * each
    return process


async def _seen(process: asyncio.subprocess.Process) -> list[dict[str, Any]]:
    out, _ = await process.communicate()
    return [json.loads(line) for line in out.splitlines()]


async def _tokens(db: Database, ids: list[str]) -> dict[str, Any]:
    """Tokens that were sampled, and the seconds from the first that was written to the last."""
    rows = await db.fetch(
        "SELECT extract(epoch FROM min(created_at))::float8 AS first_s, extract(epoch FROM max(created_at))::float8"
        " AS last_s, count(*) AS batches FROM events WHERE session_id = ANY($1) AND type = 'model.delta'",
        ids,
    )
    sampled = await db.fetch("SELECT sum(spent_tokens)::int8 AS tokens FROM sessions WHERE session_id = ANY($1)", ids)
    seconds = rows[0]["last_s"] - rows[0]["first_s"]
    return {"tokens": int(sampled[0]["tokens"]), "seconds": seconds, "batches": rows[0]["batches"]}


async def _log(db: Database, session_id: str) -> list[int]:
    """Positions up to where a follower stops: the rest after the session's first answer."""
    rows = await db.fetch(
        "SELECT pos FROM events WHERE session_id = $1 AND pos <= (SELECT min(pos) FROM events WHERE session_id = $1"
        " AND type IN ('session.idle', 'session.failed')) ORDER BY pos",
        session_id,
    )
    return [row["pos"] for row in rows]


async def _requests(stack: Stack) -> list[Line]:
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    async with httpx.AsyncClient(base_url=stack.api_url, headers=headers, trust_env=False) as http:
        made = (await http.post("/v1/sessions", json={})).json()["id"]
        left = iter(range(REQUESTS))

        async def ask() -> None:
            for _ in left:
                (await http.get(f"/v1/sessions/{made}")).raise_for_status()

        began = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
        return [{"kind": "requests", "count": REQUESTS, "seconds": time.perf_counter() - began}]


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=4, show_default=True, help="Pairs of rounds.")
@click.option("--sessions", "count", type=click.IntRange(1), default=100, show_default=True)
@click.option("--streams", type=click.IntRange(1), default=500, show_default=True, help="A multiple of the sessions.")
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--evidence", "directory", type=click.Path(path_type=Path), help="Leave the raw samples here.")
@click.option("--sabotage", type=click.Choice(["lose", "alter"]), help="Break a promise on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(
    rounds: int, count: int, streams: int, model: str, directory: Path | None, sabotage: str | None, as_json: bool
) -> None:
    """The engine's token rate with and without followers, and what these were given."""
    if streams % count:
        raise click.UsageError(f"--streams is {streams}; a multiple of the {count} sessions is needed")
    ensure_model(Settings.load(overrides={"TENUTO_MODEL": model}))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    lines = asyncio.run(measure(model, rounds, count, streams // count, sabotage))
    with tempfile.TemporaryDirectory() as spare:
        path = (directory or Path(spare)) / "api.jsonl"
        evidence.leave(path, lines)
        if sabotage == "alter":
            evidence.alter(path, "round", "seconds", 0.5)
        figure = figures(*evidence.read(path))
    show(figure, misses(figure), lambda: report(figure), as_json=as_json)


if __name__ == "__main__":
    main()
