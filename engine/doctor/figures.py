"""What the doctor goes by: figures of one engine, taken from what it and its node say. Missing ones are None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

PAGE_TOKENS: Final = 16
RECENT_S: Final = 600.0


@dataclass(frozen=True)
class Predicted:
    """What an engine takes, by arithmetic; bytes, and tokens of pool and context."""

    weights_bytes: int
    kv_bytes: int
    arena_bytes: int
    kv_bytes_per_token: int
    pool_tokens: int
    context: int
    dtype: str = "bf16"
    on_device: bool = False

    @property
    def on_host_bytes(self) -> int:
        """What the host must have."""
        return self.arena_bytes + (0 if self.on_device else self.weights_bytes + self.kv_bytes)


@dataclass(frozen=True)
class Measured:
    """What is there; bytes. `shared`: of the process's resident memory, what it shares, the arena above all;
    `workspaces`: what sandboxes' workspaces in memory may take, all together."""

    machine: int
    available: int
    weights: int | None = None
    resident: int | None = None
    shared: int | None = None
    device: int | None = None
    device_used: int | None = None
    workspaces: int = 0
    sandboxes: int = 0


@dataclass(frozen=True)
class Death:
    """How the engine last ended, other than by being stopped. `at`: ISO 8601; `served`: it had been ready; `status`:
    its exit status, below zero for a signal; `words`: its last."""

    at: str
    served: bool
    status: int | None
    words: str
    age_s: float = 0.0


@dataclass(frozen=True)
class Step:
    """See engine.spans.Step."""

    at_s: float
    model_s: float
    host_s: float
    decoding: int
    prefill: int
    graph: str
    preempted: int
    restored: int
    waiting: int
    admitted: int
    available: int


@dataclass(frozen=True)
class Wait:
    """A long wait for a token; `made_of`: seconds by cause. See engine.spans."""

    kind: str
    seconds: float
    usual_s: float
    tiers: Mapping[str, int]
    made_of: Mapping[str, float]


@dataclass(frozen=True)
class Spread:
    """Of the latest intervals between two tokens, in seconds; None where there were none."""

    count: int = 0
    p50_s: float | None = None
    p99_s: float | None = None
    max_s: float | None = None


@dataclass(frozen=True)
class Figures:
    """Of one node. `answers`: whether its engine did; `steps` and `waits` of the last ten minutes, oldest first.
    `backend`: cpu, triton, torch or openai; `speculation`: its counters, None where it has none."""

    node: str
    answers: bool = True
    why_not: str = ""
    backend: str = ""
    most_running: int = 0
    pool_pages: int = 0
    pinned_pages: int = 0
    prefill_s_per_token: float | None = None
    intervals: Spread = Spread()
    steps: Sequence[Step] = ()
    waits: Sequence[Wait] = ()
    predicted: Predicted | None = None
    measured: Measured | None = None
    death: Death | None = None
    speculation: Mapping[str, float] | None = None

    @property
    def external(self) -> bool:
        """Whether a model server elsewhere does the work."""
        return self.backend == "openai"

    @property
    def decode_steps(self) -> list[Step]:
        return [step for step in self.steps if step.decoding and not step.prefill]


def predicted(bill: Mapping[str, Any]) -> Predicted:
    """From engine.memory_use.Bill as a message."""
    return Predicted(**{one.name: bill[one.name] for one in fields(Predicted)})


def measured(memory: Mapping[str, Any], workspaces: int, sandboxes: int) -> Measured:
    """From what engine.memory_use.MemoryUse says."""
    return Measured(
        machine=memory["machine_bytes"],
        available=memory["available_bytes"],
        weights=memory["weights_bytes"],
        resident=memory["rss_bytes"],
        shared=memory["shared_bytes"],
        device=memory["device_bytes"],
        device_used=memory["device_used_bytes"],
        workspaces=workspaces,
        sandboxes=sandboxes,
    )


def figures(
    node: str,
    card: Mapping[str, Any],
    stats: Mapping[str, Any],
    told: Mapping[str, Any],
    *,
    workspaces: int = 0,
    sandboxes: int = 0,
    death: Death | None = None,
) -> Figures:
    """Of an engine that answers. `told`: its answer to `spans`."""
    spans, memory, limits = told["spans"], told["memory"], told["limits"]
    since_s = spans["now_s"] - RECENT_S
    rows = [dict(zip(spans["columns"], row, strict=True)) for row in spans["steps"]]
    waits = [one for one in spans["waits"] if one["at_s"] >= since_s]
    speeds = stats.get("speeds") or {}
    return Figures(
        node=node,
        backend=card.get("backend", ""),
        most_running=limits["running"],
        pool_pages=limits["pool_pages"],
        pinned_pages=stats["pinned_pages"],
        prefill_s_per_token=speeds.get("prefill_s_per_token"),
        intervals=Spread(**{one.name: spans["intervals"][one.name] for one in fields(Spread)}),
        steps=[Step(**row) for row in rows if row["at_s"] >= since_s],
        waits=[Wait(**{one.name: wait[one.name] for one in fields(Wait)}) for wait in waits],
        predicted=predicted(memory["bill"]) if memory else None,
        measured=measured(memory, workspaces, sandboxes) if memory else None,
        death=death,
        speculation=stats.get("speculation"),
    )


def mean(values: Sequence[float]) -> float:
    """0 of none."""
    return sum(values) / len(values) if values else 0.0


def median(values: Sequence[float]) -> float:
    """0 of none."""
    return sorted(values)[len(values) // 2] if values else 0.0


def size(size_bytes: float) -> str:
    """Bytes as people read them."""
    return f"{size_bytes / 1e9:,.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:,.1f} MB"
