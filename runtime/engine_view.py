"""What an engine says of itself, for a person: `tenuto engine`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from engine import EngineClient, ModelCard

TIMES = {
    "queue_s": "in the queue",
    "restore_s": "restoring pages",
    "first_token_s": "to the first token",
    "inter_token_s": "between tokens",
    "step_s": "one step",
    "draft_s": "finding drafts",
}
FAULTS = {
    "quarantined": "quarantined",
    "io_errors": "I/O errors",
    "timeouts": "too late",
    "foreign": "foreign",
    "undecodable": "without a key",
    "recreated": "vanished",
}
SIZES = {
    "batch": "decoding together",
    "prefill_tokens": "prefill tokens in a step",
    "verified_tokens": "tokens of a verification",
}


async def ask(address: str) -> tuple[ModelCard, dict[str, Any]]:
    """The engine's card and its stats. Raises EngineGone with the address where none answers."""
    async with await EngineClient.connect(address) as client:
        return client.card, await client.stats()


def view_of(told: Mapping[str, Any]) -> RenderableType:
    """The same of what the API tells of an engine: its card and stats, or why it did not answer."""
    if told["stats"] is None:
        return f"it did not answer: {told['error']}"
    return view(ModelCard.from_message(told["card"]), told["stats"])


def view(card: ModelCard, stats: dict[str, Any]) -> RenderableType:
    """Tables of the stats; a figure that was never measured is a dash."""
    tables = (_times(stats["metrics"]), _pages(stats), _tiers(stats), _tokens(stats["counters"]))
    return Group(_head(card, stats), *(part for table in tables for part in ("", table)))


def _head(card: ModelCard, stats: dict[str, Any]) -> str:
    return (
        f"{card.model}, {card.dtype}, backend {card.backend} in {card.mode} mode; "
        f"{stats['running']} running, {stats['waiting']} waiting, {stats['steps']} steps; books: {stats['integrity']}"
    )


def _times(metrics: dict[str, Any]) -> Table:
    table = _table("", "p50", "p95", "p99", "most", "count")
    for name, meaning in (TIMES | SIZES).items():
        one, unit = metrics[name], name in TIMES
        cells = [_ms(one[key]) if unit else _number(one[key]) for key in ("p50", "p95", "p99", "max")]
        table.add_row(meaning, *(cells if one["count"] else ["-"] * 4), str(one["count"]))
    return table


def _pages(stats: dict[str, Any]) -> Table:
    pool, waste = stats["pool"], stats["waste"]
    table = _table("pages on the device", "pages", "")
    cached = f"{pool['cached_clean']} clean, {pool['cached_dirty']} not yet below"
    table.add_row("held", str(pool["held"]), f"{stats['pinned_pages']} pinned, {stats['owed_pages']} more are owed")
    table.add_row("cached", str(pool["cached_clean"] + pool["cached_dirty"]), cached)
    table.add_row("free", str(pool["free"]), f"of {pool['total']}")
    unused = waste["allocated_tokens"] - waste["used_tokens"]
    table.add_row("unused rows", str(unused), f"of {waste['allocated_tokens']} in pages that requests hold")
    return table


def _tiers(stats: dict[str, Any]) -> Table:
    """What each tier holds, how it answered, and every fault that it saw."""
    table = _table("tiers", "pages", "used", "budget", "hits", "misses", "evicted", "break-even", "faults")
    for row in tier_rows(stats):
        table.add_row(*row)
    return table


def tier_rows(stats: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Of each tier that is there: its name, pages, bytes, budget, hits, misses, evictions, break-even and faults."""
    for tier, counts in stats["tiers"].items():
        if counts["budget_bytes"]:
            sizes = (_size(counts["used_bytes"]), _size(counts["budget_bytes"]))
            answers = (f"{counts[name]:,}" for name in ("hits", "misses", "evicted"))
            yield (tier, f"{counts['pages']:,}", *sizes, *answers, _break_even(stats, tier), _faults(counts))


def _break_even(stats: Mapping[str, Any], tier: str) -> str:
    """From which length on the tier pays."""
    lengths = stats.get("break_even") or {}
    if tier not in lengths:
        return "-"
    return "never" if lengths[tier] is None else f"{lengths[tier]:,} tokens"


def _faults(counts: dict[str, Any]) -> str:
    seen = [f"{counts[name]:,} {meaning}" for name, meaning in FAULTS.items() if counts.get(name)]
    return ", ".join(seen) or "none"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:,.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:,.1f} MB"


def _tokens(counters: dict[str, Any]) -> Table:
    table = _table("tokens of prompts", "tokens", "")
    table.add_row("computed", str(counters["computed_tokens"]), "")
    table.add_row("reused", str(counters["prefix_hit_tokens"]), "found on the device")
    restored = [counters[f"restored_{tier}_tokens"] for tier in ("host", "nvme", "shared")]
    table.add_row("restored", str(sum(restored)), "{} from host, {} from NVMe, {} shared".format(*restored))
    unused = counters["prefetched_unused"]
    table.add_row("prefetched", str(counters["prefetched"]), f"pages, {unused} of them taken away unused")
    table.add_row("recomputed", str(counters["recomputed_tokens"]), "their pages were gone")
    preempted = f"{counters['swapped_pages']} pages to host"
    table.add_row("preemptions", str(counters["preemptions"]), preempted)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if column and number else "left")
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:,.1f} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
