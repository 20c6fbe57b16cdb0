"""What sync and async share: where the server is, how requests are formed, retried and read."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tenuto.errors import APIError, SessionFailed, TenutoError
from tenuto.models import Event, Turn

DEFAULT_URL = "http://127.0.0.1:8300"
ATTEMPTS = 8
RETRIED_STATUS = frozenset({429, 502, 503, 504})
STREAM_TIMEOUT = httpx.Timeout(30.0, connect=5.0)  # the server says something every few seconds
TURN_ENDS = frozenset({"session.idle", "session.failed", "session.cancelled", "session.completed"})


@dataclass(frozen=True)
class Server:
    url: str
    key: str

    @classmethod
    def find(cls, url: str | None, key: str | None) -> Server:
        """Arguments first, then TENUTO_API_URL and TENUTO_API_KEY, then the key file of a local installation."""
        url = url or os.environ.get("TENUTO_API_URL") or DEFAULT_URL
        key = key or os.environ.get("TENUTO_API_KEY") or _local_key()
        if not key:
            raise TenutoError(
                "there is no API key: pass api_key=, or set TENUTO_API_KEY; `tenuto up` writes the first one to"
                " admin.key in its home"
            )
        return cls(url.rstrip("/"), key)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}", "User-Agent": "tenuto-python/0.1.0"}


def _local_key() -> str | None:
    homes = [os.environ.get("TENUTO_HOME"), "/var/lib/tenuto", str(Path.home() / ".local/share/tenuto")]
    for home in homes:
        try:
            return (Path(home) / "admin.key").read_text().strip() if home else None
        except OSError:
            continue
    return None


def post_headers(idempotency_key: str | None) -> dict[str, str]:
    """Every POST carries a key, so that a retry after a lost answer makes nothing twice."""
    return {"Idempotency-Key": idempotency_key or secrets.token_hex(16)}


def pause_before(attempt: int) -> float:
    """Seconds before the next attempt: doubling from 0.1 to 5, with jitter."""
    return min(0.1 * 2.0 ** min(attempt, 10), 5.0) * random.uniform(0.5, 1.0)


def raise_for(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        error: Mapping[str, Any] = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        raise APIError(response.status_code, "unknown", response.text[:500] or response.reason_phrase) from None
    raise APIError(response.status_code, error["code"], error["message"], error.get("param"))


class FrameReader:
    """Lines of a stream in, events out. Comments and frames that are no event are passed over."""

    def __init__(self) -> None:
        self._data: list[str] = []

    def feed(self, line: str) -> Event | None:
        if line.startswith("data:"):
            self._data.append(line[5:].lstrip())
        elif not line and self._data:
            text, self._data = "\n".join(self._data), []
            return Event.model_validate_json(text)
        return None


class TurnReader:
    """Collects the events of one message until the session rests, fails or ends."""

    def __init__(self, message_id: str) -> None:
        self._message_id = message_id
        self._taken = False
        self.events: list[Event] = []
        self.done = False

    def feed(self, event: Event) -> None:
        self.events.append(event)
        if event.type == "step.completed" and event.data.get("message_id") == self._message_id:
            self._taken = True
        # A message whose input step failed never completes it; the failure itself ends the turn.
        if event.type in TURN_ENDS and (self._taken or event.type != "session.idle"):
            self.done = True

    def result(self) -> Turn:
        last = self.events[-1]
        if last.type != "session.idle":
            message = last.data.get("message", "")
            raise SessionFailed(f"the session ended as {last.type.removeprefix('session.')}. {message}".strip())
        answers = [event for event in self.events if event.type == "message.completed"]
        answer = answers[-1].data if answers else {"text": "", "outcome": "incomplete"}
        return Turn(text=answer["text"], outcome=answer["outcome"], events=self.events)
