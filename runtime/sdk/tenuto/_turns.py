"""What running a turn comes to, whichever client runs it: whose events are the turn's, and what it asks for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from tenuto._tool import Tool, as_fault, as_output
from tenuto._wire import STREAM_ENDS
from tenuto.errors import APIError, SessionFailed, TenutoError, ToolError
from tenuto.models import Event, Question, Turn

_ASKS: Final = frozenset({"tool.approval_required", "tool.outcome_unknown", "tool.client_required", "budget.exhausted"})
RESTING: Final = frozenset({"created", "idle", "failed", "paused", "cancelled", "completed"})
HOLDS_QUESTIONS: Final = frozenset({"waiting", "paused"})
_TOO_LATE: Final = frozenset({404, 409})
Verdict = bool | tuple[str, str]
Approve = Callable[[Question], Any]  # a Verdict, which the asyncio client may have to await


class Claims:
    """Questions that a function of this client is at: of several who follow a session, one runs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: set[str] = set()

    def take(self, question_id: str) -> bool:
        """Whether nobody else is at it; now the caller is."""
        with self._lock:
            fresh = question_id not in self._ids
            self._ids.add(question_id)
            return fresh

    def drop(self, question_id: str) -> None:
        """The server knows the answer."""
        with self._lock:
            self._ids.discard(question_id)


def asked(event: Event) -> str | None:
    """The id of the question that an event tells of."""
    return str(event.data["question_id"]) if event.type in _ASKS else None


def asking(approve: Approve | None) -> Approve | None:
    """The same, if it can be asked. Raises TenutoError, before anything is sent."""
    if approve is not None and not callable(approve):
        raise TenutoError(f"approve is {approve!r}; it must be a function of a question, such as lambda question: True")
    return approve


def decision(verdict: Any) -> dict[str, Any]:
    """What an `approve` said, as an answer. Raises TenutoError where it said something else."""
    if verdict is True:
        return {"decision": "approve"}
    if verdict is False:
        return {"decision": "decline"}
    if isinstance(verdict, tuple) and len(verdict) == 2 and verdict[0] == "decline":
        return {"decision": "decline", "reason": str(verdict[1])}
    raise TenutoError(f"approve gave {verdict!r}; it must give True, False or ('decline', reason)")


def prepared(tool: Tool[..., Any], question: Question) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Arguments for the function, or else what the model is told of them."""
    try:
        return tool.arguments(question.about.get("arguments") or {}), None
    except ToolError as error:
        return None, failed(error)


def settled(value: Any) -> dict[str, Any]:
    """A function's result as an answer."""
    try:
        return {"decision": "result", "output": as_output(value)}
    except Exception as error:  # whatever the value does when it is written down
        return failed(error)


def failed(error: BaseException) -> dict[str, Any]:
    """An exception as an answer that the model can read."""
    return {"decision": "result", "output": as_fault(error), "is_error": True}


def came_too_late(error: APIError) -> bool:
    """Whether the answer is not wanted any more: it expired, was given, or its session ended meanwhile."""
    return error.status in _TOO_LATE


class TurnReader:
    """Collects the events of one message until the session rests, fails or ends.

    Feed it every event from before the message was sent. `events` holds all of them, the turns of earlier messages
    included; the result holds those of the message's own turn.
    """

    def __init__(self, message_id: str) -> None:
        self._message_id = message_id
        self._taken = False
        self._turn_start = 0  # into events
        self._own_input: int | None = None  # the step that takes the message
        self._failed: int | None = None
        self.events: list[Event] = []
        self.done = False

    def feed(self, event: Event) -> None:
        """Take one event; `done` is true once the turn has ended."""
        if self.done:
            return
        if not self._taken:
            self._look_for_its_step(event)
        self.events.append(event)
        if event.type in STREAM_ENDS:
            self.done = True
        elif event.type == "session.failed":
            # Another message's turn may fail before this one is taken. A message whose own input step failed is
            # never taken; the failure itself ends its turn, and so does one that no step is to blame for.
            self.done = self._taken or self._failed in (self._own_input, None)
            self._failed = None
        elif event.type == "session.idle":
            self.done = self._taken

    def _look_for_its_step(self, event: Event) -> None:
        if event.type == "step.started" and event.data.get("message_id") == self._message_id:
            self._own_input = event.step
            self._turn_start = len(self.events)
        elif event.type == "step.failed":
            self._failed = event.step
        elif event.type == "step.completed" and event.data.get("message_id") == self._message_id:
            self._taken = True

    def result(self) -> Turn:
        """The turn. Raises SessionFailed with the server's sentence where it did not end in an answer."""
        if not self.done:
            raise TenutoError("the turn has not ended: read all its events before its `with` block ends")
        events = self.events[self._turn_start :]
        last = events[-1]
        if last.type != "session.idle":
            message = last.data.get("message", "")
            raise SessionFailed(f"the session ended as {last.type.removeprefix('session.')}. {message}".strip())
        answers = [event for event in events if event.type == "message.completed"]
        stopped = any(event.type == "session.interrupted" for event in events)
        answer = answers[-1].data if answers else {"text": "", "outcome": "incomplete"}
        if stopped:
            answer = {**answer, "outcome": "interrupted"}
        return Turn(text=answer["text"], outcome=answer["outcome"], events=events)
