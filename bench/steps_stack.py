"""`tenuto up` whose node and worker can do a bare activity too, and whose node writes down where a step's time goes.

python -m bench.steps_stack up
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from temporalio import activity, workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    import sandbox
    from runtime import node, process, worker
    from runtime import up as stack
    from runtime.settings import Settings
    from runtime.steps import Steps, calls, checkpoints, generating, pause
    from runtime.store import fleet, ledger, sessions, steps
    from workflows.contract import StepIn

SPANS = "BENCH_SPANS"  # the file that the node writes its spans to
BARE = "bench.bare"
_PATIENCE = timedelta(seconds=60)


# --- the bare activity ---------------------------------------------------------------------------------------------


class BareSteps(Steps):
    @activity.defn(name=BARE)
    async def bare(self, what: StepIn) -> None:
        """Nothing, for nobody."""

    def at_home(self) -> list[Callable[..., Any]]:
        return [*super().at_home(), self.bare]


@workflow.defn(name="Bare")
class BareWorkflow:
    """The bare activity, one after another, on the queue of a node."""

    @workflow.run
    async def run(self, queue: str, count: int) -> None:
        for _ in range(count):
            await workflow.execute_activity(
                BARE,
                StepIn("nobody", 0, 0),
                task_queue=queue,
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
    file = open(path, "a", buffering=1)  # noqa: SIM115 - for as long as the process lives

    def tell(span: dict[str, Any]) -> None:
        file.write(json.dumps(span) + "\n")

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
