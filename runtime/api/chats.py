"""Chat formats as nodes publish them: the API counts tokens as the node that will run the session does."""

from __future__ import annotations

import asyncio

from engine.tokens import ChatFormat, PublishedChat, Tokenizer, read_chat
from runtime.errors import Unavailable
from runtime.store import Database, chats

_KEPT = 4  # each takes tens of megabytes


class Chats:
    """Reads a format once and keeps the latest few."""

    def __init__(self) -> None:
        self._read: dict[str, asyncio.Task[tuple[Tokenizer, ChatFormat]]] = {}

    async def of(self, db: Database, digest: str) -> ChatFormat:
        """The format of this digest. Raises Unavailable where no node publishes it any longer."""
        return (await self._found(db, digest))[1]

    async def tokenizer(self, db: Database, digest: str) -> Tokenizer:
        """The tokenizer that goes with it. Raises Unavailable."""
        return (await self._found(db, digest))[0]

    async def _found(self, db: Database, digest: str) -> tuple[Tokenizer, ChatFormat]:
        task = self._read.pop(digest, None)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(_load(db, digest))
        self._read[digest] = task  # the latest is last
        while len(self._read) > _KEPT:
            self._read.pop(next(iter(self._read)))
        return await asyncio.shield(task)


async def _load(db: Database, digest: str) -> tuple[Tokenizer, ChatFormat]:
    data = await chats.data_of(db, digest)
    if data is None:
        raise Unavailable("the node that serves the model has just changed")
    return await asyncio.to_thread(read_chat, PublishedChat(digest, data))
