"""What the engine is asked beside a step: pages come back while the result of their tool is written down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class ComingBack:
    """Sessions whose pause is over, and whose pages are being asked for while the result is written down."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, session_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[session_id] = asyncio.create_task(self._logged(session_id, work))
        task.add_done_callback(lambda ended: self._forget(session_id, ended))

    async def asked(self, session_id: str) -> None:
        """Returns when the engine has heard all of the session's last pause: what is asked of it now comes after."""
        if (task := self._tasks.get(session_id)) is not None:
            await asyncio.wait([task])

    async def _logged(self, session_id: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # a convenience: the next think finds what is missing, or says what is wrong
            log.info("the pages of %s were not asked for: %s", session_id, error)

    def _forget(self, session_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(session_id) is task:
            del self._tasks[session_id]
