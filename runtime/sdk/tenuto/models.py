"""Values that the SDK returns. Fields that a newer server adds are kept in `model_extra`."""

from __future__ import annotations

import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class Event(_Open):
    """One event of a session's log. `id` is its position: give it back as a cursor."""

    id: int
    type: str
    created_at: datetime.datetime
    data: dict[str, Any]
    step: int | None = None
    attempt: int | None = None


class SessionInfo(_Open):
    """How a session stands. `tokens`: of its transcript; `last_event`: the position of its last event."""

    id: str
    state: str
    model: str
    seed: int
    epoch: int
    tokens: int = 0
    last_event: int = 0
    waiting_for: str | None = None
    ending: str | None = None  # cancelled or completed, from when that was asked for
    error: dict[str, Any] | None = None


class Question(_Open):
    """What a session waits for. `kind`: approval, outcome, client_tool or budget; `about`: the call, or the measure."""

    id: str
    kind: str
    session_id: str
    step: int
    call: int | None = None
    about: dict[str, Any]
    state: str
    answer: dict[str, Any] | None = None


class Turn(BaseModel):
    """What one message led to. `outcome`: final, incomplete where the answer was cut off at its token limit, or
    interrupted."""

    text: str
    outcome: str
    events: list[Event]

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Every call of the turn as it was settled: name, reason, code and a preview of its output."""
        return [event.data for event in self.events if event.type == "tool.settled"]
