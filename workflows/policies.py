"""Pure decisions of the session: what comes next, and what a lost activity means."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum

from workflows.contract import Progress

SEEN_KEPT = 500
MAX_UPDATES = 1000  # Temporal refuses the 2,000th of a run
MAX_LOSSES = 12  # of one step in a row; with the pauses between them, about a minute


LONGEST_ASKED_S = 60.0


def pause_after_loss(losses: int, asked_s: float = 0.0) -> timedelta:
    """Next to none at first, since a restarted node is usually back by then; then doubling to 10 seconds. `asked_s`:
    what a model server that is busy asks for, granted up to a minute."""
    return timedelta(seconds=max(min(0.05 * 2.0 ** (losses - 1), 10.0), min(asked_s, LONGEST_ASKED_S)))


class Next(StrEnum):
    THINK = "think"
    TOOLS = "tools"
    COMPACT = "compact"
    REST = "rest"


def next_action(progress: Progress) -> Next:
    """What follows the last completed step. A truncated call is never executed: the session rests instead."""
    if progress.outcome == "interrupted":
        return Next.REST
    if progress.kind in ("input", "tool"):
        return Next.COMPACT if progress.full and not progress.compacted else Next.THINK
    if progress.kind == "think" and progress.outcome == "tools":
        return Next.TOOLS
    return Next.REST


def may_go_on(progress: Progress, has_message: bool) -> bool:
    """Whether a step may begin now. A new message leaves `failed`; every other hold ends by a command or an answer."""
    return not progress.hold or (progress.hold == "failed" and has_message)


def ends_as(progress: Progress) -> str:
    """How a session ends that the record says has ended, or is about to; empty for one that lives."""
    return {"cancelling": "cancelled", "cancelled": "cancelled", "completed": "completed"}.get(progress.hold, "")


def stops(verb: str, running: str) -> bool:
    """Whether a command ends the activity that runs, instead of waiting for the step's end. A think goes on later at
    its last durable token; a tool is not killed for a pause."""
    if verb in ("interrupt", "rewind"):
        return running in ("think", "run_tools", "compact")
    return verb == "pause" and running in ("think", "compact")


def tool_choice_now(progress: Progress) -> str:
    """The choice for the next think: as asked until the rounds are used up, then an answer without tools."""
    return "none" if progress.rounds >= progress.max_tool_rounds else progress.tool_choice
