"""What a step costs beside its model and its tool: turns of one session and runs of the bare activity, taking turns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import tenuto
from temporalio.client import Client

from bench.evidence import Line
from bench.steps_history import Taken, activities
from bench.steps_stack import BareWorkflow
from runtime.demo.stack import Stack
from runtime.store import Database
from workflows.contract import SESSIONS_QUEUE, THINK, workflow_id

THINK_TOKENS = 24
TURN = (0, THINK_TOKENS, 0, THINK_TOKENS)  # tokens that its steps sample: input, think, tool, think
TOOL = {
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    "command": ["true"],
    "effect": "pure",
}
SPEC: dict[str, Any] = {
    "system": "Use the tool, then say one word.",
    "tools": [TOOL],
    "limits": {"max_think_tokens": THINK_TOKENS},
    "sampling": {"temperature": 0.0},
    "seed": 1,
}
_WARM = 3


async def cost(stack: Stack, client: tenuto.AsyncClient, spans: Path, rounds: int) -> list[Line]:
    """Lines of evidence: `step` and `bare` by round, `cpu` by round and process, `span`."""
    temporal = await Client.connect(stack.state()["temporal"])
    async with Database(stack.postgres_dsn) as db:
        row = await db.fetchrow("SELECT queue FROM nodes")
    assert row is not None
    lines: list[Line] = []
    for number in range(-_WARM, rounds):
        kept, bare_id = [], f"bare-{number}"
        await temporal.execute_workflow(
            BareWorkflow.run, args=[row["queue"], TURN], id=bare_id, task_queue=SESSIONS_QUEUE
        )
        kept += [
            {"kind": "bare", "round": number, "place": place, "engine_s": one.result, **_walls(one)}
            for place, one in enumerate(await activities(temporal, bare_id))
        ]
        kept += await _turn(stack, client, temporal, number)
        lines += kept if number >= 0 else []
    return [*lines, *_spans(spans, lines)]


async def _turn(stack: Stack, client: tenuto.AsyncClient, temporal: Client, number: int) -> list[Line]:
    """A new session's second turn: its sandbox is there, and no round's steps have more of a past than another's."""
    session = await client.sessions.create(**SPEC)
    await session.run("Look.", tool_choice="required", max_tool_rounds=1)
    first = len(await _turns(temporal, session.id, 1))
    before = cpu_seconds(stack)
    await session.run("Look.", tool_choice="required", max_tool_rounds=1)
    spent = {name: after - before[name] for name, after in cpu_seconds(stack).items()}
    took = (await _turns(temporal, session.id, 2))[first:]
    own = {step["id"]: step["output"] for step in await session.steps()}
    lines: list[Line] = [{"kind": "cpu", "round": number, "steps": len(took), "seconds": spent}]
    for place, one in enumerate(took):
        output = own[one.argument["step_no"]]
        engine_s = (output.get("prefill_ms", 0.0) + output.get("decode_ms", 0.0)) / 1e3
        about = {"workflow": workflow_id(session.id), "activity": one.activity_id}
        where = {"kind": "step", "round": number, "place": place, "step": one.name}
        lines.append({**where, "engine_s": engine_s, **about, **_walls(one)})
    await session.cancel()
    return lines


async def _turns(temporal: Client, session_id: str, count: int) -> list[Taken]:
    """The activities of so many turns, once the workflow has acted on the last one."""
    while True:
        taken = await activities(temporal, workflow_id(session_id))
        if sum(one.name == THINK for one in taken) == 2 * count:
            return taken
        await asyncio.sleep(0.05)


def _walls(one: Taken) -> dict[str, float]:
    return {"dispatch_s": one.dispatch_s, "inside_s": one.inside_s, "hop_s": one.hop_s}


def cpu_seconds(stack: Stack) -> dict[str, float]:
    """CPU seconds so far, by process; Postgres with its children."""
    found = {}
    for name, pid in stack.state()["processes"].items():
        process = psutil.Process(pid)
        family = [process, *(process.children(recursive=True) if name == "postgres" else [])]
        found[name] = sum(_seconds(one) for one in family)
    return found


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:  # a backend of Postgres that ended
        return 0.0
    return float(times.user + times.system)


def _spans(path: Path, lines: list[Line]) -> list[Line]:
    wanted = {(line["workflow"], line["activity"]): line for line in lines if line["kind"] == "step"}
    found = []
    for text in path.read_text().splitlines():
        span = json.loads(text)
        step = wanted.get((span["workflow"], span["activity"]))
        if step is not None:
            found.append({"kind": "span", "round": step["round"], "step": step["step"], **span})
    return found
