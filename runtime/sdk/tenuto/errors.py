"""Errors of the SDK.

TenutoError
├── APIError            the server refused: `status`, `code`, `param` and its sentence
├── ConnectionFailed    the server did not answer, however often it was asked
├── NeedsAnswer         the session waits for a word that nobody here can give: `question`
├── SessionFailed       the session itself could not go on
└── ToolError           a function that cannot be a tool, or arguments that it does not take
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tenuto.models import Question

_DECISIONS = {
    "approval": "'approve' or 'decline'",
    "outcome": "'ran', 'did_not_run' or 'decline'",
    "client_tool": "'result' with output=",
    "budget": "'raise' with budget=, or 'stop'",
}


class TenutoError(Exception):
    """Base of every error that the SDK raises on purpose."""


class APIError(TenutoError):
    """The server refused: HTTP `status`, a stable `code`, the field at fault in `param`, and its sentence as text.

    `retry_after_s`: seconds after which the server said to come back, where it did.
    """

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class ConnectionFailed(TenutoError):
    """The server did not answer, however often it was asked."""


_WAITS_FOR = {
    "approval": "approval of",
    "outcome": "word whether a call took effect:",
    "client_tool": "the result of",
    "budget": "more budget, being out of",
}


class NeedsAnswer(TenutoError):
    """The session waits for a word that nobody here can give. It waits on: answer `question`, then `serve` or `run`."""

    def __init__(self, question: Question) -> None:
        about = question.about.get("name") or question.about.get("measure") or f"step {question.step}"
        super().__init__(
            f"session {question.session_id} waits for {_WAITS_FOR.get(question.kind, question.kind)} {about}; answer"
            f" {question.id} with {_DECISIONS.get(question.kind, 'a decision')}"
        )
        self.question = question


class SessionFailed(TenutoError):
    """The session could not go on; the text is the server's sentence."""


class ToolError(TenutoError):
    """A function that cannot be a tool, or arguments that it does not take; the text says which and why."""
