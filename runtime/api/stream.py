"""Server-sent events from committed rows: a slow or absent reader costs nobody anything."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg

from runtime.store import Database
from runtime.store.events import CHANNEL, read
from runtime.store.sessions import has_ended

log = logging.getLogger(__name__)

PAGE = 500
POLL_S = 5.0  # the net below a lost notification
KEEP_ALIVE = ": keep-alive\n"
LAST = frozenset({"session.cancelled", "session.completed"})


class Hub:
    """Wakes readers. Notifications only wake; what is served is read from the table."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._waiting: dict[str, set[asyncio.Event]] = collections.defaultdict(set)

    async def listen_forever(self) -> None:
        while True:
            try:
                connection = await asyncpg.connect(self._db.dsn, timeout=5)
                try:
                    closed = asyncio.Event()
                    connection.add_termination_listener(lambda _, done=closed: done.set())
                    await connection.add_listener(CHANNEL, self._on_notify)
                    self._wake_all()
                    await closed.wait()
                finally:
                    connection.terminate()
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
                log.info("not listening for events: %s", error)
            await asyncio.sleep(0.3)

    @contextlib.contextmanager
    def subscribed(self, session_id: str) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        self._waiting[session_id].add(event)
        try:
            yield event
        finally:
            self._waiting[session_id].discard(event)
            if not self._waiting[session_id]:
                del self._waiting[session_id]

    def _on_notify(self, _connection: object, _pid: int, _channel: str, session_id: object) -> None:
        for event in self._waiting.get(str(session_id), ()):
            event.set()

    def _wake_all(self) -> None:
        for events in self._waiting.values():
            for event in events:
                event.set()


async def pages_after(hub: Hub, db: Database, session_id: str, after: int) -> AsyncIterator[list[dict[str, Any]]]:
    """Every event after a position, in order, then new ones as they commit. An empty page: nothing for a while."""
    with hub.subscribed(session_id) as woken:
        while True:
            woken.clear()  # before the read: whatever it does not see yet wakes
            page = await read(db, session_id, after, PAGE)
            if page:
                after = page[-1]["id"]
                last = next((no for no, event in enumerate(page, 1) if event["type"] in LAST), None)
                yield page[:last]
                if last is not None:
                    return
            # Asked after the empty read, so one more read makes sure that nothing came in between.
            elif await has_ended(db, session_id) and not await read(db, session_id, after, 1):
                return
            if len(page) < PAGE:
                try:
                    await asyncio.wait_for(woken.wait(), POLL_S)
                except TimeoutError:
                    yield []


async def sse(hub: Hub, db: Database, session_id: str, after: int) -> AsyncIterator[str]:
    """Frames of the stream. Only events of the log carry an id, so that a cursor never skips one."""
    async for page in pages_after(hub, db, session_id, after):
        yield "".join(_frame(event) for event in page) or KEEP_ALIVE


def _frame(event: dict[str, Any]) -> str:
    return f"id: {event['id']}\nevent: {event['type']}\ndata: {json.dumps(event)}\n\n"
