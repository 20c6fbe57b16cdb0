"""Errors of the runtime.

TenutoError
├── RequestError              the caller's fault; becomes a problem document
│   ├── NotFound              404
│   ├── Conflict              409
│   ├── InvalidRequest        400 (names the field)
│   ├── TooLarge              413
│   ├── Unauthorized          401
│   ├── Forbidden             403
│   └── TooManyRequests       429 (says when to come again)
├── Unavailable               503, try again
├── StaleEpoch                someone newer owns the session; the writer must stop
├── IllegalTransition         a state change that the table does not have
├── MigrationError            the schema and this release do not fit
└── StartupError              the stack cannot start; the message says what to do
    └── PortTaken             somebody else listens there
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class TenutoError(Exception):
    """Base of everything that the runtime raises on purpose."""


class RequestError(TenutoError):
    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or type(self).code

    def as_told(self) -> dict[str, Any]:
        """For a row, where another process finds it."""
        return {"status": self.status, "code": self.code, "message": str(self), "param": self.param}


class InvalidRequest(RequestError):
    pass


class Unauthorized(RequestError):
    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    status = 403
    code = "forbidden"


class NotFound(RequestError):
    status = 404
    code = "not_found"


class Conflict(RequestError):
    status = 409
    code = "conflict"


class TooLarge(RequestError):
    status = 413
    code = "request_too_large"


class TooManyRequests(RequestError):
    """The same request may work in `retry_after_s` seconds."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: int, *, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


def refusal(told: Mapping[str, Any]) -> RequestError:
    """The inverse of `as_told`."""
    kinds = {one.status: one for one in (NotFound, Conflict, TooLarge, Forbidden, Unauthorized)}
    kind = kinds.get(told.get("status", 0), InvalidRequest)
    return kind(str(told["message"]), param=told.get("param"), code=told.get("code"))


class Unavailable(TenutoError):
    """A part that is needed does not answer now; the same request may work later."""


class StaleEpoch(TenutoError):
    """A newer owner holds the session. Whoever sees this stops at once and writes nothing more."""


class MigrationError(TenutoError):
    """The schema and this release do not fit together."""


class StartupError(TenutoError):
    """The stack cannot start."""


class PortTaken(StartupError):
    """Somebody else listens on the API's port."""
