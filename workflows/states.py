"""The session's state machine: one table. Nothing else assigns a state."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    CREATED = "created"
    PROVISIONING = "provisioning"
    IDLE = "idle"
    THINKING = "thinking"
    TOOL_RUNNING = "tool_running"
    WAITING = "waiting"
    PAUSED = "paused"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    COMPLETED = "completed"


class Event(StrEnum):
    PROVISION = "provision"
    REST = "rest"
    THINK = "think"
    RUN_TOOL = "run_tool"
    WAIT = "wait"
    PAUSE = "pause"
    FAIL = "fail"
    CANCEL = "cancel"
    CLEANED = "cleaned"
    COMPLETE = "complete"


S, E = State, Event
_STOP = {E.PAUSE: S.PAUSED, E.FAIL: S.FAILED, E.CANCEL: S.CANCELLING}
_GO_ON = {E.REST: S.IDLE, E.THINK: S.THINKING, E.RUN_TOOL: S.TOOL_RUNNING}
_TABLE: dict[State, dict[Event, State]] = {
    S.CREATED: {E.PROVISION: S.PROVISIONING, E.CANCEL: S.CANCELLING},
    S.PROVISIONING: {**_GO_ON, E.FAIL: S.FAILED, E.CANCEL: S.CANCELLING},
    S.IDLE: {**_STOP, E.THINK: S.THINKING, E.COMPLETE: S.COMPLETED},
    S.THINKING: {**_STOP, E.RUN_TOOL: S.TOOL_RUNNING, E.REST: S.IDLE, E.WAIT: S.WAITING},
    S.TOOL_RUNNING: {**_STOP, E.THINK: S.THINKING, E.REST: S.IDLE, E.WAIT: S.WAITING},
    S.WAITING: {**_STOP, **_GO_ON},
    S.PAUSED: {**_GO_ON, E.WAIT: S.WAITING, E.CANCEL: S.CANCELLING},  # resume goes back to where the record stands
    S.FAILED: {**_GO_ON, E.PAUSE: S.PAUSED, E.CANCEL: S.CANCELLING},  # so does retry
    S.CANCELLING: {E.CLEANED: S.CANCELLED},
    S.CANCELLED: {},
    S.COMPLETED: {},
}

TERMINAL = frozenset({State.CANCELLED, State.COMPLETED})


class IllegalTransition(Exception):
    """The table has no such move."""

    def __init__(self, state: State, event: Event) -> None:
        can = ", ".join(sorted(_TABLE[state])) or "do nothing"
        super().__init__(f"a session that is {state} cannot {event}; it can {can}")


def transition(state: State, event: Event) -> State:
    """The state after `event`. Raises IllegalTransition, in a sentence, where the table has no such move."""
    try:
        return _TABLE[state][event]
    except KeyError:
        raise IllegalTransition(state, event) from None


def moves() -> set[tuple[State, State]]:
    """Every pair (from, to) that the table allows; the database guards the same set."""
    return {(state, target) for state, row in _TABLE.items() for target in row.values()}


def diagram() -> str:
    """The table as a Mermaid state diagram. What every open session can do, be cancelled, is drawn once."""
    open_states = [state for state, row in _TABLE.items() if E.CANCEL in row]
    inside: list[str] = []
    outside: list[str] = []
    for state, row in _TABLE.items():
        for target in dict.fromkeys(target for event, target in row.items() if event is not E.CANCEL):
            events = ", ".join(event for event, to in row.items() if to is target)
            within = state in open_states and target in open_states
            (inside if within else outside).append(f"{state} --> {target}: {events}")
    return "\n".join(
        [
            "stateDiagram-v2",
            "    [*] --> created",
            "    state open {",
            *(f"        {line}" for line in inside),
            "    }",
            "    open --> cancelling: cancel",
            *(f"    {line}" for line in outside),
            *(f"    {state} --> [*]" for state in sorted(TERMINAL)),
        ]
    )
