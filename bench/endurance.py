"""One session of a thousand steps and more: continue-as-new, forks, rewinds, compactions, and what a replay takes.

    python -m bench.endurance --steps 1000 --evidence DIR

On a real stack, one session is given messages that lead to many tool rounds until its record has so many steps. At
random moments it is forked (the fork must have the same tokens, and goes on a little) and rewound; its tools print
enough to fill the context, so that compactions come by themselves. Afterwards every history that Temporal holds of the
session is replayed.

`--sabotage` must turn it red: `one-run` never continues as new, `repeat` leaves the mark of a call a second time.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import tenuto
from temporalio.client import Client, WorkflowHistory
from temporalio.worker import Replayer

from bench import evidence, verdict
from runtime.cli import ensure_model
from runtime.demo.run import demo_environment, left_in_stack
from runtime.demo.stack import Stack, leftovers, running_stack
from runtime.settings import Settings
from runtime.steps.checkpoints import digest
from workflows.contract import SESSIONS_QUEUE, SessionState, workflow_id
from workflows.session import SessionWorkflow

REPLAY_BAR_S = 1.0
MARKS = "marks.log"
TOOL: dict[str, Any] = {
    "name": "look",
    "description": "Look at the harbour.",
    "parameters": {
        "type": "object",
        "properties": {"at": {"type": "string", "enum": ["tide", "ferry", "crane", "buoy"]}},
        "required": ["at"],
        "additionalProperties": False,
    },
    # A mark outside the workspace, which no rewind takes back, and something to fill the context with.
    "command": [
        "sh",
        "-c",
        # Another sandbox of the session may have another user: whoever comes may write.
        f'umask 0; echo "$TENUTO_CALL_KEY" >> /mnt/outside/{MARKS}; echo x >> /work/seen;'
        ' yes "the tide is in" | head -c 400',
    ],
    "effect": "sandboxed",
}


@dataclass
class Course:
    """What was done, for the evidence."""

    session_id: str = ""
    forks: list[dict[str, Any]] = field(default_factory=list)
    rewinds: list[dict[str, Any]] = field(default_factory=list)


@click.command()
@click.option("--steps", type=int, default=1000, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--max-events", type=int, help="Continue as new beyond so many history events; default: the product's.")
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--evidence", "directory", type=click.Path(path_type=Path), help="Leave the raw samples here.")
@click.option("--sabotage", type=click.Choice(["one-run", "repeat"]), help="Break a promise on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(
    steps: int,
    seed: int,
    max_events: int | None,
    model: str,
    directory: Path | None,
    sabotage: str | None,
    as_json: bool,
) -> None:
    """A session of many steps."""
    ensure_model(Settings.load(overrides={"TENUTO_MODEL": model}))
    wanted = 10**6 if sabotage == "one-run" else max_events
    lines = asyncio.run(measure(steps, seed, wanted, model, sabotage == "repeat"))
    if directory is not None:
        evidence.leave(directory / "endurance.jsonl", lines)
    figure = figures(lines, True)
    verdict.show(
        figure, missed(figure), lambda: [f"{name}: {value}" for name, value in figure.items()], as_json=as_json
    )


def figures(lines: list[evidence.Line], sealed: bool) -> dict[str, Any]:
    """Recomputed from the raw samples: the record, the marks of the tools, and the histories with their replays."""
    [record] = evidence.only(lines, "record")
    course = record["course"]
    marks: Counter[str] = Counter(record["marks"])
    replays = evidence.only(lines, "replay")
    kinds = Counter(step["kind"] for step in record["steps"])
    live = [checkpoint for checkpoint in record["checkpoints"] if checkpoint["live"]]
    return {
        "steps": len(record["steps"]),
        "wanted": record["wanted"],
        "runs": len(replays),
        "forks": len(course["forks"]),
        "rewinds": len(course["rewinds"]),
        "compactions": kinds["compaction"],
        "forks_diverged": sum(fork["tokens"] != fork["parent_tokens"] for fork in course["forks"]),
        "rewinds_diverged": sum(rewind["digest"] != rewind["wanted"] for rewind in course["rewinds"]),
        "transcript_diverged": int(digest(record["token_ids"]).hex() != live[-1]["token_digest"]),
        "repeated": sum(count - 1 for count in marks.values()),
        "calls_lost": len(set(record["calls"]) - set(marks)),
        "events_lost_or_repeated": int(record["event_ids"] != list(range(1, len(record["event_ids"]) + 1))),
        "left_behind": len(record["left"]),
        "history_events_max": max(replay["events"] for replay in replays),
        "replay_max_s": max(sorted(replay["took_s"])[len(replay["took_s"]) // 2] for replay in replays),
        "replay_failures": sum(bool(replay["failure"]) for replay in replays),
        "sealed": sealed,
    }


def missed(figure: dict[str, Any]) -> list[str]:
    """What is not as it should be, in words."""
    found = [
        f"{name}: {figure[name]} where 0 is the bar"
        for name in (
            "forks_diverged",
            "rewinds_diverged",
            "transcript_diverged",
            "repeated",
            "calls_lost",
            "events_lost_or_repeated",
            "left_behind",
            "replay_failures",
        )
        if figure[name]
    ]
    if figure["steps"] < figure["wanted"]:
        found.append(f"{figure['steps']} steps where {figure['wanted']} were wanted")
    for name, least in (("runs", 2), ("forks", 1), ("rewinds", 1), ("compactions", 1)):
        if figure[name] < least:
            found.append(f"{name}: {figure[name]} where at least {least} is the bar")
    if figure["replay_max_s"] >= REPLAY_BAR_S:
        found.append(f"a replay takes {figure['replay_max_s']:.2f} s where {REPLAY_BAR_S} is the bar")
    if not figure["sealed"]:
        found.append("the evidence was altered")
    return found


def is_green(figure: dict[str, Any]) -> bool:
    return not missed(figure)


async def measure(steps: int, seed: int, max_events: int | None, model: str, repeat: bool) -> list[evidence.Line]:
    home = Path(tempfile.mkdtemp(prefix="tenuto-bench-"))
    try:
        async with running_stack(demo_environment(home, model), lambda _: None) as stack:
            lines = await _in_stack(stack, steps, random.Random(seed), max_events, repeat)
            lines[0]["left"] += await left_in_stack(stack)
            pids = dict(stack.state()["processes"])
        lines[0]["left"] += leftovers(stack, pids)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return lines


async def _in_stack(
    stack: Stack, steps: int, rng: random.Random, max_events: int | None, repeat: bool
) -> list[evidence.Line]:
    temporal = await Client.connect(stack.state()["temporal"])
    async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
        session = await client.sessions.create(
            system="You look at the harbour when asked.",
            tools=[TOOL],
            limits={"max_think_tokens": 60},
            sampling={"temperature": 0.8},
            seed=rng.randrange(2**32),
            context_policy="summarise",
        )
        if max_events is not None:
            await temporal.start_workflow(
                SessionWorkflow.run,
                SessionState(session.id, max_events=max_events),
                id=workflow_id(session.id),
                task_queue=SESSIONS_QUEUE,
            )
        course = Course(session.id)
        await _go_on_until(client, session, steps, rng, course)
        marks = (stack.settings.sandbox_volumes[0].source / MARKS).read_text().split()
        if repeat:
            marks.append(marks[0])
        record = {
            "kind": "record",
            "wanted": steps,
            "course": asdict(course),
            "steps": [{"id": s["id"], "kind": s["kind"], "live": s["live"]} for s in await session.steps()],
            "checkpoints": await session.checkpoints(),
            "token_ids": await session.token_ids(),
            "event_ids": [event.id for event in await session.events()],
            "calls": await _settled_calls(session),
            "marks": [mark for mark in marks if mark.startswith(f"{session.id}/")],
            "left": [],
        }
        await session.cancel()
    return [record, *await replays(temporal, session.id)]


async def _go_on_until(
    client: tenuto.AsyncClient, session: tenuto.AsyncSession, steps: int, rng: random.Random, course: Course
) -> None:
    while (done := len(await session.steps())) < steps:
        rounds = min(20, max(2, (steps - done) // 2))
        await session.run("Look around.", tool_choice="required", max_tool_rounds=rounds)
        checkpoints = [c for c in await session.checkpoints() if c["live"]]
        target = rng.choice(checkpoints[-12:])
        if rng.random() < 0.7:
            await _fork(session, target, course)
        if rng.random() < 0.7 or not course.rewinds:
            await _rewind(session, target, course)
        verdict.tell(f"{len(await session.steps())} steps, {len(course.forks)} forks, {len(course.rewinds)} rewinds")


async def _fork(session: tenuto.AsyncSession, target: dict[str, Any], course: Course) -> None:
    child = await session.fork(target["id"])
    same = digest(await child.token_ids()).hex()
    course.forks.append({"step": target["id"], "tokens": same, "parent_tokens": target["token_digest"]})
    await child.cancel()


async def _rewind(session: tenuto.AsyncSession, target: dict[str, Any], course: Course) -> None:
    await session.rewind(target["id"], seed=target["id"])
    reached = digest(await session.token_ids()).hex()
    course.rewinds.append({"step": target["id"], "digest": reached, "wanted": target["token_digest"]})
    if (await session.info()).state == "paused":
        await session.resume()
        await session.until("idle")


async def _settled_calls(session: tenuto.AsyncSession) -> list[str]:
    return [
        f"{session.id}/{event.step}/{event.data['call']}"
        for event in await session.events()
        if event.type == "tool.settled" and event.data["reason"] == "exit"
    ]


async def replays(temporal: Client, session_id: str) -> list[evidence.Line]:
    """Every run of the session's workflow, replayed five times after one that is not counted, since it also loads."""
    found = []
    runs = [run async for run in temporal.list_workflows(f"WorkflowId = '{workflow_id(session_id)}'")]
    histories = [
        await temporal.get_workflow_handle(run.id, run_id=run.run_id).fetch_history()
        for run in sorted(runs, key=lambda run: run.start_time)
    ]
    replayer = Replayer(workflows=[SessionWorkflow])
    await replayer.replay_workflow(histories[0], raise_on_replay_failure=False)
    for history in histories:
        found.append(await _replay(replayer, history))
    return found


async def _replay(replayer: Replayer, history: WorkflowHistory) -> evidence.Line:
    took, failure = [], ""
    for _ in range(5):
        began = time.perf_counter()
        result = await replayer.replay_workflow(history, raise_on_replay_failure=False)
        took.append(time.perf_counter() - began)
        failure = str(result.replay_failure or failure)
    return {
        "kind": "replay",
        "events": len(history.events),
        "took_s": took,
        "failure": failure,
        "history": json.loads(history.to_json()),
    }


if __name__ == "__main__":
    main()
