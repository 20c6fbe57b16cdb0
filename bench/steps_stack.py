"""`tenuto up` whose node and worker can do a bare activity too, and whose node writes down where a step's time goes.

python -m bench.steps_stack up
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from temporalio import activity, workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    import sandbox
    from engine import Done
    from runtime import node, process, worker
    from runtime import up as stack
    from runtime.settings import Settings
    from runtime.steps import Steps, calls, checkpoints, generating, pause
    from runtime.store import fleet, ledger, sessions, steps

SPANS = "BENCH_SPANS"  # the file that the node writes its spans to
BARE = "bench.bare"
PROMPT = 64  # tokens
_PATIENCE = timedelta(seconds=60)


# --- the bare activity ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BareIn:
    """`tokens`: as many are sampled, of a prompt of as many as a small transcript has; 0: nothing is done."""

    session_id: str
    tokens: int


class BareSteps(Steps):
    @activity.defn(name=BARE)
    async def bare(self, what: BareIn) -> float:
        """Nothing but the engine's own work, for nobody. Returns the seconds that it took."""
        if not what.tokens:
            return 0.0
        client = await self._services.engine.client()
        prompt = [100 + number for number in range(PROMPT)]
        took = 0.0
        async for event in client.generate(
            request_id=activity.info().activity_id, session=what.session_id, token_ids=prompt, max_tokens=what.tokens
        ):
            if isinstance(event, Done):
                took = ((event.prefill_ms or 0.0) + (event.decode_ms or 0.0)) / 1e3
        return took

    def at_home(self) -> list[Callable[..., Any]]:
        return [*super().at_home(), self.bare]


@workflow.defn(name="Bare")
class BareWorkflow:
    """Bare activities in the places of a turn's steps, on the queue of a node."""

    @workflow.run
    async def run(self, at: str, tokens: list[int]) -> None:
        for sampled in tokens:
            await workflow.execute_activity(
                BARE,
                BareIn(workflow.info().workflow_id, sampled),
                task_queue=at,
                schedule_to_start_timeout=_PATIENCE,
                start_to_close_timeout=_PATIENCE,
                heartbeat_timeout=_PATIENCE,
                retry_policy=RetryPolicy(maximum_attempts=1),
            )


# --- spans ---------------------------------------------------------------------------------------------------------

_TIMED: tuple[tuple[Any, str, str], ...] = (
    (sessions, "get", "session read"),
    (sessions, "message_to_take", "message read"),
    (steps, "begin", "begin tx"),
    (steps, "transcript", "transcript read"),
    (checkpoints, "base", "checkpoints read"),
    (steps, "append_tokens", "tokens tx"),
    (steps, "complete", "complete tx"),
    (fleet, "note_residency", "residency tx"),
    (ledger, "claim", "claim tx"),
    (ledger, "note_run", "run tx"),
    (ledger, "settle", "settle tx"),
    (generating.Generation, "take", "engine and tokens"),
    (calls, "open_box", "sandbox attach"),
    (calls, "run_inside", "tool"),
    (sandbox.Call, "result", "call in the sandbox"),
    (sandbox.Sandbox, "snapshot", "snapshot"),
    (pause._Pages, "intend", "kv intent"),
    (Steps, "_progress", "progress read"),
    (Steps, "take_input", "take_input"),
    (Steps, "think", "think"),
    (Steps, "run_tools", "run_tools"),
)


def _timed(name: str, work: Callable[..., Awaitable[Any]], tell: Callable[[dict[str, Any]], None]) -> Any:
    @functools.wraps(work)
    async def run(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = None
        try:
            result = await work(*args, **kwargs)
            return result
        finally:
            if activity.in_activity():
                info = activity.info()
                span = {"workflow": info.workflow_id, "activity": info.activity_id, "name": name}
                inside = getattr(result, "duration_s", None)
                tell({**span, "seconds": time.perf_counter() - began, "inside_s": inside})

    return run


def _write_spans(path: str) -> None:
    """From a thread of their own, so that what is measured does not wait for it."""
    spans: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def write() -> None:
        with open(path, "a", buffering=1) as file:
            while True:
                file.write(json.dumps(spans.get()) + "\n")

    threading.Thread(target=write, daemon=True).start()
    tell = spans.put

    for owner, attribute, name in _TIMED:
        setattr(owner, attribute, _timed(name, getattr(owner, attribute), tell))


# --- processes -----------------------------------------------------------------------------------------------------


def run_node() -> None:
    setattr(node, "Steps", BareSteps)  # noqa: B010 - its own name for what we replace
    _write_spans(os.environ[SPANS])
    process.run(node.serve(Settings.load()))


def run_worker() -> None:
    worker.WORKFLOWS += (BareWorkflow,)
    process.run(worker.serve(Settings.load()))


def run_up() -> None:
    """The usual components, but for the modules of node and worker."""
    usual = stack.Stack.python
    modules = {"runtime.node": "node", "runtime.worker": "worker"}

    def python(self: stack.Stack, name: str, module: str, *argv: str, **how: Any) -> Any:
        if module in modules:
            return usual(self, name, "bench.steps_stack", modules[module], *argv, **how)
        return usual(self, name, module, *argv, **how)

    stack.Stack.python = python  # type: ignore[method-assign, assignment]
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(
            stack.up(Settings.load(), lambda kind, **data: print(json.dumps({"kind": kind, **data}), flush=True))
        )


if __name__ == "__main__":
    {"up": run_up, "node": run_node, "worker": run_worker}[sys.argv[1]]()
