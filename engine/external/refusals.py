"""What a server's refusal means: the request's fault, which stays so, or the server's state, which passes."""

from __future__ import annotations

import datetime
import email.utils
import math
from collections.abc import Mapping
from typing import Any

from engine.errors import EngineError, RequestError, ServerUnavailable

MOST_RETRY_AFTER_S = 60.0
_PASSES = frozenset({408, 409, 425, 429})
_REMEDY = {
    401: "; TENUTO_OPENAI_KEY must hold a key that it takes",
    403: "; TENUTO_OPENAI_KEY must hold a key that may do this",
    404: "; TENUTO_MODEL must name an address and a model that are there, as openai:http://HOST:PORT/v1#MODEL",
}
_TOO_LONG = ("context", "too long", "maximum length", "max_model_len")


def of_status(status: int, body: Any, retry_after: str | None = None) -> EngineError:
    """Of an answer other than 200. `body`: its JSON, or its text."""
    error = body.get("error", body) if isinstance(body, Mapping) else body
    words, code = _words(error), str(error.get("code") or error.get("type") or "") if isinstance(error, Mapping) else ""
    if status in _PASSES or status >= 500:
        return ServerUnavailable(f"the server answered {status}: {words}", retry_after_s(retry_after))
    message = f"the server refused with {status}: {words}{_REMEDY.get(status, '')}"
    if status in (400, 413, 422) and _is_too_long(code, words):
        return RequestError("context_length_exceeded", message)
    return RequestError("server_refused", message)


def of_error(error: Any) -> EngineError:
    """Of an error within a stream, which has a status only if the server says so."""
    code = error.get("code") if isinstance(error, Mapping) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else None
    if isinstance(code, str) and code.isdecimal() and 400 <= int(code) < 600:
        status = int(code)
    if status is not None:
        return of_status(status, {"error": error})
    return ServerUnavailable(f"the server broke off: {_words(error)}")


def retry_after_s(given: str | None, now: datetime.datetime | None = None) -> float | None:
    """Seconds, at most MOST_RETRY_AFTER_S, of a header that has seconds or a date. None of what is neither."""
    if not given:
        return None
    try:
        seconds = float(given)
    except ValueError:
        try:
            at = email.utils.parsedate_to_datetime(given)
        except (ValueError, TypeError):
            return None
        if at.tzinfo is None:
            at = at.replace(tzinfo=datetime.UTC)
        seconds = (at - (now or datetime.datetime.now(datetime.UTC))).total_seconds()
    return min(max(0.0, seconds), MOST_RETRY_AFTER_S) if math.isfinite(seconds) else None


def _words(error: Any) -> str:
    told = error.get("message", error) if isinstance(error, Mapping) else error
    words = " ".join(str(told).replace("\0", " ").split()) or "nothing"
    return words if len(words) <= 300 else words[:297] + "..."


def _is_too_long(code: str, words: str) -> bool:
    return "context" in code or any(mark in words.lower() for mark in _TOO_LONG)
