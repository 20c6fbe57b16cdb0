"""Decisions as lines of a log, and the same history under another policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvtier.policy.cascade import Policy
from kvtier.policy.values import Move, Place, Prefill, Reason, SessionView, State, TierView, View

PLAIN = ("now_s", "reason", "subject", "bytes_per_token", "waiting", "service_s", "need_bytes", "line")


@dataclass(frozen=True, slots=True)
class Change:
    """One moment of a log: what was done and what another policy would have done."""

    now_s: float
    reason: Reason
    done: list[Move]
    other: list[Move]


def record(view: View, moves: list[Move]) -> dict[str, Any]:
    """A line: all that the decision depended on, and the decision with its predicted cost."""
    return {
        **{name: getattr(view, name) for name in PLAIN},
        "sessions": [asdict(session) for session in view.sessions.values()],
        "tiers": [asdict(tier) for tier in view.tiers],
        "prefill": asdict(view.prefill),
        "moves": [asdict(move) for move in moves],
    }


def replay(lines: Iterable[dict[str, Any]], policy: Policy) -> Iterator[Change]:
    """Asks `policy` at every recorded moment. Each view is the recorded one: earlier differences do not carry over."""
    for line in lines:
        view = _view(line)
        yield Change(view.now_s, view.reason, [_move(move) for move in line["moves"]], policy.decide(view))


def _view(line: dict[str, Any]) -> View:
    sessions = [_session(fields) for fields in line["sessions"]]
    return View(
        **{**{name: line[name] for name in PLAIN}, "reason": Reason(line["reason"])},
        sessions={session.id: session for session in sessions},
        tiers=tuple(TierView(**{**fields, "place": Place(fields["place"])}) for fields in line["tiers"]),
        prefill=Prefill(**line["prefill"]),
    )


def _session(fields: dict[str, Any]) -> SessionView:
    copy = fields["copy"]
    return SessionView(**{**fields, "state": State(fields["state"]), "copy": None if copy is None else Place(copy)})


def _move(fields: dict[str, Any]) -> Move:
    return Move(**{**fields, "place": Place(fields["place"])})
