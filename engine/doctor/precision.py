"""Which quantisation for which bottleneck (systems: the precision adviser).

A decode step reads all weights once and the KV of every request that decodes; a step of a long prompt multiplies. So
bytes of weights bind small batches, bytes of KV long contexts, and products prompts; each has a format that helps it
and formats that do nothing for it. By Amdahl: what is a share s of a step and becomes f of itself makes the step
1 / (1 - s + s f) times faster, at best.
"""

from __future__ import annotations

from typing import Final

from engine.doctor.figures import PAGE_TOKENS, Figures, mean, median
from engine.doctor.findings import Finding, Remedy, Report, found
from engine.doctor.kinds import Smaller, kv_dtype, prefill_dtype, weights_dtype
from engine.doctor.pool import FULL, LEAST_STEPS, short_share

PART: Final = "precision"
LEAST_SPEEDUP: Final = 1.1


def examine(figures: Figures) -> Report:
    """What binds, said always; a finding only where somebody waits for it and a format would help."""
    if figures.predicted is None or len(figures.steps) < LEAST_STEPS:
        return Report(PART, notes=(f"{len(figures.steps)} steps in ten minutes are too few to say what binds them",))
    waits = mean([step.waiting > 0 for step in figures.steps])
    kinds = (_users, _prefill, _decode)
    note, finding = next(told for told in (kind(figures) for kind in kinds) if told is not None)
    if waits < FULL:
        return Report(PART, notes=(note, f"nobody waits for it (requests waited at {waits:.0%} of the steps)"))
    return Report(PART, (finding,) if finding is not None else (), (note,))


Told = tuple[str, Finding | None]


def _users(figures: Figures) -> Told | None:
    """The bytes of KV bound how many run at once."""
    if short_share(figures) < FULL:
        return None
    assert figures.predicted is not None
    choice = kv_dtype(figures.predicted.dtype, figures.backend)
    note = "the bytes of KV bind: requests wait for pages"
    return note, _found("precision.kv", figures, choice, 1 / choice.factor) if choice else None


def _prefill(figures: Figures) -> Told | None:
    """Products bind, where prompts have most of the time."""
    assert figures.predicted is not None
    share = prefill_share(figures)
    if share < 0.5:
        return None
    choice = prefill_dtype(figures.predicted.dtype, figures.backend)
    note = f"products bind: prompts have {share:.0%} of the time"
    return note, _found("precision.prefill", figures, choice, _faster(share, choice)) if choice else None


def _decode(figures: Figures) -> Told:
    """The bytes that a decode step reads bind: of weights or of KV, whichever are more."""
    owed, kv_bytes = figures.predicted, kv_read(figures)
    assert owed is not None
    share = kv_bytes / (kv_bytes + owed.weights_bytes)
    if share > 0.5:
        choice = kv_dtype(owed.dtype, figures.backend)
        note = f"the bytes of KV bind: {share:.0%} of what a decode step reads"
        return note, _found("precision.kv", figures, choice, _faster(share, choice)) if choice else None
    choice = weights_dtype(owed.dtype, figures.backend)
    note = f"the bytes of the weights bind: {1 - share:.0%} of what a decode step reads"
    return note, _found("precision.weights", figures, choice, _faster(1 - share, choice)) if choice else None


def prefill_share(figures: Figures) -> float:
    """Of the time of the latest steps, what prompts had: what steps that carried them took beyond a decode step."""
    decode_s = median([step.model_s for step in figures.decode_steps])
    prompts_s = sum(max(0.0, s.model_s - (decode_s if s.decoding else 0.0)) for s in figures.steps if s.prefill)
    return prompts_s / max(sum(step.model_s for step in figures.steps), 1e-9)


def kv_read(figures: Figures) -> float:
    """Bytes of KV that a decode step reads, on average."""
    assert figures.predicted is not None
    steps = figures.decode_steps or list(figures.steps)
    held = mean([(figures.pool_pages - step.available) * PAGE_TOKENS for step in steps])
    return held * figures.predicted.kv_bytes_per_token


def _faster(share: float, choice: Smaller | None) -> float:
    return 1.0 if choice is None else 1 / (1 - share + share * choice.factor)


def _found(name: str, figures: Figures, choice: Smaller, speedup: float) -> Finding | None:
    if speedup < LEAST_SPEEDUP:
        return None
    assert figures.predicted is not None
    batch, gain = round(mean([step.decoding for step in figures.steps]), 2), round(speedup, 2)
    if name == "precision.prefill":
        evidence = {
            "prefill_share": round(prefill_share(figures), 3),
            "prefill_s_per_token": figures.prefill_s_per_token,
            "batch": batch,
            "speedup": gain,
        }
    else:
        evidence = {
            "weights_bytes": figures.predicted.weights_bytes,
            "kv_read_bytes": round(kv_read(figures)),
            "batch": batch,
            "speedup": gain,
        }
        if name == "precision.kv":
            evidence["pool_tokens"] = figures.predicted.pool_tokens
        else:
            evidence["decode_s"] = median([step.model_s for step in figures.decode_steps])
    what = "as many users" if name == "precision.kv" else "as fast"
    effect = f"up to {gain:.2f} times {what}"
    remedy = Remedy(choice.setting, effect, f"a restart and other bits; run `{choice.evals}` after it", gain, "times")
    causes = {
        "precision.weights": "requests wait, and a decode step mostly reads weights",
        "precision.kv": "requests wait, and the bytes of the KV bind",
        "precision.prefill": "requests wait, and prompts have most of the time",
    }
    return found(name, evidence, causes[name], [remedy])
