"""What the doctor says: findings, each with evidence, a cause and remedies, and reports, which say what was ruled out
too. `KNOWN` lists every finding there is; docs/doctor.md is written from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

Value = float | int | str | None


class Severity(StrEnum):
    """critical: nothing runs, or soon nothing will; warning: somebody waits for it; advice: it could be better."""

    CRITICAL = "critical"
    WARNING = "warning"
    ADVICE = "advice"


@dataclass(frozen=True)
class Remedy:
    """`set`: what to do; `effect`: what it would bring here; `cost`: what it takes. `gain`: the figure of the effect,
    in `unit`; 0 where it would bring nothing here."""

    set: str
    effect: str
    cost: str
    gain: float = 0.0
    unit: str = ""


@dataclass(frozen=True)
class Finding:
    """`evidence`: figures by name; sizes in bytes, times in seconds, as their names say. `remedies`: best first."""

    name: str
    severity: Severity
    evidence: Mapping[str, Value]
    cause: str
    remedies: tuple[Remedy, ...] = ()


@dataclass(frozen=True)
class Report:
    """Of one part of one node. `notes`: what was looked at and ruled out, in its order; `away`: why it could not be
    looked at, or only from outside."""

    part: str
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    away: str | None = None


@dataclass(frozen=True)
class Known:
    """A finding that there can be, in words for people: what it means, and what to do first."""

    severity: Severity
    means: str
    do: str
    evidence: tuple[str, ...] = field(default=())

    def found(self, name: str, evidence: Mapping[str, Value], cause: str, remedies: Sequence[Remedy] = ()) -> Finding:
        assert set(evidence) == set(self.evidence), f"{name} has other evidence than is written down"
        return Finding(name, self.severity, dict(evidence), cause, tuple(remedies))


_START = ("weights_bytes", "pool_bytes", "arena_bytes", "machine_bytes", "available_bytes", "said")
_TAIL = ("waits", "share", "seconds", "p50_s", "p99_s", "longest_s")

KNOWN: Final[Mapping[str, Known]] = {
    "memory.never_fits": Known(
        Severity.CRITICAL,
        "The engine does not start, and the weights alone are more than the memory that there is.",
        "Serve a smaller model, or the same one in fewer bits; no size of the pool helps.",
        _START,
    ),
    "memory.pool_too_large": Known(
        Severity.CRITICAL,
        "The engine does not start: weights, KV pool and host arena together are more than there is. It fails before"
        " anybody asks it anything, and it fails every time.",
        "Lower `TENUTO_KV_TOKENS` to what the finding says fits.",
        (*_START, "fits_tokens"),
    ),
    "memory.start_failed": Known(
        Severity.CRITICAL,
        "The engine does not start, and memory is not why.",
        "Do what its last words say; they are in the evidence and in its log.",
        _START,
    ),
    "memory.killed_under_load": Known(
        Severity.WARNING,
        "The engine had served when it was killed from outside (SIGKILL), as the kernel does where memory runs out. It"
        " fits when it starts; what grows later does not: the arena as it fills, workspaces in memory, neighbours.",
        "Make what grows smaller, in the order of the remedies; compare `dmesg` for the kernel's own words.",
        ("died_at", "machine_bytes", "available_bytes", "arena_bytes", "workspaces_bytes", "resident_bytes"),
    ),
    "memory.overpromised": Known(
        Severity.WARNING,
        "What is promised and not yet taken (the rest of pool and arena, workspaces in memory) is more than the memory"
        " that could be had now. It works until they are filled.",
        "Make a promise smaller before it is called in.",
        ("promised_bytes", "available_bytes", "arena_bytes", "pool_bytes", "workspaces_bytes", "resident_bytes"),
    ),
    "memory.unaccounted": Known(
        Severity.WARNING,
        "The engine's process holds gigabytes beyond weights, pool and arena.",
        "Restart the engine when it suits (sessions go on), and send `tenuto doctor bundle` with it.",
        ("resident_bytes", "expected_bytes", "unaccounted_bytes"),
    ),
    "pool.full": Known(
        Severity.WARNING,
        "The KV pool is full and compute is not: requests wait for pages while steps decode fewer than they could.",
        "The first remedy with an effect: they are in the order of what they cost for this load.",
        ("steps", "waiting_share", "pool_used", "waiting", "decoding", "most_running", "preemptions", "tokens_each"),
    ),
    "tail.queueing": Known(
        Severity.WARNING,
        "First tokens come late because requests waited to be admitted.",
        "Another node, or fewer requests at once; where the pool is full as well, see `tenuto doctor pool` first.",
        _TAIL,
    ),
    "tail.prefill": Known(
        Severity.WARNING,
        "Tokens come late because steps carried somebody else's prompt beside them.",
        "Shorter prompts at once: send long ones to a node of their own, keep prefixes equal so that they are reused.",
        _TAIL,
    ),
    "tail.preemption": Known(
        Severity.WARNING,
        "Generations stop in the middle: they were sent back to the queue for want of pages, or a step had to copy"
        " dirty pages out before it could run.",
        "A larger pool, or fewer requests at once: see `tenuto doctor pool`.",
        _TAIL,
    ),
    "tail.host_stall": Known(
        Severity.WARNING,
        "The device waits for the host: between steps something else had the processor or the compute thread.",
        "Give the engine cores of its own (`TENUTO_ENGINE_THREADS` below the number of cores), move neighbours away.",
        _TAIL,
    ),
    "tail.tier_io": Known(
        Severity.WARNING,
        "Tokens come late because pages were read from a tier, or copied to one.",
        "A faster disk or more host memory (`TENUTO_HOST_KV_BYTES`); `tenuto kv tiers` shows each tier's faults.",
        (*_TAIL, "host_tokens", "nvme_tokens", "shared_tokens"),
    ),
    "tail.graph_miss": Known(
        Severity.WARNING,
        "Decode steps found no recorded graph and were recorded, or dispatched one by one.",
        "It passes once each batch size and length was seen; where it goes on, batches are larger than any that is"
        " recorded.",
        (*_TAIL, "missed_steps"),
    ),
    "tail.unexplained": Known(
        Severity.WARNING,
        "Tokens come late and none of the six suspects did it: the steps themselves took longer.",
        "Look at the machine: clocks, temperature, neighbours on the same cores or device.",
        _TAIL,
    ),
    "precision.weights": Known(
        Severity.ADVICE,
        "Requests wait, and a decode step mostly reads weights: fewer bits per weight make it shorter.",
        "Try the dtype that is named, and run the evals.",
        ("weights_bytes", "kv_read_bytes", "decode_s", "batch", "speedup"),
    ),
    "precision.kv": Known(
        Severity.ADVICE,
        "Requests wait for pages, or a decode step mostly reads KV: fewer bits per number of the KV bring more users.",
        "Try the KV dtype that is named, and run the evals.",
        ("weights_bytes", "kv_read_bytes", "pool_tokens", "batch", "speedup"),
    ),
    "precision.prefill": Known(
        Severity.ADVICE,
        "Requests wait, and most of the time goes into prompts, which compute binds and not bytes.",
        "Try smaller activations where the device has units for them, and run the evals.",
        ("prefill_share", "prefill_s_per_token", "batch", "speedup"),
    ),
    "speculation.too_long": Known(
        Severity.ADVICE,
        "Drafts are longer than pays: most of what is verified behind the first few tokens is thrown away.",
        "Draft as many tokens as the finding names.",
        ("acceptance", "drafted_each", "best", "batch", "speedup_now", "speedup_best"),
    ),
    "speculation.too_short": Known(
        Severity.ADVICE,
        "Drafts stand so often that longer ones would pay.",
        "Draft as many tokens as the finding names.",
        ("acceptance", "drafted_each", "best", "batch", "speedup_now", "speedup_best"),
    ),
    "speculation.not_worth_it": Known(
        Severity.ADVICE,
        "Drafts cost more than they bring at this acceptance and batch.",
        "Turn speculation off for this load.",
        ("acceptance", "drafted_each", "best", "batch", "speedup_now", "speedup_best"),
    ),
}


def found(name: str, evidence: Mapping[str, Value], cause: str, remedies: Sequence[Remedy] = ()) -> Finding:
    """A finding that is known by name."""
    return KNOWN[name].found(name, evidence, cause, remedies)
