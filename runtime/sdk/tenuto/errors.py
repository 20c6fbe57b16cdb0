"""Errors of the SDK.

TenutoError
├── APIError            the server refused: `status`, `code`, `param` and its sentence
├── ConnectionFailed    the server did not answer, however often it was asked
└── SessionFailed       the session itself could not go on
"""

from __future__ import annotations


class TenutoError(Exception):
    """Base of every error that the SDK raises on purpose."""


class APIError(TenutoError):
    """The server refused: HTTP `status`, a stable `code`, the field at fault in `param`, and its sentence as text."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class ConnectionFailed(TenutoError):
    """The server did not answer, however often it was asked."""


class SessionFailed(TenutoError):
    """The session could not go on; the text is the server's sentence."""
