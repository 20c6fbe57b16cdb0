"""Parts of a plan that stand by themselves: tiers, long contexts, experts, pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine.capacity import formulas as f
from engine.capacity.facts import ModelFacts
from engine.capacity.numbers import KV_BYTES
from engine.capacity.placement import Placement
from engine.capacity.results import LongContext, Mixture, Paging, TierPays
from engine.capacity.wish import Terms
from kvtier.policy import Place, Prefill, TierView, break_even_tokens

LONG: Final = (32_768, 131_072, 1_000_000)
HOST_LATENCY_S, NVME_LATENCY_S = 2e-4, 1e-3


def tiers(place: Placement) -> list[TierPays]:
    terms, facts = place.terms, place.facts
    host = terms.host_bps or terms.device.host_bps * place.degree
    size = f.session_bytes(facts.groups, terms.kv_dtype, terms.context)
    recompute_s = place.prefill_s(terms.context)
    found = []
    for name, where, bps, latency_s in (
        ("host", Place.HOST, host, HOST_LATENCY_S),
        ("nvme", Place.NVME, terms.nvme_bps, NVME_LATENCY_S),
    ):
        view = TierView(where, 0, 0, bps, bps, latency_s)
        read_s = view.read_s(size)
        least = _least_tokens(place, view)
        found.append(TierPays(name, bps / 1e9, read_s, recompute_s, least, read_s < recompute_s))
    return found


def _least_tokens(place: Placement, view: TierView) -> int | None:
    """By the rule that the tiers go by at run time. Each token is counted with its rows in windows, too, and what is
    there whole from the first token on, a state, with the latency."""
    groups, dtype = place.facts.groups, place.terms.kv_dtype
    per_token = sum(f.row_bytes(one, dtype) for one in groups)
    states = sum(one.layers * one.state_bytes for one in groups)
    slower = replace(view, latency_s=view.read_s(states))
    square = sum(one.layers * one.prefill_flops for one in groups if one.kind == "growing") / 2
    return break_even_tokens(Prefill(place.recompute_s, square / place.flops), slower, per_token)


def long_contexts(place: Placement) -> list[LongContext]:
    facts, terms = place.facts, place.terms
    kept = facts.query_heads.count or 1
    dims = max((one.row_numbers // max(1, one.shards) for one in facts.groups), default=0)
    found = []
    for n in sorted({*LONG, facts.context, terms.context}):
        size = f.session_bytes(facts.groups, terms.kv_dtype, n)
        plain = n * facts.layers * _full_row(facts, kept, dims) * KV_BYTES[terms.kv_dtype]
        fits = place.room >= place.own_session_at(n)
        found.append(LongContext(n, size, place.prefill_s(n), size / plain if plain else 0.0, fits))
    return found


def _full_row(facts: ModelFacts, heads: int, dims: int) -> int:
    """Numbers of a token in a layer if each query head had its own key and value; of MLA, those that it unpacks to."""
    unpacked = max((one.prefill_flops // 2 for one in facts.groups), default=0)
    return unpacked or heads * dims


def mixture(place: Placement, batch: int) -> Mixture | None:
    one = place.facts.experts
    if one is None:
        return None
    return Mixture(
        experts=one.count,
        active=one.active,
        batch=batch,
        touched=f.touched_experts(one, batch),
        touched_at_8=f.touched_experts(one, 8),
        touched_at_64=f.touched_experts(one, 64),
        dispatch_bytes=f.dispatch_bytes(one),
        combine_bytes=f.combine_bytes(one),
        all_to_all_ms=place.all_to_all_s(batch) * 1e3,
        imbalance=place.imbalance(batch),
    )


def paging(facts: ModelFacts, terms: Terms) -> Paging:
    n = terms.context
    return Paging(
        f.PAGE_TOKENS,
        f.page_bytes(facts.groups, terms.kv_dtype),
        f.table_bytes(n),
        f.paged_waste(n),
        f.mean_paged_waste(n),
        f.reserved_waste(n, max(n, facts.context)),
    )
