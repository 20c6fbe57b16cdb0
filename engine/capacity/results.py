"""What a plan says. Every field is a number or a sentence, so that the whole is one JSON object."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Degree:
    """One legal number of devices. `kv_replication`: how many times a session's bytes lie on them all together."""

    tp: int
    weight_bytes_per_device: int
    kv_bytes_per_token_per_device: int
    kv_replication: float
    users_by_memory: int
    fits: bool


@dataclass(frozen=True)
class TierPays:
    """One tier below the device. `least_tokens`: from how many on reading is quicker than computing; null: never."""

    tier: str
    gb_s: float
    restore_s: float
    recompute_s: float
    least_tokens: int | None
    pays: bool


@dataclass(frozen=True)
class Drafting:
    """`drafted` tokens a pass: how many come of it, what the pass costs in steps, and what is gained."""

    drafted: int
    tokens_per_pass: float
    cost_in_steps: float
    speedup: float


@dataclass(frozen=True)
class Variant:
    """The same plan in other numbers. `guards`: the evals that show what it does to answers."""

    weights_dtype: str
    kv_dtype: str
    weight_bytes: int
    users_by_memory: int
    decode_step_ms: float
    guards: str


@dataclass(frozen=True)
class LongContext:
    """One sequence of `tokens`. `of_full_attention`: its bytes as a part of what full multi-head attention keeps."""

    tokens: int
    kv_bytes: int
    prefill_s: float
    of_full_attention: float
    fits: bool


@dataclass(frozen=True)
class Mixture:
    """`touched`: experts of a layer that a step over `batch` tokens reads. Bytes are of one token and layer."""

    experts: int
    active: int
    batch: int
    touched: float
    touched_at_8: float
    touched_at_64: float
    dispatch_bytes: int
    combine_bytes: int
    all_to_all_ms: float
    imbalance: float


@dataclass(frozen=True)
class Paging:
    """Of sequences as long as the context. `half_page_waste`: of lengths about it, on average."""

    page_tokens: int
    page_bytes: int
    table_bytes: int
    waste: float
    half_page_waste: float
    reserved_waste: float


@dataclass(frozen=True)
class Knobs:
    """The two settings that follow: how much of a device's memory, and how many sequences at once."""

    memory_fraction: float
    max_sequences: int
    kv_pool_tokens: int


@dataclass(frozen=True)
class Plan:
    """See docs/plan.md for each key. `kv_bytes_per_token` is of one copy, `…_per_device` with heads replicated where
    there are more devices than KV heads. Null: it does not apply, or nothing fits."""

    model: str
    family: str
    device: str
    tp: int
    dp_attention: bool
    context: int
    fits: bool
    verdict: str
    parameters: int
    active_parameters: int
    weights_dtype: str
    kv_dtype: str
    weight_bytes: int
    weight_bytes_per_device: int
    active_weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_token_per_device: int
    state_bytes_per_session: int
    kv_bytes_per_session: int
    kv_replication: float
    users_by_memory: int
    users_by_throughput: int
    users: int
    binding: str
    max_batch_for_slo: int
    requests_per_second: float
    tokens_per_second: float
    replicas: int | None
    replicas_binding: str | None
    nodes: int | None
    price_per_hour: float | None
    batch: int
    decode_step_ms: float
    decode_bound: str
    all_reduce_ms: float
    prefill_s: float
    ttft_s: float
    prefill_flops: float
    ridge: float
    intensity: float
    intensity_limit: float | None
    recompute_us_per_token: float
    break_even_gb_s: float
    break_even_at_context_gb_s: float
    launches_ms: float
    legal_tp: list[int]
    degrees: list[Degree]
    tiers: list[TierPays]
    speculation: list[Drafting]
    speculation_advice: str
    precision: list[Variant]
    precision_advice: str
    long_context: list[LongContext]
    mixture: Mixture | None
    paging: Paging
    knobs: Knobs | None
    assumed: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
