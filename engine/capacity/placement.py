"""A model on a number of devices: what each holds, and how long a step takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from engine.capacity import formulas as f
from engine.capacity.facts import ModelFacts
from engine.capacity.numbers import weight_bytes
from engine.capacity.wish import Terms

MOST_BATCH = 1 << 20


@dataclass(frozen=True)
class Placement:
    """`degree` devices that hold the model together. Under tensor parallelism each has a part of every layer and of
    every session; with `terms.dp_attention` each has all but the experts, and sessions of its own."""

    facts: ModelFacts
    terms: Terms
    degree: int

    # -- memory -----------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> int:
        """Bytes of one copy."""
        return f.model_weight_bytes(self.facts, self.terms.weights_dtype)

    @property
    def expert_weights(self) -> int:
        """Bytes of the routed experts among them."""
        facts = self.facts
        if facts.file_bytes and not self.terms.weights_dtype:
            return facts.file_bytes * facts.parameters.experts // facts.parameters.total
        dtype = self.terms.weights_dtype or facts.expert_weights or facts.weights
        return weight_bytes(facts.parameters.experts, dtype)

    @property
    def own_weights(self) -> Fraction:
        """Bytes of weights on one device."""
        if not self._spread:
            return Fraction(self.weights, self.degree)
        return self.weights - self.expert_weights + self.expert_weights * self._expert_part

    @property
    def own_session(self) -> int:
        """Bytes of one session on one device that holds it, at the planned context."""
        return self.own_session_at(self.terms.context)

    def own_session_at(self, n: int) -> int:
        degree = 1 if self._spread else self.degree
        return f.shard_bytes(self.facts.groups, self.terms.kv_dtype, n, degree)

    @property
    def room(self) -> Fraction:
        """Bytes of one device that are left for KV; below 0 where the weights do not fit."""
        overhead = Fraction(self.terms.overhead_bytes, self.degree)
        return self.terms.device.hbm_bytes * self.terms.util - self.own_weights - overhead

    @property
    def users(self) -> int:
        """Sessions that fit: (HBM x util x D - weights - overhead) / (D x a session's bytes on one device)."""
        if self.room < 0:
            return 0
        held = self.room // self.own_session if self.own_session else MOST_BATCH
        return min(int(held) * (self.degree if self._spread else 1), 1 << 62)

    @property
    def replication(self) -> Fraction:
        """How many times a session's bytes lie on the devices, all together."""
        one = f.session_bytes(self.facts.groups, self.terms.kv_dtype, self.terms.context)
        if self._spread or not one:
            return Fraction(1)
        return Fraction(self.own_session * self.degree, one)

    # -- time -------------------------------------------------------------------------------------------------------

    @property
    def flops(self) -> float:
        """FLOP per second that are reached."""
        return self.peak_flops * self.terms.mfu

    @property
    def peak_flops(self) -> float:
        return self.terms.device.peak_flops(self.terms.weights_dtype or self.facts.weights) * self.degree

    @property
    def bps(self) -> float:
        """Bytes per second of device memory that are reached."""
        return self.terms.device.hbm_bps * self.degree * self.terms.mbu

    def read_weights(self, tokens: int) -> float:
        """Bytes of weights that a step over so many tokens reads: all, but only the experts that are touched."""
        one = self.facts.experts
        if one is None:
            return float(self.weights)
        touched = f.touched_experts(one, tokens) / one.count
        copies = self.degree if self._spread else 1
        shared = (self.weights - self.expert_weights) * copies
        return shared + self.expert_weights * touched * float(self._expert_part * self.degree if self._spread else 1)

    def step_bytes(self, batch: int, drafted: int = 0) -> float:
        """Bytes that all devices read for a step: weights, and each sequence's KV on each device that holds it."""
        copies = 1 if self._spread else self.degree
        return self.read_weights(batch * (drafted + 1)) + batch * self.own_session * copies

    def step_flops(self, batch: int, drafted: int = 0) -> float:
        """FLOP of a step, that of the fullest device times their number where experts are spread."""
        one = f.decode_flops(self.facts, self.terms.context)
        tokens = batch * (drafted + 1)
        if not self._spread:
            return float(tokens * one)
        routed = 2 * self.facts.active_experts
        fullest = -(-tokens // self.degree) * self.degree
        return fullest * (one - routed) + tokens * routed * self.imbalance(tokens)

    def step_s(self, batch: int, drafted: int = 0) -> float:
        """Seconds of a decode step: reading or computing, whichever takes longer, and the exchange of tokens."""
        work = max(self.step_bytes(batch, drafted) / self.bps, self.step_flops(batch, drafted) / self.flops)
        return work + self.all_to_all_s(batch * (drafted + 1))

    def imbalance(self, batch: int) -> float:
        one = self.facts.experts
        return f.imbalance(batch, one, self.degree) if one else 1.0

    def all_to_all_s(self, batch: int) -> float:
        """Seconds of the two exchanges in each layer of experts, of the fullest device; 0 where none is needed."""
        one = self.facts.experts
        if one is None or not self._spread or self.degree == 1:
            return 0.0
        each = batch / self.degree * self.imbalance(batch) * (self.degree - 1) / self.degree
        sent = each * (f.dispatch_bytes(one) + f.combine_bytes(one))
        return one.layers * sent / (self.terms.device.link_bps / 2)

    def all_reduce_s(self, batch: int) -> float:
        if self._spread or self.degree == 1:
            return 0.0
        facts, link = self.facts, self.terms.device.link_bps
        return f.all_reduce_s(batch, facts.hidden, facts.layers, self.degree, link)

    def prefill_s(self, n: int, before: int = 0) -> float:
        """Seconds to compute the tokens from `before` to n of one prompt, on all devices."""
        return max(f.prefill_flops(self.facts, n, before) / self.flops, float(self.weights) / self.bps)

    @property
    def recompute_s(self) -> float:
        """Seconds to compute one token again, attention aside: 2 x active parameters / FLOP per second."""
        return 2 * self.facts.active / self.flops

    def batch_within(self, seconds: float) -> int:
        """The most sequences whose step takes no longer; 0 where one alone does."""
        if self.step_s(1) > seconds:
            return 0
        low, high = 1, MOST_BATCH
        if self.step_s(high) <= seconds:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.step_s(middle) <= seconds else (low, middle)
        return low

    @property
    def _spread(self) -> bool:
        return self.terms.dp_attention

    @property
    def _expert_part(self) -> Fraction:
        """The part of all experts that one device holds; where they do not divide, some are there twice."""
        one = self.facts.experts
        return Fraction(math.ceil(one.count / self.degree), one.count) if one else Fraction(0)


def legal_degrees(facts: ModelFacts, dp_attention: bool, most: int) -> list[int]:
    """Numbers of devices that the model divides among: query heads and widths by it, and KV heads by it or it by them,
    for then they are replicated evenly. Experts are spread over any number."""
    if dp_attention:
        experts = facts.experts.count if facts.experts else 1
        return list(range(1, min(most, experts) + 1))
    return [degree for degree in range(1, most + 1) if illegal(facts, degree) is None]


def illegal(facts: ModelFacts, degree: int) -> str | None:
    """Why a model cannot be divided among so many; None where it can."""
    for name, value in facts.degrees:
        if value % degree:
            return f"{degree} does not divide {name} {value}"
    kept = facts.kv_heads.count
    if kept > 1 and kept % degree and degree % kept:
        return f"{degree} neither divides the {kept} KV heads nor is a multiple of them"
    return None
