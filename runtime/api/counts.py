"""What one process of the API counts of itself since it started; `GET /v1/admin/overview` shows it."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass
class Counts:
    """requests:         that were answered, whatever under
    failed:           of these with 5xx: a part behind the gateway was away, or a fault of ours
    unauthenticated:  with 401: no key, or one that is not known, revoked or expired
    limited:          with 429: a rate or a quota was used up
    prompts:          whose tokens were counted before anything was accepted
    prompts_refused:  of these, those that the model's context has no room for
    streams_open:     event streams that are followed now
    frames:           events sent on streams
    frames_behind:    of these, read from the table for one reader alone, who was behind what the feed keeps
    """

    requests: int = 0
    failed: int = 0
    unauthenticated: int = 0
    limited: int = 0
    prompts: int = 0
    prompts_refused: int = 0
    streams_open: int = 0
    frames: int = 0
    frames_behind: int = 0

    def answered(self, status: int) -> None:
        self.requests += 1
        self.failed += status >= 500
        self.unauthenticated += status == 401
        self.limited += status == 429


class Counted:
    """ASGI middleware: every answer is counted by its status, when it begins."""

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = False

        async def counted(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                self._counts.answered(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not began:  # whoever is outside answers it with 500
                self._counts.answered(500)
            raise
