"""From a model, a device and a wish to a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from engine.capacity import formulas as f
from engine.capacity.advice import drafts, drafts_advice, precision_advice, variants
from engine.capacity.devices import Device, disk
from engine.capacity.facts import ModelFacts
from engine.capacity.parts import long_contexts, mixture, paging, tiers
from engine.capacity.placement import Placement, illegal, legal_degrees
from engine.capacity.results import Degree, Knobs, Plan
from engine.capacity.wish import MOST_DEVICES, Terms, Wish, resolve
from engine.errors import PlanError


@dataclass(frozen=True)
class Planned:
    """A plan with what it was computed from, for those who explain or draw it."""

    plan: Plan
    placement: Placement

    @property
    def facts(self) -> ModelFacts:
        return self.placement.facts

    @property
    def terms(self) -> Terms:
        return self.placement.terms


def make_plan(facts: ModelFacts, wish: Wish, measured: Device | None = None) -> Planned:
    """Everything that follows. `measured`: what `cpu` is.

    Raises PlanError: a wish that cannot be met, in a sentence that says what could.
    """
    terms, assumed = resolve(facts, wish, measured, disk().read_bps)
    legal = legal_degrees(facts, terms.dp_attention, MOST_DEVICES)
    place = _possible(_place(facts, terms, legal, assumed), assumed)
    terms = place.terms
    if place.degree > terms.device.domain:
        assumed.append(f"links between machines as quick as those among {terms.device.domain} devices of one")
    shown = _shown(legal, place.degree, terms.device.domain)
    by_memory = place.users
    most = place.batch_within(terms.slo_tpot_s)
    batch = max(1, min(by_memory, most) if most else by_memory)
    rate = place_rate(place, batch)
    by_throughput = _by_throughput(terms, most, rate)
    users = min(by_memory, by_throughput)
    replicas, why = _replicas(terms, users, rate)
    n, steps = terms.context, place.step_s(batch)
    kept = place.own_session * (1 if terms.dp_attention else place.degree)
    per_token = f.kv_bytes_per_token(facts.groups, terms.kv_dtype, n)
    whole = f.session_bytes(facts.groups, terms.kv_dtype, n)
    flops = f.decode_flops(facts, n)
    plan = Plan(
        model=facts.name,
        family=facts.family,
        device=terms.device.name,
        tp=place.degree,
        dp_attention=terms.dp_attention,
        context=n,
        fits=by_memory > 0,
        verdict=_verdict(place, legal),
        parameters=facts.parameters.total,
        active_parameters=facts.active,
        weights_dtype=terms.weights_dtype or _own_dtype(facts),
        kv_dtype=terms.kv_dtype,
        weight_bytes=place.weights,
        weight_bytes_per_device=math.ceil(place.own_weights),
        active_weight_bytes=f.model_weight_bytes(facts, terms.weights_dtype, active=True),
        kv_bytes_per_token=per_token,
        kv_bytes_per_token_per_device=f.shard_bytes_per_token(
            facts.groups, terms.kv_dtype, n, 1 if terms.dp_attention else place.degree
        ),
        state_bytes_per_session=f.state_bytes_per_session(facts.groups, terms.kv_dtype, n),
        kv_bytes_per_session=whole,
        kv_replication=float(place.replication),
        users_by_memory=by_memory,
        users_by_throughput=by_throughput,
        users=users,
        binding="memory" if by_memory <= by_throughput else "throughput",
        max_batch_for_slo=most,
        requests_per_second=rate,
        tokens_per_second=batch / steps,
        replicas=replicas,
        replicas_binding=why,
        nodes=_nodes(terms.device, place.degree, replicas),
        price_per_hour=replicas * place.degree * terms.device.price_per_hour or None if replicas else None,
        batch=batch,
        decode_step_ms=steps * 1e3,
        decode_bound="memory"
        if place.step_bytes(batch) / place.bps >= place.step_flops(batch) / place.flops
        else "compute",
        all_reduce_ms=place.all_reduce_s(batch) * 1e3,
        prefill_s=place.prefill_s(n),
        ttft_s=place.prefill_s(n, n - terms.prompt),
        prefill_flops=f.prefill_flops(facts, n),
        ridge=f.ridge(place.peak_flops, terms.device.hbm_bps * place.degree),
        intensity=f.intensity(batch, flops, place.read_weights(batch), kept),
        intensity_limit=flops / kept,
        recompute_us_per_token=place.recompute_s * 1e6,
        break_even_gb_s=f.break_even_bps(per_token, place.recompute_s) / 1e9,
        break_even_at_context_gb_s=f.break_even_bps(whole, place.prefill_s(n)) / 1e9,
        launches_ms=f.launches_s(facts.layers) * 1e3,
        legal_tp=shown if terms.dp_attention else legal,
        degrees=[_degree(facts, terms, degree) for degree in shown],
        tiers=tiers(place),
        speculation=(drafted := drafts(place, batch)),
        speculation_advice=drafts_advice(drafted, terms, batch),
        precision=(others := variants(place, batch)),
        precision_advice=precision_advice(place, batch, others),
        long_context=long_contexts(place),
        mixture=mixture(place, batch),
        paging=paging(facts, terms),
        knobs=_knobs(place, users),
        assumed=[*facts.assumed, *assumed],
    )
    return Planned(plan, place)


def _place(facts: ModelFacts, terms: Terms, legal: list[int], assumed: list[str]) -> Placement:
    """On as many devices as are asked for, or the fewest that hold it."""
    if terms.tp is not None:
        if terms.tp not in legal:
            spread = f"{facts.experts.count if facts.experts else 1} experts are fewer than {terms.tp} devices"
            why = spread if terms.dp_attention else illegal(facts, terms.tp)
            raise PlanError("tp", f"{why}; legal are {', '.join(map(str, _shown(legal, terms.device.domain)))}")
        return Placement(facts, terms, terms.tp)
    within = [Placement(facts, terms, one) for one in legal if one <= terms.device.domain]
    found = next((one for one in within if one.users), within[-1])
    assumed.append(f"tp {found.degree}, the fewest that hold it" if found.users else f"tp {found.degree}")
    return found


def _possible(place: Placement, assumed: list[str]) -> Placement:
    """The same, with a time for a token that can be met where none was asked for. Raises PlanError where one that was
    is beyond the device, with what is not."""
    terms = place.terms
    least = place.step_s(1)
    on = f"{place.degree} x {terms.device.name}"
    if least > terms.slo_tpot_s and terms.slo_tpot_given:
        raise PlanError(
            "slo_tpot_s",
            f"{terms.slo_tpot_s * 1e3:.3g} ms per token cannot be met: one sequence alone takes {least * 1e3:.4g} ms a"
            f" step on {on}; allow that, use more devices, or fewer bytes for weights",
        )
    if least > terms.slo_tpot_s:
        assumed[:] = [one for one in assumed if not one.startswith("slo_tpot_s")]
        assumed.append(f"slo_tpot_s {2 * least:.3g}, twice what one sequence alone takes")
        place = replace(place, terms=replace(terms, slo_tpot_s=2 * least))
    first = place.prefill_s(terms.context, terms.context - terms.prompt)
    if terms.slo_ttft_s is not None and first > terms.slo_ttft_s:
        raise PlanError(
            "slo_ttft_s",
            f"{terms.slo_ttft_s:.3g} s cannot be met: {terms.prompt} tokens of prompt take {first:.4g} s on {on};"
            " allow that, use more devices, or say fewer prompt_tokens",
        )
    return place


def place_rate(place: Placement, batch: int) -> float:
    """Requests per second of a replica whose devices do nothing else: each takes its prefill, and its part of as many
    steps as it has tokens of output."""
    terms = place.terms
    first = place.prefill_s(terms.context, terms.context - terms.prompt)
    return 1 / (first + terms.output * place.step_s(batch) / batch)


def _by_throughput(terms: Terms, most: int, rate: float) -> int:
    """Sequences within the time for a token; where both users and their requests are given, no more users than the
    replica has requests for."""
    if terms.users is None or terms.requests_per_second is None:
        return most
    return min(most, math.floor(rate * terms.users / terms.requests_per_second))


def _replicas(terms: Terms, users: int, rate: float) -> tuple[int | None, str | None]:
    """How many hold all users and answer all requests, with the headroom free in each; and which of the two decides."""
    if not users:
        return None, None
    filled = 1 - terms.headroom
    for_users = math.ceil(Fraction(terms.users) / (users * filled)) if terms.users else 1
    wanted = terms.requests_per_second or 0.0
    for_requests = math.ceil(wanted / (rate * float(filled))) if wanted else 1
    if for_users == for_requests == 1:
        return 1, None
    return max(for_users, for_requests), "users" if for_users >= for_requests else "requests_per_second"


def _nodes(device: Device, degree: int, replicas: int | None) -> int | None:
    """Machines: a replica lies within one where it can, and has whole ones to itself where it cannot."""
    if replicas is None:
        return None
    if degree > device.node:
        return replicas * math.ceil(degree / device.node)
    return math.ceil(replicas / (device.node // degree))


def _knobs(place: Placement, users: int) -> Knobs | None:
    """No more memory than those sequences take: what is left over would hold ones that miss the SLO."""
    if not users:
        return None
    own = users if not place.terms.dp_attention else math.ceil(users / place.degree)
    taken = place.own_weights + Fraction(place.terms.overhead_bytes, place.degree) + own * place.own_session
    fraction = min(place.terms.util, Fraction(math.ceil(taken * 100 / place.terms.device.hbm_bytes), 100))
    return Knobs(float(fraction), users, users * f.pages(place.terms.context) * f.PAGE_TOKENS)


def _degree(facts: ModelFacts, terms: Terms, degree: int) -> Degree:
    one = Placement(facts, terms, degree)
    own = 1 if terms.dp_attention else degree
    return Degree(
        degree,
        math.ceil(one.own_weights),
        f.shard_bytes_per_token(facts.groups, terms.kv_dtype, terms.context, own),
        float(one.replication),
        one.users,
        one.users > 0,
    )


def _shown(legal: list[int], *also: int) -> list[int]:
    """Of many legal numbers, the powers of two, the last, and those that are asked for."""
    if len(legal) <= 12:
        return legal
    return [one for one in legal if one & (one - 1) == 0 or one == legal[-1] or one in also]


def _verdict(place: Placement, legal: list[int]) -> str:
    facts, terms = place.facts, place.terms
    on = f"{place.degree} x {terms.device.name}"
    weights, room = float(place.own_weights) / 1e9, float(place.room) / 1e9
    if place.users:
        return f"{facts.name} fits on {on}: {weights:.2f} GB of weights a device leave {room:.2f} GB for KV"
    lack = (
        "its weights alone do not"
        if place.room < 0
        else f"no session of {terms.context} tokens does beside its weights"
    )
    more = next((one for one in legal if one > place.degree and Placement(facts, terms, one).users), None)
    hint = f"; {more} would hold it" if more else "; no legal number of these devices does"
    return f"{facts.name} does not fit on {on}: {lack}{hint}"


def _own_dtype(facts: ModelFacts) -> str:
    if facts.file_bytes:
        return "as in the file"
    return f"{facts.weights}, experts {facts.expert_weights}" if facts.expert_weights else facts.weights
