"""Server-sent events from committed rows: a slow or absent reader costs nobody anything.

All who follow a session share one feed. Who is behind what it keeps reads the table for itself, until it has caught up.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from runtime.api.feeds import Frame, Hub
from runtime.store import Database, keys
from runtime.store.events import told

BEHIND = 100  # events at a time of who reads the table for itself; each waits in memory until it is taken
KEY_EVERY_S = 30.0  # a stream outlives its key by no more
KEEP_ALIVE = b": keep-alive\n"


async def sse(hub: Hub, db: Database, session_id: str, after: int, key_id: str) -> AsyncIterator[bytes]:
    """Every frame after a position, in order, then new ones as they commit, until the session ends, or the key does
    that it was asked with. Only events of the log carry an id, so that a cursor never skips one. `after` is no position
    that is still to come."""
    asked_at = time.monotonic()
    with hub.following(session_id) as (feed, reader):
        while True:
            if time.monotonic() - asked_at >= KEY_EVERY_S:
                if not await keys.works(db, key_id):
                    return
                asked_at = time.monotonic()
            reader.woken.clear()  # before the read: whatever it does not see yet wakes
            looked, reader.look = reader.look, False
            if looked:
                await feed.look(db, after)
            frames = feed.after(after)
            if frames is None:
                page = (await told(db, {session_id: after}, BEHIND))[session_id]
                frames = [Frame.of(event) for event in page]
                hub.counts.frames_behind += len(frames)
                if not frames:  # its record was removed
                    return
            if frames:
                reader.was_told()
                after = frames[-1].position
                last = next((no for no, frame in enumerate(frames, 1) if frame.last), None)
                hub.counts.frames += last or len(frames)
                yield b"".join(frame.text for frame in frames[:last])
                if last is not None:
                    return
            elif feed.ended:
                return
            elif looked:
                yield KEEP_ALIVE
            if after >= feed.end:
                await reader.woken.wait()
