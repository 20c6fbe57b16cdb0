"""`python -m runtime.boxes`: the boxes between a call and the device, written to docs/boxes.md.

Each names code, figures and a test that are looked up in the sources when the table is written, so that none of them
can go and leave its name behind. The sources are parsed and not imported: some of them load torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
OUT: Final = ROOT / "docs" / "boxes.md"


@dataclass(frozen=True)
class Metric:
    """`where`: the field behind it, as `path::Class.field`; `shown`: what a user asks to see it."""

    where: str
    shown: str


@dataclass(frozen=True)
class Box:
    """One job, one way to fail. `code`: `path::name`; `test`: the id of the test that makes it fail."""

    name: str
    code: str
    job: str
    failure: str
    metrics: tuple[Metric, ...]
    test: str


_COUNTS: Final = "runtime/api/counts.py::Counts."
_OVERVIEW: Final = "`GET /v1/admin/overview`, `process.{}`"


def _counted(*names: str) -> tuple[Metric, ...]:
    return tuple(Metric(_COUNTS + name, _OVERVIEW.format(name)) for name in names)


def _engine(*names: str) -> tuple[Metric, ...]:
    return tuple(
        Metric("engine/store.py::Counters." + name, f"`tenuto engine --json`, `counters.{name}`") for name in names
    )


BOXES: Final = (
    Box(
        "gateway",
        "runtime/api/guard.py::Guard",
        "takes a request of this machine's, bounds its body, and answers; what it accepts is a row in Postgres",
        "a part behind it is away: 503 with `Retry-After`, and `/readyz` names the part",
        (
            Metric("runtime/api/app.py::Readiness.checks", "`GET /readyz`, `checks`"),
            *_counted("failed"),
        ),
        "tests/runtime/api/test_boxes.py::test_a_gateway_with_no_node_behind_it_says_which_part_is_away",
    ),
    Box(
        "auth and limits",
        "runtime/api/guard.py::Authenticated",
        "finds whose key it is, and takes one request from the key's rate",
        "a key that is none or has expired: 401; a rate that is used up: 429 with `Retry-After`",
        (
            Metric("runtime/store/rates.py::Allowance.level", "header `x-ratelimit-remaining-requests`"),
            *_counted("unauthenticated", "limited"),
        ),
        "tests/runtime/api/test_boxes.py::test_keys_that_may_not_are_counted_by_why",
    ),
    Box(
        "router",
        "runtime/store/placement.py::place",
        "sends a session back to the node that has its KV, else to the one that has least to do",
        "the node is lost: the epoch is raised, so that it writes no more, and another one takes the session",
        (
            Metric("runtime/store/placement.py::Placed.reason", "event `session.placed`, `reason`"),
            Metric("runtime/api/admin.py::NodeOut.heartbeat_age_s", "`tenuto nodes --json`, `heartbeat_age_s`"),
        ),
        "tests/runtime/store/test_placement.py::test_the_event_says_from_where_and_why",
    ),
    Box(
        "tokenizer",
        "runtime/api/models.py::ensure_it_fits",
        "counts the tokens of what is sent, by the chat format of the node that will run it",
        "the context has no room for them: 400 `context_length_exceeded`, and nothing is accepted",
        _counted("prompts", "prompts_refused"),
        "tests/runtime/api/test_boxes.py::test_a_prompt_that_the_context_has_no_room_for_is_counted_and_not_accepted",
    ),
    Box(
        "scheduler",
        "engine/scheduler.py::Scheduler",
        "says what the next step of the engine computes: whose tokens, within a budget and the pages that there are",
        "pages run short: who came last goes back to the queue, and comes back with the same tokens",
        (
            *_engine("preemptions", "swapped_pages"),
            Metric("engine/metrics.py::Metrics.queue_s", "`tenuto engine --json`, `metrics.queue_s`"),
        ),
        "tests/engine/test_preemption.py::test_a_preempted_request_goes_on_with_the_same_tokens_and_says_what_happened",
    ),
    Box(
        "engine",
        "engine/core.py::EngineCore",
        "makes tokens of token ids and pages, one step after the other",
        "its process is killed: what the tiers have is read back, the rest is computed again, the tokens are the same",
        (
            *_engine("restored_host_tokens", "recomputed_tokens"),
            Metric("engine/metrics.py::Metrics.step_s", "`tenuto engine --json`, `metrics.step_s`"),
        ),
        "tests/engine/test_process.py::test_after_sigkill_the_arena_is_adopted_and_the_stream_goes_on",
    ),
    Box(
        "streamer",
        "runtime/api/stream.py::sse",
        "sends committed events in order, each with its position",
        "a reader is cut off or too slow: it reads on from its position, out of the table, and nobody waits for it",
        _counted("streams_open", "frames", "frames_behind"),
        "tests/runtime/api/test_boxes.py::test_a_reader_behind_what_the_feed_keeps_is_counted_and_gets_every_event",
    ),
)


def resolve(reference: str) -> int:
    """The line of `path::name` or `path::Class.field`. Raises LookupError where there is no such thing."""
    path, _, name = reference.partition("::")
    file = ROOT / path
    if not file.is_file():
        raise LookupError(f"{reference}: there is no file {path}")
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    line = 0
    for part in name.split("."):
        found = next((node for node in body if _name(node) == part), None)
        if found is None:
            raise LookupError(f"{reference}: there is no {part} in {path}")
        line, body = found.lineno, getattr(found, "body", [])
    return line


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return ""


def document() -> str:
    """The page. Raises LookupError for a name that the sources do not have."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# The boxes between a call and the device"
    yield ""
    yield "Each has one job and one way to fail, figures that show it, and a test that makes it fail. `python -m"
    yield "runtime.boxes` writes this page from `runtime/boxes.py` and looks every name in it up in the sources."
    yield ""
    yield "| | job | how it fails | what shows it | the test that makes it fail |"
    yield "|---|---|---|---|---|"
    for box in BOXES:
        yield f"| {' | '.join(_cells(box))} |"


def _cells(box: Box) -> Iterator[str]:
    for reference in (box.code, box.test, *(metric.where for metric in box.metrics)):
        resolve(reference)
    path, _, name = box.code.partition("::")
    yield f"**{box.name}**: [`{name}`](../{path})"
    yield box.job
    yield box.failure
    yield "; ".join(metric.shown for metric in box.metrics)
    path, _, name = box.test.partition("::")
    yield f"[`{name}`](../{path})"


def main() -> None:
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(document())


if __name__ == "__main__":
    main()
