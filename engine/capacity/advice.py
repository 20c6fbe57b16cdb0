"""What else could be done: other numbers for weights and KV, and drafted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from engine.capacity import formulas as f
from engine.capacity.numbers import KV_BYTES
from engine.capacity.placement import Placement
from engine.capacity.results import Drafting, Variant
from engine.capacity.wish import Terms

MOST_DRAFTED: Final = 8
_PAYS: Final = 1.05  # less is lost in what is not counted
_SMALL_WEIGHTS = "tool calls that parse, code that runs, arithmetic: perplexity hides what 4 bits cost there"
_FP8_WEIGHTS = "tool calls that parse and code that runs"
_FP8_KV = "retrieval from the middle of long contexts, and long answers"


def drafts(place: Placement, batch: int) -> list[Drafting]:
    """1 to 8 drafted tokens: a pass over all of them costs more than a step where computing binds, where more experts
    are touched, and for the draft itself."""
    terms, step = place.terms, place.step_s(batch)
    found = []
    for drafted in range(1, MOST_DRAFTED + 1):
        gained = f.tokens_per_pass(terms.acceptance, drafted)
        cost = place.step_s(batch, drafted) / step + drafted * terms.draft_cost
        found.append(Drafting(drafted, gained, cost, gained / cost))
    return found


def drafts_advice(found: Sequence[Drafting], terms: Terms, batch: int) -> str:
    best = max(found, key=lambda one: one.speedup)
    given = f"with {terms.acceptance:.0%} of drafted tokens accepted and a batch of {batch}"
    if best.speedup < _PAYS:
        return f"draft nothing: {given}, the best length gives {best.speedup:.2f} times the speed"
    return f"draft {best.drafted}: {given}, that gives {best.speedup:.2f} times the speed"


def variants(place: Placement, batch: int) -> list[Variant]:
    """The plan in fewer bytes, each for what it saves."""
    facts, terms = place.facts, place.terms
    own = terms.weights_dtype
    wanted = [
        (own, "fp8", _FP8_KV),
        ("fp8", terms.kv_dtype, _FP8_WEIGHTS),
        ("int4", terms.kv_dtype, _SMALL_WEIGHTS),
        ("fp8", "fp8", f"{_FP8_WEIGHTS}; {_FP8_KV}"),
        ("int4", "fp8", f"{_SMALL_WEIGHTS}; {_FP8_KV}"),
    ]
    found: dict[tuple[int, str], Variant] = {}
    for weights, kv, guards in wanted:
        other = Placement(facts, replace(terms, weights_dtype=weights, kv_dtype=kv), place.degree)
        fewer = (place.weights - other.weights, KV_BYTES[terms.kv_dtype] - KV_BYTES[kv])
        if min(fewer) < 0 or max(fewer) == 0 or (other.weights, kv) in found:
            continue
        name = weights or ("as in the file" if facts.file_bytes else facts.weights)
        step_ms = other.step_s(batch) * 1e3
        found[other.weights, kv] = Variant(name, kv, other.weights, other.users, step_ms, guards)
    return list(found.values())


def precision_advice(place: Placement, batch: int, others: Sequence[Variant]) -> str:
    """By what binds: room for KV, reading weights, reading KV, or computing."""
    if not others:
        return "weights and KV are in the fewest bytes already"
    if not place.users:
        first = next((one for one in others if one.users_by_memory), None)
        if first is None:
            return "memory binds: no number is small enough here, use more devices"
        return f"memory binds: weights in {first.weights_dtype} and KV in {first.kv_dtype} fit; check {first.guards}"
    weights = place.read_weights(batch)
    kv = place.step_bytes(batch) - weights
    if place.step_flops(batch) / place.flops > (weights + kv) / place.bps:
        return f"computing binds: {_quicker(place)}"
    if kv >= weights:
        return f"reading KV binds ({kv / (weights + kv):.0%} of a step's bytes): KV in fp8 first; check {_FP8_KV}"
    share = f"{weights / (weights + kv):.0%} of a step's bytes"
    first = next((one for one in others if one.weight_bytes < place.weights), None)
    if first is None:
        return f"reading weights binds ({share}), and they are in the fewest bytes already: batch more"
    return f"reading weights binds ({share}): weights in {first.weights_dtype} first; check {first.guards}"


def _quicker(place: Placement) -> str:
    device, own = place.terms.device, place.terms.weights_dtype or place.facts.weights
    if device.peak_flops("fp8") > device.peak_flops(own):
        return f"fp8 weights and activations double the speed of {device.name}; check {_FP8_WEIGHTS}"
    return f"fewer bytes do not help, and {device.name} computes in nothing quicker: use more devices"
