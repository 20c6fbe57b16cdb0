from __future__ import annotations

import itertools
from typing import Any

import pytest

from runtime.store import Database, Owner, fleet, sessions, steps
from runtime.store.values import Attempt, Checkpoint, Segment
from workflows.states import Event as Move

CONFIG = {"model": "m", "system": None, "tools": [], "limits": {}, "sampling": {}, "kv": {"on_tool": "auto"}}


def checkpoint(tokens: int, *keys: bytes, root: str = "r") -> Checkpoint:
    return Checkpoint(tokens, b"d" * 32, "f", keys[-1] if keys else None, keys, root)


class Story:
    """A session in a database, told step by step."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.session_id = sessions.new_id("ses")
        self.tokens = itertools.count()

    async def placed(self) -> Owner:
        await fleet.ensure_admin(self.db, "key")
        await sessions.create(self.db, fleet.DEFAULT_TENANT, self.session_id, CONFIG, 1)
        return await self.take_over()

    async def take_over(self) -> Owner:
        session = await sessions.place(self.db, self.session_id, "n", "boot")
        return Owner(self.session_id, session.epoch, "n", "boot")

    async def message(self, content: str = "hello", **options: object) -> str:
        message_id = sessions.new_id("msg")
        given = {"tool_choice": "auto", "max_tool_rounds": 2, **options}
        await sessions.accept_message(self.db, fleet.DEFAULT_TENANT, self.session_id, message_id, content, given)
        return message_id

    async def begin(
        self, owner: Owner, no: int, kind: str = "think", token: str = "", message: str | None = None, **more: Any
    ) -> Attempt:
        to = Move.RUN_TOOL if kind == "tool" else Move.THINK
        token = token or f"t{next(self.tokens)}"
        opening = Segment("scaffold", [1]) if kind == "think" else None
        about = {"token": token, "message_id": message, "opening": opening, **more}
        return await steps.begin(self.db, owner, no, kind, to, **about)

    async def input(self, owner: Owner, no: int, ids: list[int]) -> None:
        message = await self.message()
        attempt = await self.begin(owner, no, "input", message=message)
        output = {"outcome": "input", "message_id": message}
        await steps.complete(
            self.db,
            owner,
            attempt,
            segments=[Segment("message", ids)],
            output=output,
            checkpoint=checkpoint(attempt.token_start + len(ids)),
        )

    async def events(self) -> list[str]:
        rows = await self.db.fetch("SELECT type FROM events WHERE session_id = $1 ORDER BY pos", self.session_id)
        return [row["type"] for row in rows]


@pytest.fixture
def story(db: Database) -> Story:
    return Story(db)
