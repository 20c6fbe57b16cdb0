"""One function a formula. Bytes, seconds, FLOP; `n` is tokens of context, `batch` sequences that decode together.

Sources: [R] Williams, Waterman and Patterson, Roofline, 2009. [G] Ainslie et al., GQA, 2023. [D] DeepSeek-V2, 2024.
[P] Kwon et al., PagedAttention, 2023. [S] Leviathan et al., Fast inference from transformers via speculative decoding,
2023. [K] Kaplan et al., Scaling laws, 2020, section 2.1. [B] Raab and Steger, Balls into bins, 1998.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from engine.capacity.facts import Experts, Group, ModelFacts
from engine.capacity.numbers import KV_BYTES, weight_bytes

PAGE_TOKENS = 16
TABLE_ENTRY_BYTES = 4
LAUNCHES_PER_LAYER = 10
LAUNCH_S = 5e-6
DISPATCH_BYTES, COMBINE_BYTES = 1, 2  # a number sent to an expert is fp8, one that comes back bf16


# -- KV -------------------------------------------------------------------------------------------------------------


def row_bytes(group: Group, dtype: str) -> int:
    """Bytes that one token leaves in the layers of a group: layers x Hkv x (dk + dv) x b [G], or layers x (rank + rope)
    x b with a latent row [D]."""
    return group.layers * group.row_numbers * KV_BYTES[dtype]


def is_per_token(group: Group, n: int) -> bool:
    """Whether the group still grows with each token at a context of n: a window does until it is full."""
    return group.kind == "growing" or (group.kind == "windowed" and n <= group.window)


def kv_bytes_per_token(groups: Iterable[Group], dtype: str, n: int = 0) -> int:
    """Bytes that one more token leaves, at a context of n: of all groups that grow there."""
    return sum(row_bytes(group, dtype) for group in groups if is_per_token(group, n))


def state_bytes_per_session(groups: Iterable[Group], dtype: str, n: int) -> int:
    """Bytes that a session of n tokens keeps however it goes on: states, and windows that are full."""
    windows = sum(row_bytes(group, dtype) * group.window for group in groups if _is_full(group, n))
    return windows + sum(group.layers * group.state_bytes for group in groups if group.kind == "state")


def session_bytes(groups: Iterable[Group], dtype: str, n: int) -> int:
    """Bytes that a session of n tokens keeps: n x those of a token, and its state."""
    groups = tuple(groups)
    return n * kv_bytes_per_token(groups, dtype, n) + state_bytes_per_session(groups, dtype, n)


def on_one_device(group: Group, degree: int) -> Fraction:
    """The part of a group's bytes that each of `degree` devices has. A row divides among its heads: where there are
    more devices than heads, heads are replicated."""
    return Fraction(-(-group.shards // degree), group.shards)


def shard_bytes(groups: Iterable[Group], dtype: str, n: int, degree: int) -> int:
    """Bytes of a session of n tokens on each of `degree` devices, rounded up."""
    parts = ((one, on_one_device(one, degree)) for one in groups)
    return math.ceil(sum((session_bytes((one,), dtype, n) * part for one, part in parts), Fraction(0)))


def shard_bytes_per_token(groups: Iterable[Group], dtype: str, n: int, degree: int) -> int:
    """Bytes of one more token on each of `degree` devices, rounded up."""
    parts = ((one, on_one_device(one, degree)) for one in groups)
    return math.ceil(sum((kv_bytes_per_token((one,), dtype, n) * part for one, part in parts), Fraction(0)))


def _is_full(group: Group, n: int) -> bool:
    return group.kind == "windowed" and n > group.window


# -- pages ----------------------------------------------------------------------------------------------------------


def page_bytes(groups: Iterable[Group], dtype: str, tokens: int = PAGE_TOKENS) -> int:
    """Bytes of a page, which has a row of every layer that has rows, windows included [P]."""
    return tokens * sum(row_bytes(group, dtype) for group in groups)


def table_bytes(n: int, page: int = PAGE_TOKENS) -> int:
    """Bytes of a sequence's block table, an int32 for each page [P]."""
    return TABLE_ENTRY_BYTES * pages(n, page)


def pages(n: int, page: int = PAGE_TOKENS) -> int:
    return -(-n // page)


def reserved_waste(n: int, reserved: int) -> float:
    """The part that is not used where `reserved` tokens are set aside for each sequence of n [P, section 2]."""
    return 1 - n / reserved


def paged_waste(n: int, page: int = PAGE_TOKENS) -> float:
    """The part that is not used of the pages of a sequence of exactly n tokens."""
    held = pages(n, page) * page
    return (held - n) / held


def mean_paged_waste(n: int, page: int = PAGE_TOKENS) -> float:
    """The same for sequences of about n tokens: half a page on average."""
    return (page / 2) / (n + page / 2)


# -- work -----------------------------------------------------------------------------------------------------------


def decode_flops(facts: ModelFacts, n: int) -> int:
    """FLOP for one token at a context of n: 2 for each active weight [K], 2 x Hq x (dk + dv) for each token that a
    layer sees, and a state's update."""
    seen = sum(group.layers * group.decode_flops * seen_tokens(group, n) for group in facts.groups)
    return 2 * facts.active + seen + sum(group.layers * group.token_flops for group in facts.groups)


def seen_tokens(group: Group, n: int) -> int:
    if group.kind == "state":
        return 0
    return min(n, group.window) if group.kind == "windowed" else n


def prefill_flops(facts: ModelFacts, n: int, before: int = 0) -> float:
    """FLOP for the tokens from `before` to n of a prompt: as decoding's, summed over positions, each of which sees on
    average half of what lies before it."""
    seen = sum(
        group.layers * group.prefill_flops * (_pairs(group, n) - _pairs(group, before)) for group in facts.groups
    )
    steady = 2 * facts.active + sum(group.layers * group.token_flops for group in facts.groups)
    return float((n - before) * steady + seen)


def _pairs(group: Group, n: int) -> float:
    """Pairs of tokens of which the later one sees the earlier: n^2 / 2, and n w - w^2 / 2 with a window w."""
    if group.kind == "state":
        return 0.0
    if group.kind == "windowed" and n > group.window:
        return n * group.window - group.window**2 / 2
    return n * n / 2


def ridge(flops: float, bps: float) -> float:
    """FLOP per byte from which computing takes longer than reading [R]."""
    return flops / bps


def intensity(batch: int, flops_per_token: float, weights: float, kv_bytes: float) -> float:
    """FLOP per byte of a decode step: batch x (2P + attention) / (bytes(P) + batch x n x kv) [R]."""
    return batch * flops_per_token / (weights + batch * kv_bytes)


def intensity_limit(flops_per_token: float, kv_bytes: float) -> float:
    """What the intensity tends to with the batch: the weights are shared by all, the KV is read by each alone."""
    return flops_per_token / kv_bytes if kv_bytes else math.inf


# -- mixtures -------------------------------------------------------------------------------------------------------


def touched_experts(experts: Experts, batch: int) -> float:
    """Experts of a layer that a step reads, where tokens choose independently: E (1 - (1 - k/E)^batch)."""
    return experts.count * (1 - (1 - experts.active / experts.count) ** batch)


def dispatch_bytes(experts: Experts) -> int:
    """Bytes that a token sends in one layer: a copy of it, in fp8, to each of its experts."""
    return experts.active * experts.width * DISPATCH_BYTES


def combine_bytes(experts: Experts) -> int:
    """Bytes that come back for it, in bf16."""
    return experts.active * experts.width * COMBINE_BYTES


def imbalance(batch: int, experts: Experts, degree: int) -> float:
    """How much more than the mean the fullest of `degree` devices has to do where choices are independent:
    1 + sqrt(2 ln D / m), with m tokens for a device on average; D at most, when all go to one [B]."""
    if degree == 1:
        return 1.0
    mean = batch * experts.active / degree
    return min(float(degree), 1 + math.sqrt(2 * math.log(degree) / mean))


# -- launches, drafts, links ----------------------------------------------------------------------------------------


def launches_s(layers: int) -> float:
    """Seconds of a step that go to launching kernels where it is not captured: layers x 10 x 5 us."""
    return layers * LAUNCHES_PER_LAYER * LAUNCH_S


def tokens_per_pass(acceptance: float, drafted: int) -> float:
    """Tokens that one pass of the target yields: (1 - a^(k+1)) / (1 - a) [S, equation 1]."""
    if acceptance >= 1:
        return drafted + 1.0
    return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


def break_even_bps(kv_bytes: int, recompute_s: float) -> float:
    """Bytes per second above which reading a token's KV is quicker than computing it."""
    return kv_bytes / recompute_s


def all_reduce_s(batch: int, hidden: int, layers: int, degree: int, link_bps: float) -> float:
    """Seconds of the two all-reduces a layer has under tensor parallelism, in bf16 over a ring: each device sends
    2 (D - 1) / D of the row, over half of the link, which counts both ways."""
    sent = 2 * (degree - 1) / degree * batch * hidden * 2
    return 2 * layers * sent / (link_bps / 2)


def model_weight_bytes(facts: ModelFacts, dtype: str = "", *, active: bool = False) -> int:
    """Bytes of all weights, or of those that one token meets. `dtype`: of all of them; empty: as the checkpoint is."""
    total, routed = facts.parameters.total, facts.parameters.experts
    met = facts.active_experts if active else routed
    if facts.file_bytes and not dtype:
        return facts.file_bytes * (total - routed + met) // total
    own = dtype or facts.weights
    of_experts = dtype or facts.expert_weights or own
    return weight_bytes(total - routed, own) + weight_bytes(met, of_experts)
