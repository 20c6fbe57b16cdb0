"""What is asked of a plan, and what that means for one model: every default that is taken is named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Final

from engine.capacity.devices import Device, device_named
from engine.capacity.facts import ModelFacts
from engine.capacity.numbers import kv_dtype, weights_dtype
from engine.errors import PlanError

MOST_DEVICES: Final = 512
_CONTEXT: Final = 8192
_TPOT_S: Final = 0.05
# name -> (least, most)
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "tp": (1, MOST_DEVICES),
    "context": (1, 1 << 28),
    "users": (1, 1_000_000_000),
    "requests_per_second": (1e-9, 1e9),
    "prompt_tokens": (1, 1 << 28),
    "output_tokens": (1, 1 << 28),
    "slo_ttft_s": (1e-9, 86_400),
    "slo_tpot_s": (1e-9, 10),
    "util": (0.001, 1),
    "overhead_gb": (0, 1e6),
    "mfu": (0.001, 1),
    "mbu": (0.001, 1),
    "headroom": (0, 0.95),
    "acceptance": (0, 1),
    "draft_cost": (0, 10),
    "host_gb_s": (1e-6, 1e6),
    "nvme_gb_s": (1e-6, 1e6),
}


@dataclass(frozen=True)
class Wish:
    """What is asked; None: left to the plan.

    `context`: tokens of a session. `slo_ttft_s` and `slo_tpot_s`: seconds to the first token and for each after it.
    `util`: the part of a device's memory that may be used. `overhead_gb`: of a replica, for what is neither weights nor
    KV. `mfu` and `mbu`: the parts of peak compute and bandwidth that are reached. `headroom`: the part of each replica
    that stays free. `acceptance`: of drafted tokens; `draft_cost`: of one drafted token, in decode steps.
    `dp_attention`: each device has all of attention and its own sessions, experts are spread over all.
    `beyond_context`: plan past what the model was made for.
    """

    device: str | None = None
    tp: int | None = None
    context: int | None = None
    users: int | None = None
    requests_per_second: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    kv_dtype: str | None = None
    weights_dtype: str | None = None
    util: float | None = None
    overhead_gb: float | None = None
    mfu: float | None = None
    mbu: float | None = None
    headroom: float | None = None
    acceptance: float | None = None
    draft_cost: float | None = None
    host_gb_s: float | None = None
    nvme_gb_s: float | None = None
    dp_attention: bool = False
    beyond_context: bool = False

    def __post_init__(self) -> None:
        """Raises PlanError where a number is none, or outside of what makes sense."""
        whole = {one.name for one in fields(self) if str(one.type).startswith("int")}
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is None:
                continue
            legal = f"a {'whole ' if name in whole else ''}number from {least:g} to {most:g}"
            if isinstance(value, bool) or not isinstance(value, int if name in whole else int | float):
                raise PlanError(name, f"{str(value)[:40]!r} is not {legal}")
            if not least <= value <= most:
                hint = "; seconds are meant, 50 ms are 0.05" if name == "slo_tpot_s" and value > most else ""
                raise PlanError(name, f"{_told(value)} is not {legal}{hint}")


@dataclass(frozen=True)
class Terms:
    """A wish resolved for a model: numbers only. Parts of a whole are exact fractions, so that no rounding decides
    whether a last user fits."""

    device: Device
    tp: int | None
    context: int
    prompt: int
    output: int
    users: int | None
    requests_per_second: float | None
    slo_ttft_s: float | None
    slo_tpot_s: float
    slo_tpot_given: bool
    kv_dtype: str
    weights_dtype: str
    util: Fraction
    overhead_bytes: int
    mfu: float
    mbu: float
    headroom: Fraction
    acceptance: float
    draft_cost: float
    host_bps: float
    nvme_bps: float
    dp_attention: bool


def resolve(facts: ModelFacts, wish: Wish, measured: Device | None, nvme_bps: float) -> tuple[Terms, list[str]]:
    """The terms, and in words what was assumed. Raises PlanError."""
    taken = _Taken(wish)
    device = device_named(taken.word("device", "h100"), measured)
    context = int(taken.number("context", min(_CONTEXT, facts.context)))
    if context > facts.context and not wish.beyond_context:
        raise PlanError(
            "context",
            f"{context} is more than the {facts.context} tokens that {facts.name} was made for; plan for fewer, or say"
            " beyond_context",
        )
    output = int(taken.number("output_tokens", min(256, max(1, context // 4))))
    if wish.output_tokens is not None and output >= context:
        raise PlanError("output_tokens", f"{output} tokens of output leave nothing of a context of {context}")
    prompt = int(taken.number("prompt_tokens", max(1, context - output)))
    if prompt > context:
        raise PlanError("prompt_tokens", f"{prompt} is more than the context of {context}")
    if wish.dp_attention and facts.experts is None:
        raise PlanError("dp_attention", f"{facts.name} has no experts to spread; leave it out")
    terms = Terms(
        device=device,
        tp=wish.tp,
        context=context,
        prompt=prompt,
        output=output,
        users=wish.users,
        requests_per_second=wish.requests_per_second,
        slo_ttft_s=wish.slo_ttft_s,
        slo_tpot_s=taken.number("slo_tpot_s", _TPOT_S),
        slo_tpot_given=wish.slo_tpot_s is not None,
        kv_dtype=kv_dtype("kv_dtype", taken.word("kv_dtype", "bf16")),
        weights_dtype=_weights(wish.weights_dtype),
        util=_exact(taken.number("util", 0.9)),
        overhead_bytes=int(_exact(taken.number("overhead_gb", 0)) * 10**9),
        mfu=taken.number("mfu", 0.5),
        mbu=taken.number("mbu", 1.0),
        headroom=_exact(taken.number("headroom", 0.2)),
        acceptance=taken.number("acceptance", 0.8),
        draft_cost=taken.number("draft_cost", 0.05),
        host_bps=wish.host_gb_s * 1e9 if wish.host_gb_s is not None else 0.0,
        nvme_bps=wish.nvme_gb_s * 1e9 if wish.nvme_gb_s is not None else nvme_bps,
        dp_attention=wish.dp_attention,
    )
    return terms, taken.words


class _Taken:
    """Takes what is wished for, or a default that it notes."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self.words: list[str] = []

    def number(self, name: str, default: float) -> Any:
        value = getattr(self._wish, name)
        if value is None:
            self.words.append(f"{name} {default:g}")
            return default
        return value

    def word(self, name: str, default: str) -> str:
        value = getattr(self._wish, name)
        if value is None or value == "auto":
            self.words.append(f"{name} {default}")
            return default
        return str(value)


def _weights(dtype: str | None) -> str:
    """Empty: as the checkpoint has them."""
    return weights_dtype("weights_dtype", dtype) if dtype is not None and dtype != "auto" else ""


def _exact(value: float) -> Fraction:
    """The decimal that was written, not its nearest binary number."""
    return Fraction(repr(value))


def _told(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if abs(value) < 1e15 else "a huge number"
