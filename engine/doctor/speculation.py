"""The draft length that pays (systems: the speculation adviser), from measured acceptance and batch.

With every draft standing by itself with chance a, a pass of k drafts brings (1 - a^(k+1)) / (1 - a) tokens (Leviathan
et al. 2023, equation 1). It takes a decode step of the batch, and of each of its requests k tokens more, which cost
what tokens of a prompt do.
"""

from __future__ import annotations

from typing import Final

from engine.capacity.formulas import tokens_per_pass
from engine.doctor.figures import Figures, mean, median
from engine.doctor.findings import Finding, Remedy, Report, Value, found

PART: Final = "speculation"
LEAST_PASSES: Final = 32
LONGEST: Final = 16
MATTERS: Final = 1.05
_COUNTED = ("passes", "drafted", "accepted")


def acceptance_of(tokens: float, drafted: float) -> float:
    """The chance a draft stands with, from the tokens that a pass of so many brought: the inverse, by halving."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_pass(middle, drafted) < tokens else (low, middle)
    return (low + high) / 2


def speedup(acceptance: float, drafted: float, batch: float, decode_s: float, token_s: float) -> float:
    """Tokens of a pass for the time of a pass, against one token for a step. `token_s`: of a token that is verified."""
    return tokens_per_pass(acceptance, drafted) * decode_s / (decode_s + batch * drafted * token_s)


def best_length(acceptance: float, batch: float, decode_s: float, token_s: float) -> int:
    """Drafts for which a token takes least; 0: none."""
    return max(range(LONGEST + 1), key=lambda k: (speedup(acceptance, k, batch, decode_s, token_s), -k))


def examine(figures: Figures) -> Report:
    """A finding where another length would be so much faster that it matters."""
    counted = figures.speculation
    if counted is None or any(name not in counted for name in _COUNTED):
        note = "this engine counts no drafts; measure drafted and accepted tokens per pass to say what length pays"
        return Report(PART, notes=(note,))
    passes, decode = counted["passes"], figures.decode_steps
    if passes < LEAST_PASSES or not decode or not figures.prefill_s_per_token:
        return Report(PART, notes=(f"{passes:.0f} passes with drafts are too few to say what length pays",))
    drafted = counted["drafted"] / passes
    acceptance = acceptance_of(1 + counted["accepted"] / passes, drafted)
    batch, decode_s = mean([step.decoding for step in decode]), median([step.model_s for step in decode])
    cost = (batch, decode_s, figures.prefill_s_per_token)
    best = best_length(acceptance, *cost)
    now, then = speedup(acceptance, drafted, *cost), speedup(acceptance, best, *cost)
    note = (
        f"{acceptance:.0%} of drafts stand, {drafted:.1f} in a pass, {batch:.1f} requests together: {now:.2f} times as"
        f" fast as without; {best} drafts would be {then:.2f} times"
    )
    if then < MATTERS * now:
        return Report(PART, notes=(note,))
    evidence: dict[str, Value] = {
        "acceptance": round(acceptance, 3),
        "drafted_each": round(drafted, 2),
        "best": best,
        "batch": round(batch, 2),
        "speedup_now": round(now, 3),
        "speedup_best": round(then, 3),
    }
    return Report(PART, (_finding(best, drafted, evidence, then / now),), (note,))


def _finding(best: int, drafted: float, evidence: dict[str, Value], gain: float) -> Finding:
    effect, cost = f"{gain:.2f} times as fast", "none: every token stays as it is"
    if not best:
        remedy = Remedy("speculation: off", effect, cost, gain, "times")
        return found("speculation.not_worth_it", evidence, "no draft pays at this acceptance and batch", [remedy])
    name = "speculation.too_short" if best > drafted else "speculation.too_long"
    cause = f"{drafted:.1f} drafts in a pass, and {best} pay best"
    return found(name, evidence, cause, [Remedy(f"{best} drafts at most", effect, cost, gain, "times")])
