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


class IllegalTransition(Exception):
    """The table has no such move."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(
            f"a session that is {state} cannot {event}; it can {', '.join(sorted(_TABLE[state])) or 'do nothing'}"
        )


_WORKING = {
    Event.PAUSE: State.PAUSED,
    Event.FAIL: State.FAILED,
    Event.CANCEL: State.CANCELLING,
}
_TABLE: dict[State, dict[Event, State]] = {
    State.CREATED: {Event.PROVISION: State.PROVISIONING, Event.CANCEL: State.CANCELLING},
    State.PROVISIONING: {
        Event.REST: State.IDLE,
        Event.THINK: State.THINKING,
        Event.RUN_TOOL: State.TOOL_RUNNING,
        Event.FAIL: State.FAILED,
        Event.CANCEL: State.CANCELLING,
    },
    State.IDLE: {**_WORKING, Event.THINK: State.THINKING, Event.COMPLETE: State.COMPLETED},
    State.THINKING: {
        **_WORKING,
        Event.RUN_TOOL: State.TOOL_RUNNING,
        Event.REST: State.IDLE,
        Event.WAIT: State.WAITING,
    },
    State.TOOL_RUNNING: {
        **_WORKING,
        Event.THINK: State.THINKING,
        Event.REST: State.IDLE,
        Event.WAIT: State.WAITING,
    },
    State.WAITING: {
        **_WORKING,
        Event.THINK: State.THINKING,
        Event.RUN_TOOL: State.TOOL_RUNNING,
        Event.REST: State.IDLE,
    },
    State.PAUSED: {
        Event.REST: State.IDLE,
        Event.THINK: State.THINKING,
        Event.RUN_TOOL: State.TOOL_RUNNING,
        Event.WAIT: State.WAITING,
        Event.CANCEL: State.CANCELLING,
    },
    State.FAILED: {
        Event.REST: State.IDLE,
        Event.THINK: State.THINKING,
        Event.RUN_TOOL: State.TOOL_RUNNING,
        Event.CANCEL: State.CANCELLING,
    },
    State.CANCELLING: {Event.CLEANED: State.CANCELLED},
    State.CANCELLED: {},
    State.COMPLETED: {},
}

TERMINAL = frozenset({State.CANCELLED, State.COMPLETED})


def transition(state: State, event: Event) -> State:
    """The state after `event`. Raises IllegalTransition, in a sentence, where the table has no such move."""
    try:
        return _TABLE[state][event]
    except KeyError:
        raise IllegalTransition(state, event) from None


def moves() -> set[tuple[State, State]]:
    """Every pair (from, to) that the table allows; the database guards the same set."""
    return {(state, target) for state, row in _TABLE.items() for target in row.values()}
