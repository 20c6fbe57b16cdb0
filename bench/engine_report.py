"""The engine bench's evidence as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.engine_figures import BARS, RATIOS, misses, p95, table
from bench.evidence import Line, only


def report(lines: Sequence[Line], figure: dict[str, Any]) -> list[str]:
    """The table, what it rests on, and every bar that is missed."""
    about = only(lines, "about")[0]
    rows = table(lines)
    text = [f"{about['model']}, {about['threads']} threads, tokens per second, median (timings)", ""]
    text.append("| engine | " + " | ".join(RATIOS) + " |")
    text.append("|---" * (len(RATIOS) + 1) + "|")
    for row in sorted(rows, key=lambda row: str(row["engine"])):
        cells = ["-" if row[name] is None else f"{row[name][0]:.0f} ({row[name][1]})" for name in RATIOS]
        text.append(f"| {row['engine']} | " + " | ".join(cells) + " |")
    text += ["", *(f"absent: {line['name']}: {line['why']}" for line in only(lines, "absent"))]
    reads = [line["bytes_per_s"] for line in only(lines, "bandwidth")]
    if reads:
        text.append(
            f"memory: {max(reads) / 1e9:.1f} GB/s at best, {about['matrix_bytes'] / 1e6:.0f} MB of bf16 matrices"
        )
    for line in only(lines, "gaps"):
        if line["gaps_ms"]:
            found = f"p95 {p95(line['gaps_ms']):.0f} ms of {len(line['gaps_ms'])} gaps"
            text.append(f"eight streams, {line['dtype']}, {line['window']}: {found}, {line['seconds']:.1f} s")
    text.append(f"other programs used {figure['foreign_cores']} cores in the median")
    for line in only(lines, "engine"):
        if "system_info" in line:
            text.append(f"{line['name']}: {' '.join(line['flags'])}; {line['system_info']} flash {line['flash_attn']}")
    text += ["", *(f"{name}: {figure[name]}" + _bar(name) for name in figure)]
    return text + [f"MISSED: {miss}" for miss in misses(figure)]


def _bar(name: str) -> str:
    if name not in BARS:
        return ""
    more, bar = BARS[name]
    return f" ({'at least' if more else 'at most'} {bar})"
