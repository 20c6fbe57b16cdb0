"""Server-sent events from committed rows: a slow or absent reader costs nobody anything.

All who follow a session share one feed: the newest rows are read and written as frames once, however many follow. Who
is behind what the feed keeps reads the table for itself until it has caught up.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import asyncpg

from runtime.api.counts import Counts
from runtime.store import Database
from runtime.store.events import CHANNEL, read
from runtime.store.sessions import has_ended

log = logging.getLogger(__name__)

PAGE = 500
POLL_S = 5.0  # the net below a lost notification
KEPT_BYTES = 256 * 1024  # of a feed's frames
KEEP_ALIVE = ": keep-alive\n"
LAST = frozenset({"session.cancelled", "session.completed"})


@dataclass(frozen=True)
class Frame:
    position: int
    text: bytes
    last: bool  # of its session

    @classmethod
    def of(cls, event: dict[str, Any]) -> Frame:
        text = f"id: {event['id']}\nevent: {event['type']}\ndata: {json.dumps(event)}\n\n"
        return cls(event["id"], text.encode(), event["type"] in LAST)


class Feed:
    """The newest frames of one session, without a gap: those after `since`, up to KEPT_BYTES of them."""

    def __init__(self, session_id: str, counts: Counts) -> None:
        self.session_id = session_id
        self._counts = counts
        self.readers: set[asyncio.Event] = set()
        self.ended = False  # nothing comes after the frames that are here
        self._since: int | None = None
        self._frames: collections.deque[Frame] = collections.deque()
        self._bytes = 0
        self._reading = asyncio.Lock()

    async def after(self, db: Database, position: int) -> list[Frame]:
        """Frames after a position, oldest first, PAGE at most; none: there are none yet, or the session has ended."""
        if self._since is None or position >= self._end:
            async with self._reading:  # whoever waited here finds what the first one read
                if self._since is None or position >= self._end:
                    await self._read(db, max(position, self._end))
        if self._since is None or position < self._since:
            page = await read(db, self.session_id, position, PAGE)
            self._counts.frames_behind += len(page)
            return [Frame.of(event) for event in page]
        return [frame for frame in self._frames if frame.position > position][:PAGE]

    @property
    def _end(self) -> int:
        return self._frames[-1].position if self._frames else self._since or 0

    async def _read(self, db: Database, position: int) -> None:
        page = await read(db, self.session_id, position, PAGE)
        # Asked after an empty read, so one more makes sure that nothing came in between.
        if not page and await has_ended(db, self.session_id):
            page = await read(db, self.session_id, position, PAGE)
            self.ended = not page
        if self._since is None or position != self._end:
            self._frames.clear()
            self._bytes, self._since = 0, position
        for event in page:
            frame = Frame.of(event)
            self._frames.append(frame)
            self._bytes += len(frame.text)
        while self._bytes > KEPT_BYTES and len(self._frames) > 1:
            gone = self._frames.popleft()
            self._bytes -= len(gone.text)
            self._since = gone.position


class Hub:
    """Wakes readers. Notifications only wake; what is served is read from the table."""

    def __init__(self, db: Database, counts: Counts) -> None:
        self._db = db
        self.counts = counts
        self._feeds: dict[str, Feed] = {}

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
    def following(self, session_id: str) -> Iterator[tuple[Feed, asyncio.Event]]:
        """The session's feed, and what is set when there may be more of it."""
        feed = self._feeds.setdefault(session_id, Feed(session_id, self.counts))
        woken = asyncio.Event()
        feed.readers.add(woken)
        self.counts.streams_open += 1
        try:
            yield feed, woken
        finally:
            feed.readers.discard(woken)
            self.counts.streams_open -= 1
            if not feed.readers and self._feeds.get(session_id) is feed:
                del self._feeds[session_id]

    def _on_notify(self, _connection: object, _pid: int, _channel: str, session_id: object) -> None:
        if feed := self._feeds.get(str(session_id)):
            for woken in feed.readers:
                woken.set()

    def _wake_all(self) -> None:
        for feed in self._feeds.values():
            for woken in feed.readers:
                woken.set()


async def sse(hub: Hub, db: Database, session_id: str, after: int) -> AsyncIterator[bytes]:
    """Every frame after a position, in order, then new ones as they commit, until the session ends. Only events of the
    log carry an id, so that a cursor never skips one."""
    with hub.following(session_id) as (feed, woken):
        while True:
            woken.clear()  # before the read: whatever it does not see yet wakes
            frames = await feed.after(db, after)
            if frames:
                after = frames[-1].position
                last = next((no for no, frame in enumerate(frames, 1) if frame.last), None)
                hub.counts.frames += last or len(frames)
                yield b"".join(frame.text for frame in frames[:last])
                if last is not None:
                    return
            elif feed.ended:
                return
            if len(frames) < PAGE:
                try:
                    await asyncio.wait_for(woken.wait(), POLL_S)
                except TimeoutError:
                    yield KEEP_ALIVE.encode()
