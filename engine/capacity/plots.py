"""Three plots as plain SVG: the roofline, users against context, and where each tier breaks even.

They need nothing to be looked at, and follow the reader's light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from engine.capacity import formulas as f
from engine.capacity.plan import Planned

_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 24, 56, 52
_STYLE = """
svg { background: #fff; color: #1a1a1a; font: 13px/1.4 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
text { fill: currentColor; } .title { font-size: 15px; font-weight: 600; } .dim { opacity: .62; }
.grid { stroke: currentColor; opacity: .12; } .line { fill: none; stroke: currentColor; stroke-width: 1.5; }
.accent { stroke: #0b6bcb; } .mark { fill: #0b6bcb; stroke: none; } .dash { stroke-dasharray: 5 4; }
@media (prefers-color-scheme: dark) { svg { background: #15171a; color: #e8e8e8; }
.accent { stroke: #5aa9ff; } .mark { fill: #5aa9ff; } }
"""
Point = tuple[float, float]


@dataclass
class _Chart:
    """Two logarithmic axes, from and to; what is drawn between them."""

    title: str
    about: str
    x_axis: tuple[str, float, float]
    y_axis: tuple[str, float, float]
    parts: list[str] = field(default_factory=list)

    def line(self, points: Sequence[Point], name: str, style: str = "") -> None:
        """A line through what lies within the axes, with its name at its right end."""
        shown = [(x, y) for x, y in points if y > 0 and self.y_axis[1] <= y <= self.y_axis[2]]
        if len(shown) < 2:
            return
        path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in shown)
        self.parts.append(f'<polyline class="line {style}" points="{path}"/>')
        x, y = shown[-1]
        self.note(x, y, name, anchor="end", above=8)

    def mark(self, x: float, y: float, name: str) -> None:
        self.parts.append(f'<circle class="mark" cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="4.5"/>')
        right = self._x(x) > _WIDTH / 2
        self.note(x, y, f"{name}  " if right else f"  {name}", anchor="end" if right else "start", above=-18)

    def note(self, x: float, y: float, text: str, *, anchor: str, above: float) -> None:
        place = f'x="{self._x(x):.1f}" y="{self._y(y) - above:.1f}" text-anchor="{anchor}"'
        self.parts.append(f'<text xml:space="preserve" {place}>{escape(text)}</text>')

    def svg(self) -> str:
        frame = [*self._grid_x(), *self._grid_y()]
        bottom, middle = _HEIGHT - 12, (_LEFT + _WIDTH - _RIGHT) / 2
        names = [
            f'<text class="title" x="16" y="24">{escape(self.title)}</text>',
            f'<text class="dim" x="16" y="42">{escape(self.about)}</text>',
            f'<text class="dim" x="{middle}" y="{bottom}" text-anchor="middle">{escape(self.x_axis[0])}</text>',
            f'<text class="dim" x="{_WIDTH - 16}" y="24" text-anchor="end">{escape(self.y_axis[0])}</text>',
        ]
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        return "\n".join([head, f"<style>{_STYLE}</style>", *frame, *self.parts, *names, "</svg>", ""])

    def _x(self, value: float) -> float:
        return _LEFT + _place(value, self.x_axis) * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - _place(value, self.y_axis) * (_HEIGHT - _TOP - _BOTTOM)

    def _grid_x(self) -> list[str]:
        found, low = [], _HEIGHT - _BOTTOM
        for value in _ticks(self.x_axis):
            x = self._x(value)
            found.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{low}"/>')
            found.append(f'<text x="{x:.1f}" y="{low + 18}" text-anchor="middle">{_short(value)}</text>')
        return found

    def _grid_y(self) -> list[str]:
        found, right = [], _WIDTH - _RIGHT
        for value in _ticks(self.y_axis):
            y = self._y(value)
            found.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            found.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>')
        return found


def plots(planned: Planned) -> dict[str, str]:
    """File name -> SVG."""
    return {
        "roofline.svg": roofline(planned),
        "users.svg": users_by_context(planned),
        "break-even.svg": break_even(planned),
    }


def roofline(planned: Planned) -> str:
    """What a decode step reaches by how much it computes for each byte that it reads."""
    plan, place = planned.plan, planned.placement
    peak, bps = place.peak_flops, planned.terms.device.hbm_bps * place.degree
    left, right = min(1.0, plan.intensity / 2), max(plan.ridge * 8, plan.intensity * 2)
    reach = peak * 1.6
    about = f"{plan.device} x {plan.tp}; ridge at {plan.ridge:.0f} FLOP/B; a batch of {plan.batch}"
    chart = _Chart("Roofline", about, ("FLOP per byte", left, right), ("FLOP per second", left * bps, reach))
    chart.line([(left, left * bps), (plan.ridge, peak), (right, peak)], "")
    chart.mark(plan.intensity, min(peak, plan.intensity * bps), f"{plan.intensity:.1f} FLOP/B")
    limit = plan.intensity_limit
    if limit is not None and left < limit < right:
        chart.line([(limit, left * bps), (limit, reach)], "", "dash accent")
        chart.note(limit, left * bps, f"limit {limit:.1f} ", anchor="end", above=8)
    return chart.svg()


def users_by_context(planned: Planned) -> str:
    """How many sessions fit, by how long they are."""
    place, plan = planned.placement, planned.plan
    most = max(planned.facts.context, plan.context, 2048)
    contexts = _spread(min(512, plan.context), most)

    def users(n: int) -> float:
        held = float(place.room // max(1, place.own_session_at(n))) if place.room > 0 else 0.0
        return held * (place.degree if planned.terms.dp_attention else 1)

    points = [(float(n), users(n)) for n in contexts]
    top = max([y for _, y in points] + [10.0]) * 1.5
    x_axis = ("tokens of a session", float(contexts[0]), float(contexts[-1]))
    chart = _Chart("Users by memory", f"{plan.model} on {plan.device} x {plan.tp}", x_axis, ("users", 1.0, top))
    chart.line(points, "", "accent")
    if plan.users_by_memory:
        chart.mark(float(plan.context), float(plan.users_by_memory), f"{plan.users_by_memory:,} at {plan.context:,}")
    return chart.svg()


def break_even(planned: Planned) -> str:
    """Seconds to compute a context again, and to read it from each tier."""
    place, plan = planned.placement, planned.plan
    contexts = _spread(16, max(planned.facts.context, 2048))
    groups, dtype = planned.facts.groups, plan.kv_dtype
    times: dict[str, Callable[[int], float]] = {"compute": place.prefill_s}
    for one in plan.tiers:
        bps = one.gb_s * 1e9
        times[one.tier] = lambda n, bps=bps: f.session_bytes(groups, dtype, n) / bps  # type: ignore[misc]
    lines = {name: [(float(n), took(n)) for n in contexts] for name, took in times.items()}
    seconds = [y for points in lines.values() for _, y in points if y > 0]
    x_axis = ("tokens of context", float(contexts[0]), float(contexts[-1]))
    about = f"computing pays below {plan.break_even_gb_s:.1f} GB/s"
    chart = _Chart("Restore or recompute", about, x_axis, ("seconds", min(seconds) / 1.5, max(seconds) * 2))
    for name, points in lines.items():
        chart.line(points, name, "accent" if name == "compute" else "dash" if name == "nvme" else "")
    return chart.svg()


def _spread(low: int, high: int) -> list[int]:
    steps = 48
    return sorted({round(low * (high / low) ** (at / steps)) for at in range(steps + 1)})


def _place(value: float, axis: tuple[str, float, float]) -> float:
    return math.log(value / axis[1]) / math.log(axis[2] / axis[1])


def _ticks(axis: tuple[str, float, float]) -> list[float]:
    """Powers of ten; if there are too few of them, halves and fifths, too."""
    low, high = axis[1], axis[2]
    tens = [10.0**one for one in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    if len(tens) > 8:
        return tens[:: math.ceil(len(tens) / 8)]
    if len(tens) >= 3:
        return tens
    steps = [
        step * 10.0**one
        for one in range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
        for step in (1, 2, 5)
    ]
    return [one for one in steps if low <= one <= high]


def _short(value: float) -> str:
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}" if value >= 1e-3 else f"{value:.0e}"
