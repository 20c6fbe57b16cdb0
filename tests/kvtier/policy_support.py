"""Views for policy tests: small numbers that can be checked by hand."""

from __future__ import annotations

from typing import Any

from kvtier.policy import Place, Prefill, Reason, SessionView, State, TierView, View

PREFILL = Prefill(1e-3)
"""A millisecond per token."""


def session(name: str, tokens: int = 100, **fields: Any) -> SessionView:
    return SessionView(name, tokens, **{"state": State.TOOL, "since_s": 0.0, "tool": "sh", "resident": True, **fields})


def tiers(device: int = 1000, host: int = 1000, nvme: int | None = None, **links: float) -> list[TierView]:
    """Capacities in tokens, at a byte per token; a host that reads a token in 10 us, an nvme in 50 us."""
    found = [TierView(Place.DEVICE, device, 0), TierView(Place.HOST, host, 0, 1e5, 1e5, **links)]
    return found + ([] if nvme is None else [TierView(Place.NVME, nvme, 0, 2e4, 2e4)])


def view(reason: Reason, subject: str, sessions: list[SessionView], places: list[TierView], **fields: Any) -> View:
    """`used_bytes` follow from where the sessions say that they are."""
    by_place = []
    for tier in places:
        used = sum(s.copy_to - s.copy_from for s in sessions if s.copy is tier.place)
        if tier.place is Place.DEVICE:
            used = sum(s.tokens for s in sessions if s.resident)
        links = (tier.read_bps, tier.write_bps, tier.latency_s, tier.queued_s, tier.tax)
        by_place.append(TierView(tier.place, tier.capacity_bytes, used, *links))
    known = {s.id: s for s in sessions}
    return View(fields.pop("now_s", 0.0), reason, subject, known, tuple(by_place), PREFILL, 1, **fields)
