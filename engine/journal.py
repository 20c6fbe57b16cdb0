"""The decision log as the keeper writes it: entries with what is expected of them, and absences that are settled when
their session is back."""

from __future__ import annotations

from collections.abc import Mapping

from engine.decisions import Decision, DecisionLog
from engine.kvcall import KvCall
from engine.sessions import SessionKv
from engine.speeds import Link, Speeds
from kvtier import Tier
from kvtier.policy import Place


class Journal:
    """On the compute thread. `token_bytes`: of KV, per token."""

    def __init__(self, decisions: DecisionLog, speeds: Speeds, token_bytes: int) -> None:
        self.decisions, self._speeds, self._token_bytes = decisions, speeds, token_bytes
        self._absent: dict[str, list[Decision]] = {}  # evictions whose price is known when the session is back

    def log(
        self,
        session: str,
        reason: str,
        action: str,
        place: str,
        tokens: int,
        *,
        step: int = 0,
        predicted_s: float | None = None,
        realised_s: float | None = None,
        instead_s: float | None = None,
    ) -> Decision:
        """An entry; settled where it is known what it took."""
        entry = self.decisions.add(
            session,
            reason,
            action,
            place,
            step=step,
            tokens=tokens,
            bytes=tokens * self._token_bytes,
            predicted_s=predicted_s,
            instead_s=instead_s or None,
        )
        if realised_s is not None:
            self.decisions.settle(entry, realised_s)
        return entry

    def stored(self, entry: Decision, link: Link, size_bytes: int, seconds: float, whole: bool, detail: str) -> None:
        """A copy has ended: the entry tells of what was written, not of what was there already."""
        if whole and not size_bytes:
            entry.predicted_s, detail = None, "it was there already"
        elif whole and size_bytes < entry.bytes:
            entry.tokens, entry.bytes = size_bytes // self._token_bytes, size_bytes
            entry.predicted_s, detail = link.write_s(size_bytes), "the rest was there already"
        self.decisions.settle(entry, seconds, "done" if whole else "failed", detail)

    def read(
        self,
        session: str,
        reason: str,
        action: str,
        tokens: Mapping[Tier, int],
        start: int,
        seconds: float,
        step: int = 0,
    ) -> None:
        """So many tokens came back from these tiers, behind `start` others."""
        count = sum(tokens.values())
        self.log(
            session,
            reason,
            action,
            "+".join(tokens),
            count,
            step=step,
            predicted_s=sum(self._speeds.links[tier].read_s(n * self._token_bytes) for tier, n in tokens.items()),
            realised_s=seconds,
            instead_s=self._speeds.compute_s(start, start + count),
        )

    def asked(self, record: SessionKv, call: KvCall, place: str) -> Decision:
        """Somebody's intent, for the log; to be settled when it is done."""
        tokens, tier = len(record.tokens), Tier(place) if place in (*Tier,) else None
        link = self._speeds.links[tier] if tier is not None else None
        predicted = None
        if link is not None:
            size = tokens * self._token_bytes
            predicted = link.write_s(size) if call.intent == "offload" else link.read_s(size)
        return self.log(
            record.name,
            call.source or "asked",
            "store" if call.intent == "offload" else call.intent,
            place,
            tokens,
            step=call.step,
            predicted_s=predicted,
            instead_s=self._speeds.compute_s(0, tokens),
        )

    def absent(self, record: SessionKv, reason: str, place: Place, cost_s: float, step: int) -> Decision:
        """One entry for a place, until the session is back: that it was offered before and is still there, or is asked
        to go twice, makes no second absence."""
        for entry in self._absent.get(record.name, ()):
            if entry.place == place.value and entry.status == "open":
                return entry
        entry = self.log(record.name, reason, "evict", place.value, len(record.tokens), step=step, predicted_s=cost_s)
        self._absent.setdefault(record.name, []).append(entry)
        return entry

    def back(self, name: str, seconds: float) -> None:
        """The session is back, and bringing its pages took so long."""
        for entry in self._absent.pop(name, []):
            self.decisions.settle(entry, seconds)

    def dropped(self, session: str) -> None:
        """The session is over."""
        for entry in self._absent.pop(session, []):
            self.decisions.settle(entry, 0.0, "moot", "the session ended without coming back for it")
