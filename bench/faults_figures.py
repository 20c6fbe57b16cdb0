"""The faults bench's figures, computed from evidence alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.evidence import Line, only

PROMISES = ("lost", "repeated", "diverged", "leaked", "stuck")


def figures(lines: Sequence[Line], sealed: bool = True) -> dict[str, Any]:
    sessions = [*only(lines, "calm"), *only(lines, "session")]
    faults = only(lines, "fault")
    return {
        "kills": len(faults),
        "sessions": len(sessions),
        "lost": sum(len(lost(one)) for one in sessions),
        "repeated": sum(repeated(one) for one in sessions),
        "diverged": sum(map(diverged(only(lines, "calm")), only(lines, "session"))),
        "leaked": sum(len(line["what"]) for line in only(lines, "left")),
        "stuck": sum(one["stuck"] for one in sessions),
        **_recovery(faults),
        "outcome_unknown": sum(len(one["unknown"]) for one in sessions),
        "by_kind": by(faults, lambda fault: f"{fault['kind_of_fault']} {fault['target']}"),
        "by_moment": by(faults, lambda fault: str(fault["moment"])),
        "skipped": sorted({name for line in only(lines, "about") for name in line["without"]}),
        "sealed": sealed,
    }


def is_green(figure: dict[str, Any]) -> bool:
    return not misses(figure)


def misses(figure: dict[str, Any]) -> list[str]:
    missed = [f"{figure[name]} {name}" for name in PROMISES if figure[name]]
    if not figure["kills"]:
        missed.append("nothing was killed")
    if not figure["sealed"]:
        missed.append("the evidence is not what was measured")
    return missed


def lost(session: Line) -> list[str]:
    """What was acknowledged and is not there, each in words: events, messages and their answers, tokens, results,
    checkpoints."""
    seen = [tuple(event) for event in session["seen"]]
    again = {tuple(event) for event in session["again"]}
    ids = [event[0] for event in seen]
    found = ["positions with a gap or a repeat"] if ids != list(range(1, len(ids) + 1)) else []
    found += [f"event {event[0]} {event[1]}" for event in seen if event not in again]
    if not session["stuck"]:
        found += [f"message {one}" for one in session["acknowledged"] if one not in session["consumed"]]
    found += [f"a failed turn: {said}" for said in session["failures"]]
    found += _lost_tokens(session)
    made = {event[2] for event in seen if event[1] == "checkpoint.created"}
    return found + [f"checkpoint of step {step}" for step in sorted(made - set(session["checkpoints"]))]


def _lost_tokens(session: Line) -> list[str]:
    """Tokens that were shown are those of the transcript, in its order, each once."""
    kept = sampled(session)
    completed = {event[2] for event in session["again"] if event[1] == "step.completed"}
    found = []
    for step, deltas in session["deltas"]:
        shown: list[int] = []
        for offset, token_ids in deltas:
            if offset != len(shown):
                found.append(f"step {step} showed tokens from {offset} after {len(shown)}")
            shown += token_ids
        if step in completed and shown != kept.get(step, []):
            found.append(f"step {step} showed {len(shown)} tokens, the transcript has others")
    return found


def sampled(session: Line) -> dict[int, list[int]]:
    """Tokens that the model drew, by step."""
    found: dict[int, list[int]] = {}
    for step, kind, token_ids in session["transcript"]:
        if kind == "model":
            found.setdefault(step, []).extend(token_ids)
    return found


def repeated(session: Line) -> int:
    return sum(count - 1 for where in ("inside", "outside") for count in Counter(session[where]).values())


def diverged(calm: Sequence[Line]) -> Callable[[Line], bool]:
    """Whether a session's tokens differ from the undisturbed run of its seed, or what its tools printed."""
    undisturbed = {line["seed"]: line for line in calm}

    def differs(session: Line) -> bool:
        other = undisturbed[session["seed"]]
        if session["stuck"] or session["failures"]:
            return False  # counted as such
        return _all(session) != _all(other) or session["outputs"] != other["outputs"]

    return differs


def _all(session: Line) -> list[int]:
    return [token for _, _, token_ids in session["transcript"] for token in token_ids]


def by(faults: Iterable[Line], name: Callable[[Line], str]) -> dict[str, Any]:
    groups: dict[str, list[Line]] = {}
    for fault in faults:
        groups.setdefault(name(fault), []).append(fault)
    return {key: {"kills": len(groups[key]), **_recovery(groups[key])} for key in sorted(groups)}


def _recovery(faults: Sequence[Line]) -> dict[str, float | None]:
    """From the fault to the first younger event that the session's reader has; None where there was none."""
    times = sorted(fault["recovered_s"] for fault in faults if fault["recovered_s"] is not None)
    return {"recovery_p50_s": _quantile(times, 0.5), "recovery_p99_s": _quantile(times, 0.99)}


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) if ordered else None


def report(figure: dict[str, Any]) -> list[str]:
    """The figures as a table."""
    rows = [("", "faults", "p50 s", "p99 s")]
    for title in ("by_kind", "by_moment"):
        rows += [(name, *(str(value) for value in row.values())) for name, row in figure[title].items()]
    text = [f"{row[0]:<22}{row[1]:>8}{row[2]:>8}{row[3]:>8}" for row in rows]
    promises = ", ".join(f"{figure[name]} {name}" for name in PROMISES)
    text.append(f"{figure['kills']} faults in {figure['sessions']} sessions: {promises}")
    text.append(f"{figure['outcome_unknown']} calls whose outcome nobody saw were asked about")
    if figure["skipped"]:
        text.append(f"not possible here: {', '.join(figure['skipped'])}")
    return text
