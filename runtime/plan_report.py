"""A plan as people read it: at 80 columns, the same in a pipe."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from engine.capacity import Line, Plan, Planned, TraceReport

_WIDTH = 80
_LABEL, _VALUE = 20, 14
_INDENT = 2


def report(planned: Planned, lines: Sequence[Line], traffic: TraceReport | None) -> Iterator[str]:
    """Line by line; the explanation in place of the advice where one is asked for."""
    plan = planned.plan
    yield f"{plan.model} on {plan.tp} x {plan.device}, {plan.context:,} tokens a session"
    yield ""
    yield from _folded(plan.verdict)
    yield from _section("Memory", _memory(plan))
    yield from _section("Speed", _speed(plan))
    yield from _section("Fleet", _fleet(plan))
    yield from _section("Tiers", _tiers(plan))
    yield from _section("Long contexts", _long(plan))
    if plan.mixture:
        yield from _section("Experts", _experts(plan))
    yield from _section("Advice", _advice(plan))
    if traffic is not None:
        yield from _section("Traffic", _traffic(traffic))
    if lines:
        yield from _explained(lines)
    yield from _section("Assumed", [("", "", one) for one in plan.assumed])


Row = tuple[str, str, str]


def _memory(plan: Plan) -> Iterator[Row]:
    numbers = f"{plan.parameters:,} parameters, {plan.weights_dtype}"
    if plan.active_parameters != plan.parameters:
        numbers += f"; a token meets {plan.active_parameters / 1e9:.1f} billion"
    yield "weights", size(plan.weight_bytes), numbers
    note = f"{plan.kv_bytes_per_token_per_device:,} B on each device" if plan.tp > 1 else ""
    yield "KV per token", f"{plan.kv_bytes_per_token:,} B", note
    if plan.state_bytes_per_session:
        yield "state", size(plan.state_bytes_per_session), "of a session, however much longer it gets"
    yield "KV per session", size(plan.kv_bytes_per_session), _replicated(plan.kv_replication)
    yield "users by memory", f"{plan.users_by_memory:,}", ""
    yield "", "", f"legal tp: {' '.join(map(str, plan.legal_tp))}"
    copies = [one for one in plan.degrees if one.kv_replication > 1]
    if copies:
        said = ", ".join(f"{one.kv_replication:.3g} times at {one.tp}" for one in copies)
        yield "", "", f"KV heads are replicated {said}"
    paging = plan.paging
    waste = f"{paging.half_page_waste:.2%} of pages of {paging.page_tokens} unused; reserving would waste"
    yield "block table", f"{paging.table_bytes:,} B", f"{waste} {paging.reserved_waste:.0%}"


def _replicated(times: float) -> str:
    return f"held {times:.3g} times" if times > 1 else ""


def _speed(plan: Plan) -> Iterator[Row]:
    yield "decode step", f"{plan.decode_step_ms:.4g} ms", f"a batch of {plan.batch:,}, bound by {plan.decode_bound}"
    limit = f", tends to {plan.intensity_limit:.1f}" if plan.intensity_limit else ""
    yield "intensity", f"{plan.intensity:.1f} FLOP/B", f"ridge {plan.ridge:.0f}{limit}"
    yield "users by speed", f"{plan.users_by_throughput:,}", f"{plan.max_batch_for_slo:,} within the time for a token"
    yield "prefill", seconds(plan.prefill_s), f"of {plan.context:,} tokens; {plan.prefill_flops / 1e15:,.3g} PFLOP"
    yield "first token", seconds(plan.ttft_s), "of the prompt that is new"
    yield "launches", f"{plan.launches_ms:.3g} ms", "a token, unless decode is captured"
    if plan.all_reduce_ms:
        yield "all-reduce", f"{plan.all_reduce_ms:.3g} ms", "a step, beside the above where it is not hidden"


def _fleet(plan: Plan) -> Iterator[Row]:
    yield "users per replica", f"{plan.users:,}", f"{plan.binding} binds"
    yield (
        "requests",
        f"{plan.requests_per_second:.3g} /s",
        f"a replica; {plan.tokens_per_second:,.0f} tokens/s of decode",
    )
    if plan.replicas is not None:
        why = f"{plan.replicas_binding} decide" if plan.replicas_binding else ""
        yield "replicas", f"{plan.replicas:,}", why
        yield "nodes", f"{plan.nodes:,}", ""
    if plan.price_per_hour:
        yield "price", f"{plan.price_per_hour:,.2f} /h", ""
    if plan.knobs:
        yield "memory fraction", f"{plan.knobs.memory_fraction:g}", "the two knobs that follow"
        pool = f"a pool of {plan.knobs.kv_pool_tokens:,} tokens"
        yield "maximum sequences", f"{plan.knobs.max_sequences:,}", pool


def _tiers(plan: Plan) -> Iterator[Row]:
    each = f"{plan.recompute_us_per_token:.4g} us a token to compute again"
    yield "break-even", f"{speed(plan.break_even_gb_s)} GB/s", each
    for one in plan.tiers:
        since = f"pays from {one.least_tokens:,} tokens on" if one.least_tokens is not None else "pays at no length"
        here = f"{seconds(one.restore_s)} to read, {seconds(one.recompute_s)} to compute"
        yield one.tier, f"{speed(one.gb_s)} GB/s", f"{since}; now {here}"


def _long(plan: Plan) -> Iterator[Row]:
    for long in plan.long_context:
        part = f", {long.of_full_attention:.1%} of what full attention keeps" if long.of_full_attention < 1 else ""
        note = f"{seconds(long.prefill_s)} to compute{part}" + ("" if long.fits else "; does not fit")
        yield f"{long.tokens:,} tokens", size(long.kv_bytes), note


def _experts(plan: Plan) -> Iterator[Row]:
    one = plan.mixture
    assert one is not None
    yield (
        "touched",
        f"{one.touched:.0f} of {one.experts}",
        f"by a batch of {one.batch:,}; 8 touch {one.touched_at_8:.0f}, 64 {one.touched_at_64:.0f}",
    )
    yield "sent", f"{one.dispatch_bytes:,} B", "a token and layer, in fp8"
    yield "comes back", f"{one.combine_bytes:,} B", "in bf16"
    exchange = f"{one.all_to_all_ms:.3g} ms a step in all-to-alls" if one.all_to_all_ms else ""
    yield "imbalance", f"{one.imbalance:.2f}", exchange


def _advice(plan: Plan) -> Iterator[Row]:
    yield "numbers", "", plan.precision_advice
    for one in plan.precision:
        named = f"{one.weights_dtype}, KV {one.kv_dtype}"
        yield "", "", f"{named}: {one.users_by_memory:,} users, step {one.decode_step_ms:.3g} ms"
    yield "drafts", "", plan.speculation_advice


def _traffic(traffic: TraceReport) -> Iterator[Row]:
    yield "verdict", "", traffic.verdict
    yield (
        traffic.kind,
        f"{traffic.count:,}",
        f"{traffic.tokens:,} tokens, {traffic.device_tokens:,} of them on the device",
    )
    for one in traffic.tiers:
        came = f"{one.returned_tokens:,} tokens come back, {one.restored_tokens:,} of them are read"
        yield one.tier, f"{one.size_gb:,.0f} GB", f"{came}; saves {seconds(one.saved_s)}"
    for words in traffic.assumed:
        yield "assumed", "", words


def _explained(lines: Sequence[Line]) -> Iterator[str]:
    yield ""
    yield "Explained"
    for one in lines:
        yield f"  {one.key}"
        yield from _folded(one.words, 4)
        yield from _folded(str(one), 4)


def _section(title: str, rows: Sequence[Row] | Iterator[Row]) -> Iterator[str]:
    yield ""
    yield title
    for label, value, note in rows:
        head = f"{'':{_INDENT}}{label:<{_LABEL}}{value:>{_VALUE}}"
        if not value:
            head = f"{'':{_INDENT}}{label:<{_LABEL}}" if label else " " * _INDENT
            if not label and title != "Assumed":
                head = " " * (_INDENT + _LABEL)
        elif note:
            head += "  "
        yield from textwrap.wrap(
            note,
            _WIDTH,
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_on_hyphens=False,
            break_long_words=False,
        ) or [head.rstrip()]


def _folded(text: str, indent: int = _INDENT) -> list[str]:
    head = " " * indent
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=head, break_on_hyphens=False)


def size(count: int) -> str:
    """Bytes as people read them, in powers of ten."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count} B"


def speed(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.3g}"


def seconds(value: float) -> str:
    """A time as people read it."""
    if value >= 1:
        return f"{value:,.4g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"
