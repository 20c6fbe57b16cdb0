"""Every result with its numbers filled in, like the back of an envelope: arithmetic that a person can follow by hand.

Lines use + - * / ** and floor, ceil, min, max, sqrt and ln, over numbers alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from engine.capacity import formulas as f
from engine.capacity.facts import Group
from engine.capacity.numbers import KV_BYTES, WEIGHT_BITS
from engine.capacity.placement import Placement
from engine.capacity.plan import Planned


@dataclass(frozen=True)
class Line:
    """`key` is the plan's; `words` say what is computed, `arithmetic` is that with numbers, `value` its result."""

    key: str
    words: str
    arithmetic: str
    value: float
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.arithmetic} = {number(self.value)}{f' {self.unit}' if self.unit else ''}"


def number(value: float | Fraction) -> str:
    """With commas for thousands; of what is no whole number, enough digits to go on with."""
    if isinstance(value, Fraction):
        value = float(value) if value.denominator > 1 else int(value)
    if isinstance(value, int) or float(value).is_integer() or abs(value) >= 1e12:
        return f"{round(value):,}"
    return f"{value:,.4f}" if abs(value) >= 1 else f"{value:.6g}"


def explain(planned: Planned) -> list[Line]:
    """In the order in which one would work it out."""
    return [
        *_weights(planned),
        *_kept(planned),
        *_users(planned),
        *_speed(planned),
        *_fleet(planned),
        *_tiers(planned),
        *_experts(planned),
        *_pages(planned),
    ]


def _weights(planned: Planned) -> Iterator[Line]:
    facts, place, plan = planned.facts, planned.placement, planned.plan
    kinds = facts.parameters
    parts = [kinds.embedding, kinds.head, kinds.attention, kinds.mixer, kinds.mlp, kinds.experts, kinds.router]
    named = "embedding + head + attention + state + mlp + experts + router + norms"
    yield Line("parameters", named, " + ".join(map(number, [*parts, kinds.norm])), kinds.total)
    if facts.experts:
        one = facts.experts
        rest = kinds.total - kinds.experts
        text = f"{number(rest)} + {number(kinds.experts)} * {one.active} / {one.count}"
        yield Line("active_parameters", "all but experts + experts x active / all", text, facts.active)
    if facts.file_bytes and not planned.terms.weights_dtype:
        yield Line("weight_bytes", "the file's tensors", number(facts.file_bytes), plan.weight_bytes, "B")
        return
    own = planned.terms.weights_dtype or facts.weights
    routed = planned.terms.weights_dtype or facts.expert_weights or own
    words = "weights x bits / 8"
    if routed == own:
        text = f"ceil({number(kinds.total)} * {_bits(own)} / 8)"
    else:
        rest = kinds.total - kinds.experts
        text = f"ceil({number(rest)} * {_bits(own)} / 8) + ceil({number(kinds.experts)} * {_bits(routed)} / 8)"
        words = "others x bits / 8 + experts x bits / 8"
    if facts.experts and own == routed:
        rest = kinds.total - kinds.experts
        text = f"ceil({number(rest)} * {_bits(own)} / 8) + ceil({number(kinds.experts)} * {_bits(own)} / 8)"
    yield Line("weight_bytes", words, text, place.weights, "B")


def _bits(dtype: str) -> str:
    return f"{float(WEIGHT_BITS[dtype]):g}"


def _kept(planned: Planned) -> Iterator[Line]:
    facts, terms, plan = planned.facts, planned.terms, planned.plan
    n, each = terms.context, KV_BYTES[terms.kv_dtype]
    growing = [one for one in facts.groups if f.is_per_token(one, n)]
    if growing:
        text = " + ".join(f"{one.layers} * {_row(one)} * {each}" for one in growing)
        words = "layers x KV heads x (key + value) x bytes"
        if any(_is_latent(one) for one in growing):
            words = "layers x (latent + rotated key) x bytes"
        yield Line("kv_bytes_per_token", words, text, plan.kv_bytes_per_token, "B")
    full = [one for one in facts.groups if one.kind == "windowed" and n > one.window]
    parts = [f"{one.layers} * {_row(one)} * {each} * {one.window}" for one in full]
    parts += [f"{one.layers} * {number(one.state_bytes)}" for one in facts.groups if one.kind == "state"]
    if parts:
        words = "layers x KV heads x (key + value) x bytes x window, and layers x state"
        yield Line("state_bytes_per_session", words, " + ".join(parts), plan.state_bytes_per_session, "B")
    text = f"{number(n)} * {number(plan.kv_bytes_per_token)} + {number(plan.state_bytes_per_session)}"
    yield Line("kv_bytes_per_session", "context x KV per token + state", text, plan.kv_bytes_per_session, "B")


def _is_latent(group: Group) -> bool:
    return group.decode_flops != group.prefill_flops


def _row(group: Group) -> str:
    return str(group.row_numbers) if group.shards <= 1 else f"{group.shards} * {group.row_numbers // group.shards}"


def _users(planned: Planned) -> Iterator[Line]:
    place, terms, plan = planned.placement, planned.terms, planned.plan
    hbm, degree, util = number(terms.device.hbm_bytes), place.degree, f"{float(terms.util):g}"
    weights, spare, own = number(place.weights), number(terms.overhead_bytes), number(place.own_session)
    if place.users and not terms.dp_attention:
        text = f"floor(({hbm} * {util} * {degree} - {weights} - {spare}) / ({degree} * {own}))"
        words = "(HBM x util x devices - weights - overhead) / (devices x a session on one)"
        yield Line("users_by_memory", words, text, plan.users_by_memory)
    elif place.users:
        text = f"{degree} * floor(({hbm} * {util} - {_exact(place.own_weights)} - {spare} / {degree}) / {own})"
        words = "devices x (HBM x util - own weights - overhead) / a session"
        yield Line("users_by_memory", words, text, plan.users_by_memory)
    if plan.knobs is not None and not terms.dp_attention:
        text = (
            f"min({util}, ceil(({weights} + {spare} + {plan.users} * {own} * {degree}) / {degree} / {hbm} * 100) / 100)"
        )
        words = "(weights + overhead + sequences x a session) / HBM, up to a hundredth"
        yield Line("memory_fraction", words, text, plan.knobs.memory_fraction)


def _exact(value: Fraction) -> str:
    return number(value) if value.denominator == 1 else f"{value.numerator} / {value.denominator}"


def _speed(planned: Planned) -> Iterator[Line]:
    place, plan, terms = planned.placement, planned.plan, planned.terms
    peak, bps = number(place.peak_flops / place.degree), number(terms.device.hbm_bps)
    yield Line("ridge", "peak FLOP/s / bandwidth", f"{peak} / {bps}", plan.ridge, "FLOP/B")
    batch = plan.batch
    flops, read = f.decode_flops(planned.facts, terms.context), place.read_weights(batch)
    kept = place.own_session * (1 if terms.dp_attention else place.degree)
    text = f"{batch} * {number(flops)} / ({number(read)} + {batch} * {number(kept)})"
    words = "batch x FLOP per token / (weights read + batch x a session's KV)"
    yield Line("intensity", words, text, plan.intensity, "FLOP/B")
    if plan.intensity_limit is not None:
        yield Line(
            "intensity_limit",
            "FLOP per token / KV",
            f"{number(flops)} / {number(kept)}",
            plan.intensity_limit,
            "FLOP/B",
        )
    yield from _step(place, plan.batch, plan.decode_step_ms)
    total, rate = plan.prefill_flops, number(place.flops)
    words = "the greater of FLOP / reached FLOP/s and weights / reached B/s"
    text = f"max({number(total)} / {rate}, {number(place.weights)} / {number(place.bps)})"
    yield Line("prefill_s", words, text, plan.prefill_s, "s")
    text = f"{planned.facts.layers} * {f.LAUNCHES_PER_LAYER} * {f.LAUNCH_S * 1e6:g} / 1000"
    yield Line("launches_ms", "layers x kernels x microseconds / 1000", text, plan.launches_ms, "ms")


def _step(place: Placement, batch: int, step_ms: float) -> Iterator[Line]:
    read, work = place.step_bytes(batch), place.step_flops(batch)
    text = f"max({number(read)} / {number(place.bps)}, {number(work)} / {number(place.flops)})"
    exchange = place.all_to_all_s(batch)
    words = "the greater of bytes / reached B/s and FLOP / reached FLOP/s"
    if exchange:
        text, words = f"({text} + {exchange:.6g})", f"{words}, and two exchanges"
    yield Line("decode_step_ms", words, f"{text} * 1000", step_ms, "ms")


def _fleet(planned: Planned) -> Iterator[Line]:
    plan, terms = planned.plan, planned.terms
    text = f"1 / ({_precise(plan.ttft_s)} + {terms.output} * {_precise(plan.decode_step_ms)} / 1000 / {plan.batch})"
    words = "1 / (prefill + output tokens x step / batch)"
    yield Line("requests_per_second", words, text, plan.requests_per_second, "/s")
    if plan.replicas is None or plan.replicas_binding is None:
        return
    filled = f"(1 - {float(terms.headroom):g})"
    if plan.replicas_binding == "users":
        text = f"ceil({terms.users} / ({plan.users} * {filled}))"
    else:
        text = f"ceil({terms.requests_per_second} / ({_precise(plan.requests_per_second)} * {filled}))"
    yield Line("replicas", f"{plan.replicas_binding} / (those of a replica x (1 - headroom))", text, plan.replicas)


def _precise(value: float) -> str:
    return f"{value:.9g}"


def _tiers(planned: Planned) -> Iterator[Line]:
    place, plan = planned.placement, planned.plan
    text = f"2 * {number(planned.facts.active)} / {number(place.flops)} * 1e6"
    words = "2 x active parameters / reached FLOP/s"
    yield Line("recompute_us_per_token", words, text, plan.recompute_us_per_token, "us")
    if plan.kv_bytes_per_token:
        text = f"{number(plan.kv_bytes_per_token)} / ({_precise(plan.recompute_us_per_token)} * 1e-6) / 1e9"
        yield Line("break_even_gb_s", "KV per token / seconds to compute one", text, plan.break_even_gb_s, "GB/s")
    best = max(plan.speculation, key=lambda one: one.speedup)
    rate = planned.terms.acceptance
    if rate < 1:
        text = f"(1 - {rate:g} ** {best.drafted + 1}) / (1 - {rate:g})"
        yield Line(
            "tokens_per_pass",
            "(1 - a^(k+1)) / (1 - a)",
            text,
            best.tokens_per_pass,
            f"tokens with {best.drafted} drafted",
        )


def _experts(planned: Planned) -> Iterator[Line]:
    one, mixture = planned.facts.experts, planned.plan.mixture
    if one is None or mixture is None:
        return
    text = f"{one.count} * (1 - (1 - {one.active} / {one.count}) ** {mixture.batch})"
    yield Line("touched", "E x (1 - (1 - k / E)^batch)", text, mixture.touched, "experts a layer")
    for key, size, value in (
        ("dispatch_bytes", f.DISPATCH_BYTES, mixture.dispatch_bytes),
        ("combine_bytes", f.COMBINE_BYTES, mixture.combine_bytes),
    ):
        yield Line(key, "active x width x bytes", f"{one.active} * {one.width} * {size}", value, "B a token and layer")


def _pages(planned: Planned) -> Iterator[Line]:
    n, paging = planned.terms.context, planned.plan.paging
    text = f"{f.TABLE_ENTRY_BYTES} * ceil({n} / {f.PAGE_TOKENS})"
    yield Line("table_bytes", "4 B x pages", text, paging.table_bytes, "B a sequence")
    text = f"{f.PAGE_TOKENS} / 2 / ({n} + {f.PAGE_TOKENS} / 2)"
    yield Line("half_page_waste", "half a page / (context + half a page)", text, paging.half_page_waste)
