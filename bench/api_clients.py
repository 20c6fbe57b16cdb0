"""Followers of sessions, as a process of their own: each reads its stream, loses its connection now and then, reads
slowly for a while, and writes down every event that it was given.

    python -m bench.api_clients URL KEY < sessions.json > seen.jsonl
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import random
import re
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_FRAME = re.compile(rb'id: (\d+)\nevent: (\S+)\ndata: \{"id": \d+, "type": "[^"]+", "created_at": "([^"]+)"')
_PATIENCE_S = 300.0


@dataclass
class Follower:
    """One that is `slow` waits a while between two reads."""

    number: int
    session_id: str
    rng: random.Random
    slow: bool
    lose: bool = False  # sabotage: comes back with a cursor one too far
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    ids: list[int] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    drops: int = 0

    async def follow(self, host: str, port: int, key: str) -> None:
        ended, after = False, 0
        while not ended:
            reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
            try:
                writer.write(self._request(after, key))
                ended, after = await self._read(reader, after)
            except (asyncio.IncompleteReadError, ConnectionError, asyncio.LimitOverrunError):
                pass
            finally:
                writer.transport.abort()
            self.drops += 0 if ended else 1

    def _request(self, after: int, key: str) -> bytes:
        return (
            f"GET /v1/sessions/{self.session_id}/events/stream HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {key}\r\nLast-Event-ID: {after}\r\n\r\n"
        ).encode()

    async def _read(self, reader: asyncio.StreamReader, after: int) -> tuple[bool, int]:
        """Until the session rests, or the connection is dropped. Whether it rests, and the last position."""
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise ConnectionError(head[:100])
        self.connected.set()
        rest = b""
        while True:
            size = int(await reader.readuntil(b"\r\n"), 16)
            rest += await reader.readexactly(size + 2)
            rest = rest[:-2]
            now = time.time()
            *frames, rest = rest.split(b"\n\n")
            for frame in frames:
                match = _FRAME.search(frame)
                if match is None:
                    continue
                after = int(match[1])
                self.ids.append(int(match[1]))
                self.late_ms.append(1e3 * (now - _seconds(match[3])))
                if match[2] in (b"session.idle", b"session.failed"):
                    return True, after
            if self.rng.random() < 0.01:
                return False, after + (1 if self.lose else 0)
            if self.slow:
                await asyncio.sleep(0.25)


def _seconds(stamp: bytes) -> float:
    return datetime.datetime.fromisoformat(stamp.decode()).timestamp()


async def follow_all(url: str, key: str, plan: dict[str, Any]) -> list[dict[str, Any]]:
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    rng = random.Random(plan["seed"])
    followers = [
        Follower(number, session_id, random.Random(rng.random()), rng.random() < 0.1, plan["sabotage"] == "lose")
        for number, session_id in enumerate(one for one in plan["sessions"] for _ in range(plan["each"]))
    ]
    tasks = [asyncio.create_task(one.follow(address.hostname, address.port, key)) for one in followers]
    async with asyncio.timeout(_PATIENCE_S):
        for one in followers:
            await one.connected.wait()
        print(json.dumps({"ready": len(tasks)}), flush=True)
        await asyncio.gather(*tasks)
    return [
        {
            "number": one.number,
            "session": one.session_id,
            "ids": one.ids,
            "late_ms": sorted(one.late_ms)[len(one.late_ms) // 2] if one.late_ms else None,
            "slow": one.slow,
            "drops": one.drops,
        }
        for one in followers
    ]


if __name__ == "__main__":
    os.nice(19)  # they stand for machines elsewhere
    for line in asyncio.run(follow_all(sys.argv[1], sys.argv[2], json.loads(sys.stdin.readline()))):
        print(json.dumps(line), flush=True)
