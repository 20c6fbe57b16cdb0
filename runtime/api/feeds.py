"""The newest events of each session that somebody follows, read from the table once, however many follow it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import asyncpg

from runtime.api.counts import Counts
from runtime.errors import Unavailable
from runtime.store import Database
from runtime.store.events import CHANNEL, Told, told
from runtime.store.sessions import has_ended

log = logging.getLogger(__name__)

PAGE = 500
KEPT_BYTES = 256 * 1024  # of a feed's frames
# Between two reads of what was notified: what commits meanwhile is read with one query. Where a read and telling of it
# take long, for there is much to do, the time between is ten times as long, so that tokens are made rather than told.
GATHER_S, GATHER_RATIO, GATHER_MOST_S = 0.01, 10, 0.1
QUIET_S = 5.0  # a reader that was told nothing for so long looks for itself: the net below a lost notification
LAST = frozenset({"session.cancelled", "session.completed"})


@dataclass(frozen=True)
class Frame:
    position: int
    text: bytes
    last: bool  # of its session

    @classmethod
    def of(cls, event: Told) -> Frame:
        text = f"id: {event.position}\nevent: {event.type}\ndata: {event.text}\n\n"
        return cls(event.position, text.encode(), event.type in LAST)


class Reader:
    """One that follows a session. `woken` is set when there may be more for it, and `look` when it should not trust
    that nothing was said."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self.look = True
        self._told = False

    def was_told(self) -> None:
        self._told = True

    def tick(self) -> None:
        """What is called every QUIET_S."""
        if not self._told:
            self.look = True
            self.woken.set()
        self._told = False


class Feed:
    """The newest frames of one session, without a gap: what came after `since`, up to KEPT_BYTES of it."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.readers: set[Reader] = set()
        self.ended = False  # nothing comes after the frames that are here
        self.since: int | None = None  # None: nobody has looked yet
        self._frames: collections.deque[Frame] = collections.deque()
        self._bytes = 0
        self._looking = asyncio.Lock()

    @property
    def end(self) -> int:
        return self._frames[-1].position if self._frames else self.since or 0

    def wake(self) -> None:
        for reader in self.readers:
            reader.woken.set()

    async def look(self, db: Database, position: int) -> None:
        """Read the table for what comes after a position and after what is here."""
        if self.since is not None and position < self.end:
            return
        async with self._looking:
            start = max(position, self.end)
            page = (await told(db, {self.session_id: start}, PAGE))[self.session_id]
            # Asked after an empty read, so one more makes sure that nothing came in between.
            if not page and await has_ended(db, self.session_id):
                page = (await told(db, {self.session_id: start}, PAGE))[self.session_id]
                self.ended = not page
            if self.since is None or start > self.end:
                self._frames.clear()
                self._bytes, self.since = 0, start
            self.extend([Frame.of(event) for event in page])
            self.wake()  # whoever else waits for what was found here

    def extend(self, frames: Sequence[Frame]) -> None:
        """Take what comes next. What is here already, as two who read at once bring it, is left out; what would leave a
        gap too."""
        for frame in frames:
            if frame.position == self.end + 1:
                self._frames.append(frame)
                self._bytes += len(frame.text)
        while self._bytes > KEPT_BYTES and len(self._frames) > 1:
            gone = self._frames.popleft()
            self._bytes -= len(gone.text)
            self.since = gone.position

    def after(self, position: int) -> list[Frame] | None:
        """Frames after a position, oldest first; None where only the table has them."""
        if self.since is None or position < self.since:
            return None
        found: list[Frame] = []
        for frame in reversed(self._frames):
            if frame.position <= position:
                break
            found.append(frame)
        return found[::-1]


class Hub:
    """Wakes readers. Notifications only say whose events to read; what is served is read from the table."""

    def __init__(self, db: Database, counts: Counts) -> None:
        self.counts = counts
        self._db = db
        self._feeds: dict[str, Feed] = {}
        self._notified: set[str] = set()
        self._any = asyncio.Event()

    @contextlib.contextmanager
    def following(self, session_id: str) -> Iterator[tuple[Feed, Reader]]:
        """The session's feed, and a reader of it that is told when there may be more."""
        feed = self._feeds.setdefault(session_id, Feed(session_id))
        reader = Reader()
        feed.readers.add(reader)
        self.counts.streams_open += 1
        try:
            yield feed, reader
        finally:
            feed.readers.discard(reader)
            self.counts.streams_open -= 1
            if not feed.readers and self._feeds.get(session_id) is feed:
                del self._feeds[session_id]

    async def run(self) -> None:
        """Listen for notifications and read what they name, for as long as the process lives."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen_forever())
            group.create_task(self._read_forever())
            group.create_task(self._tick_forever())

    async def _listen_forever(self) -> None:
        while True:
            try:
                connection = await asyncpg.connect(self._db.dsn, timeout=5)
                try:
                    closed = asyncio.Event()
                    connection.add_termination_listener(lambda _, done=closed: done.set())
                    await connection.add_listener(CHANNEL, self._on_notify)
                    self._notified.update(self._feeds)  # what was not heard of
                    self._any.set()
                    await closed.wait()
                finally:
                    connection.terminate()
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
                log.info("not listening for events: %s", error)
            await asyncio.sleep(0.3)

    def _on_notify(self, _connection: object, _pid: int, _channel: str, session_id: object) -> None:
        if str(session_id) in self._feeds:
            self._notified.add(str(session_id))
            self._any.set()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(QUIET_S)
            for feed in list(self._feeds.values()):
                for reader in feed.readers:
                    reader.tick()

    async def _read_forever(self) -> None:
        while True:
            await self._any.wait()
            self._any.clear()
            began = time.monotonic()
            names, self._notified = self._notified, set()
            known = [feed for name in names if (feed := self._feeds.get(name))]
            for feed in known:
                if feed.since is None:  # who waits there asks for something else than events
                    feed.wake()
            feeds = [feed for feed in known if feed.since is not None]
            try:
                found = await told(self._db, {feed.session_id: feed.end for feed in feeds}, PAGE) if feeds else {}
            except (Unavailable, asyncpg.PostgresError) as error:
                log.info("events could not be read: %s", error)  # readers look for themselves after a while
                continue
            for feed in feeds:
                page = found[feed.session_id]
                feed.extend([Frame.of(event) for event in page])
                feed.wake()
                if len(page) == PAGE:
                    self._on_notify(None, 0, CHANNEL, feed.session_id)
            await asyncio.sleep(0)  # those who were woken tell what there is
            await asyncio.sleep(min(max(GATHER_S, GATHER_RATIO * (time.monotonic() - began)), GATHER_MOST_S))
