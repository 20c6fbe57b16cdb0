"""A full KV pool with idle compute (systems: the full-pool doctor), and what each remedy would bring this load.

The scheduler admits requests until `most_running` of them run or the next one's pages are not there. So requests that
wait while fewer run wait for pages: no threshold is needed to tell a full pool.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from engine.doctor.figures import PAGE_TOKENS, Figures, Predicted, Step, mean, size
from engine.doctor.findings import Finding, Remedy, Report, found
from engine.doctor.kinds import kv_dtype, weights_dtype

PART: Final = "pool"
LEAST_STEPS: Final = 16
FULL: Final = 0.25  # of the steps
LEFT_FREE: Final = 0.8  # of the memory that could be had: the rest stays for neighbours


def waits_for_pages(figures: Figures, step: Step) -> bool:
    return bool(step.waiting) and step.admitted < figures.most_running


def short_share(figures: Figures) -> float:
    """Of the latest steps, those at which requests waited for pages."""
    return mean([waits_for_pages(figures, step) for step in figures.steps])


def examine(figures: Figures) -> Report:
    """Findings of the pool."""
    steps = figures.steps
    if len(steps) < LEAST_STEPS:
        return Report(PART, notes=(f"{len(steps)} steps in ten minutes are too few to judge the pool by",))
    share = short_share(figures)
    used = mean([1 - step.available / figures.pool_pages for step in steps])
    head = f"{len(steps)} steps in ten minutes: {used:.0%} of the pool in use, requests waited for pages at {share:.0%}"
    if share < FULL:
        return Report(PART, notes=(f"{head}: the pool is large enough",))
    return Report(PART, (_full(figures, share, used),), (head,))


def _full(figures: Figures, share: float, used: float) -> Finding:
    short = [step for step in figures.steps if waits_for_pages(figures, step)]
    waiting, decoding = mean([step.waiting for step in short]), mean([step.decoding for step in short])
    taken = sum(figures.pool_pages - step.available for step in short) * PAGE_TOKENS
    each = taken / max(sum(step.admitted for step in short), 1)
    evidence = {
        "steps": len(figures.steps),
        "waiting_share": round(share, 3),
        "pool_used": round(used, 3),
        "waiting": round(waiting, 2),
        "decoding": round(decoding, 2),
        "most_running": figures.most_running,
        "preemptions": sum(step.preempted for step in figures.steps),
        "tokens_each": round(each),
    }
    cause = (
        f"at {share:.0%} of the steps {waiting:.1f} requests waited for pages while {decoding:.1f} decoded, of"
        f" {figures.most_running} that could: each holds {each:,.0f} tokens of {figures.pool_pages * PAGE_TOKENS:,}"
    )
    return found("pool.full", evidence, cause, remedies(figures, max(each, 1.0)))


def remedies(figures: Figures, tokens_each: float) -> list[Remedy]:
    """All six, those without an effect here last. `tokens_each`: what a request holds."""
    six = [
        _pins(figures),
        _larger(figures),
        _shorter(figures, tokens_each),
        _smaller_kv(figures),
        _smaller_weights(figures),
        _another(figures),
    ]
    told = [replace(one, effect=_with_users(one, tokens_each), unit="tokens") for one in six]
    return sorted(told, key=lambda one: not one.gain)  # stable: they stand in the order of their cost


def _with_users(remedy: Remedy, tokens_each: float) -> str:
    if not remedy.gain:
        return remedy.effect
    return f"{remedy.effect}: {remedy.gain:,.0f} tokens more, {remedy.gain / tokens_each:.1f} requests more at once"


def _pins(figures: Figures) -> Remedy:
    gain = figures.pinned_pages * PAGE_TOKENS
    effect = f"{figures.pinned_pages} pages are pinned" if gain else "nothing is pinned"
    return Remedy("tenuto kv release SESSION", effect, "free, and at once", gain)


def _larger(figures: Figures) -> Remedy:
    owed, found_ = figures.predicted, figures.measured
    free = 0
    if owed is not None and found_ is not None:
        free = found_.available
        if owed.on_device and found_.device is not None:
            free = found_.device - (found_.device_used or 0)
    now, gain = figures.pool_pages * PAGE_TOKENS, 0
    if owed is not None:
        of_use = max(0, figures.most_running * owed.context - now)  # more than all that can run could hold
        gain = min(of_use, int(LEFT_FREE * free / owed.kv_bytes_per_token)) // PAGE_TOKENS * PAGE_TOKENS
    effect = f"{size(free)} of memory could be had, of which it may have {LEFT_FREE:.0%}"
    return Remedy(f"TENUTO_KV_TOKENS={now + gain}", effect, "a restart, and memory that lies unused", gain)


def _shorter(figures: Figures, tokens_each: float) -> Remedy:
    waiting = max((step.admitted for step in figures.steps), default=0)
    gain = int(tokens_each / 2 * waiting)
    return Remedy(
        "context_policy: drop_tool_output, in agents", "contexts of half the length", "old outputs are forgotten", gain
    )


def _smaller_kv(figures: Figures) -> Remedy:
    owed = figures.predicted
    choice = kv_dtype(owed.dtype, figures.backend) if owed else None
    if owed is None or choice is None:
        return Remedy("TENUTO_KV_DTYPE", "no smaller KV than this runs on this backend", "evals")
    gain = int(owed.pool_tokens * (1 / choice.factor - 1))
    return Remedy(choice.setting, "the same bytes hold more tokens", "a restart, other bits: run the evals", gain)


def _smaller_weights(figures: Figures) -> Remedy:
    owed = figures.predicted
    choice = weights_dtype(owed.dtype, figures.backend) if owed else None
    if owed is None or choice is None:
        return Remedy("TENUTO_ENGINE_DTYPE", "no smaller weights than these run on this backend", "evals")
    freed = owed.weights_bytes * (1 - choice.factor)
    gain = int(freed / owed.kv_bytes_per_token) // PAGE_TOKENS * PAGE_TOKENS
    setting = f"{choice.setting} TENUTO_KV_TOKENS={owed.pool_tokens + gain}"
    return Remedy(setting, f"{size(freed)} of weights become pages", "a restart, other bits: run the evals", gain)


def _another(figures: Figures) -> Remedy:
    gain = figures.pool_pages * PAGE_TOKENS
    return Remedy("`tenuto node` on another machine", "a pool as large as this one", "a machine", gain)


def fits(owed: Predicted, machine_bytes: int) -> int:
    """Tokens of the largest pool for which this memory has room, in whole pages; 0 where there is none."""
    room = LEFT_FREE * machine_bytes - (owed.weights_bytes if owed.on_device else owed.on_host_bytes - owed.kv_bytes)
    return max(0, int(room / owed.kv_bytes_per_token)) // PAGE_TOKENS * PAGE_TOKENS
