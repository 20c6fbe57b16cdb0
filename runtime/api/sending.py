"""Tell Temporal without making the caller wait: the row is committed, and the reconciler sends it again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from fastapi import Request

from runtime import delivery


def send(request: Request, sending: Awaitable[None]) -> None:
    task = asyncio.create_task(delivery.quietly(sending))
    request.app.state.sending.add(task)
    task.add_done_callback(request.app.state.sending.discard)
