"""The wake bench's evidence as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.evidence import Line, only
from bench.wake_bed import NONE, STATES
from bench.wake_figures import BARS, Samples, by_state, median, median_rate, misses

_NAMES = {NONE: "recomputed"}
_WIDE = 11


def report(lines: Sequence[Line], figure: dict[str, Any]) -> list[str]:
    """Two tables of milliseconds, the ratios with their bars, the disk, and every bar that is missed."""
    about, samples = only(lines, "about")[0], by_state(lines)
    text = [f"{about['model']}, {about['threads']} threads, {about['kv_bytes_per_token']} bytes of KV per token"]
    text += _table("until the prefix is usable, ms (median)", samples, "usable_s")
    text += _table("until the first token after a tool result of 64 tokens, ms (median)", samples, "first_token_s")
    text += _ratios(figure)
    text += _disk(lines, figure)
    text += [
        "",
        f"tokens equal in every state: {'yes' if figure['tokens_equal'] else 'NO'}; "
        f"computed again: {figure['lost_tokens']}; quarantined: {figure['quarantined']}; "
        f"others kept {figure['foreign_cores']} cores busy in the median",
    ]
    return text + [f"MISSED: {miss}" for miss in misses(figure)]


def _disk(lines: Sequence[Line], figure: dict[str, Any]) -> list[str]:
    disk = only(lines, "disk")
    if not disk:
        return []
    text = [
        "",
        f"NVMe at {disk[0]['context']:,} tokens, median".ljust(34) + "MB/s".rjust(_WIDE) + "of raw".rjust(_WIDE),
    ]
    ways = {"raw": "raw reads of the files", "tier": "verified pages in memory", "path": "a usable prefix"}
    fractions = {"tier": figure["tier_fraction"], "path": figure["disk_fraction"]}
    for way, name in ways.items():
        cells = (f"{(median_rate(lines, way) or 0.0) / 1e6:,.0f}", f"{fractions.get(way, 1.0):.2f}")
        text.append(name.ljust(34) + "".join(cell.rjust(_WIDE) for cell in cells))
    text[4] += "   at least 0.8"
    return text


def _table(title: str, samples: Samples, field: str) -> list[str]:
    contexts = sorted({context for context, _ in samples})
    text = ["", title, "context  rounds" + "".join(_NAMES.get(state, state).rjust(_WIDE) for state in STATES)]
    for context in contexts:
        rounds = max(len(samples.get((context, state), {})) for state in STATES)
        cells = (_ms(median(samples, context, state, field)) for state in STATES)
        text.append(f"{context:7,}  {rounds:6}" + "".join(cell.rjust(_WIDE) for cell in cells))
    return text


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:,.{1 if seconds < 0.1 else 0}f}"


def _ratios(figure: dict[str, Any]) -> list[str]:
    names = ("recompute_over_nvme", "host_over_pinned", "worst_vs_no_tier")
    text = [
        "",
        "ratios of the same round (median)".ljust(34) + "".join(f"{int(c):,}".rjust(_WIDE) for c in figure[names[0]]),
    ]
    for name in names:
        cells = ("-" if value is None else f"{value:.2f}" for value in figure[name].values())
        text.append(name.ljust(34) + "".join(cell.rjust(_WIDE) for cell in cells) + _bar(name))
    return text


def _bar(name: str) -> str:
    context, (more, bar) = next((context, held) for (figure, context), held in BARS.items() if figure == name)
    return f"   at {'least' if more else 'most'} {bar:g} at {int(context):,}"
