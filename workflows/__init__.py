"""The session's state machine and its Temporal workflow: deterministic, references only."""

from workflows.states import TERMINAL, Event, IllegalTransition, State, moves, transition

__all__ = ["TERMINAL", "Event", "IllegalTransition", "State", "moves", "transition"]
