"""Values that the SDK returns. Fields that a newer server adds are kept in `model_extra`."""

from __future__ import annotations

import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class Event(_Open):
    """One event of a session's log. `id` is its position: give it back as a cursor.

    `data` of a `model.delta`: the `text` that the model wrote, and where that is of calls, `calls`: for each its
    `index` in the message, its `name` the first time, and what was written of its `arguments` since, as JSON text.
    """

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


class File(_Open):
    """A name in a workspace. `kind`: file, folder or link; `mode` in octal; `sha256`: of a file's content."""

    path: str
    kind: str
    size: int | None = None
    mode: str | None = None
    sha256: str | None = None
    target: str | None = None


class Ran(_Open):
    """A command that ran in a session's sandbox. `reason`: exit, signal, timeout, oom or outcome_unknown; `step`: whose
    checkpoint has the workspace after it."""

    id: str
    step: int | None = None
    exit: int | None = None
    reason: str | None = None
    output: str = ""
    output_truncated: bool = False
    duration_s: float | None = None

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, and well."""
        return self.reason == "exit" and self.exit == 0


class Receipt(_Open):
    """What became of an intent: `status` is accepted, clipped, deferred, rejected or missing."""

    intent: str
    status: str
    tier: str | None = None
    pages: int = 0
    bytes: int = 0
    detail: str = ""


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
