"""Shares of the oracle's gain as bars, in SVG, readable on light and on dark."""

from __future__ import annotations

from html import escape

from bench.policy_run import BOUND, NONE_OURS, OURS, RIVALS

SHOWN = (OURS, "informed", BOUND, *RIVALS, NONE_OURS)
WIDTH, ROW, TOP, LEFT, SPAN = 760, 16, 46, 190, 480
STYLE = """
text { font: 12px sans-serif; fill: #24292f } .soft { fill: #57606a } .grid { stroke: #d0d7de }
.ours { fill: #0969da } .informed { fill: #8250df } .rival { fill: #8c959f }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .soft { fill: #9198a1 } .grid { stroke: #3d444d }
  .ours { fill: #4493f8 } .informed { fill: #ab7df8 } .rival { fill: #656c76 }
}
"""


def plot(gains: dict[tuple[str, float], dict[str, float]]) -> str:
    """One group of bars for each mix and ratio; a bar ends at no tier on the left, at the oracle on the right."""
    parts, y = [], TOP
    for (mix, ratio), of in gains.items():
        parts.append(f'<text x="12" y="{y + 11}" font-weight="600">{escape(mix)}, live set {ratio} x tiers</text>')
        y += ROW + 2
        for name in (name for name in SHOWN if name in of):
            parts.append(_bar(name, of[name], y))
            y += ROW
        y += 10
    height = y + 10
    grid = "".join(_tick(part, height) for part in (0.0, 0.25, 0.5, 0.75, 0.95, 1.0))
    title = '<text x="12" y="20" font-weight="600">Part of the oracle\'s gain over no tier</text>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return f"{head}<style>{STYLE}</style>{title}{grid}{''.join(parts)}</svg>\n"


def _bar(name: str, share: float, y: int) -> str:
    kind = {OURS: "ours", "informed": "informed", BOUND: "informed"}.get(name, "rival")
    width = max(0.0, min(share, 1.1)) * SPAN
    return (
        f'<text class="soft" x="{LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(name)}</text>'
        f'<rect class="{kind}" x="{LEFT}" y="{y + 2}" width="{width:.1f}" height="{ROW - 4}" rx="2"/>'
        f'<text x="{LEFT + width + 5:.1f}" y="{y + 11}">{share:.1%}</text>'
    )


def _tick(part: float, height: int) -> str:
    x = LEFT + part * SPAN
    label = f'<text class="soft" x="{x:.1f}" y="38" text-anchor="middle">{part:.0%}</text>'
    return label + f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="42" y2="{height - 8}"/>'
