"""What the core tells of sessions as they come and go. Called on the compute thread; must not block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.restore import Sources
from kvtier import Tier


@dataclass(frozen=True)
class Return:
    """A request has its pages: where they came from, tokens computed again, seconds from admission."""

    sources: Sources
    recomputed: int
    seconds: float


@dataclass(frozen=True)
class Computed:
    """Tokens start..stop were computed before the first token; `recomputed` of them not for the first time. `alone`:
    nobody else ran."""

    start: int
    stop: int
    recomputed: int
    seconds: float
    alone: bool


class Observer:
    """Hears of everything and does nothing."""

    def submitted(self, session: str) -> None:
        """A generation arrives."""

    def admitted(self, session: str, pages: int) -> None:
        """A request is about to take so many pages of the pool."""

    def pays(self, tokens: Mapping[Tier, int], start: int) -> bool:
        """Whether to read these tokens from their tiers, behind `start` others, rather than compute them."""
        return True

    def returned(self, session: str, what: Return) -> None:
        """Its pages are there, as far as they were found."""

    def computed(self, session: str, what: Computed) -> None:
        """Its first token is there."""

    def rested(self, session: str, turn_s: float) -> None:
        """Its generation has ended, `turn_s` after its pages were there; the session knows its pages."""
