"""The node's line to its engine: one connection, opened again when the engine was restarted."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from engine import EngineClient, EngineError, EngineGone, ModelCard


class EngineLink:
    """Give me `client()` and I connect if need be; whoever holds a lost connection gets EngineGone from it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._client: EngineClient | None = None
        self._card: ModelCard | None = None
        self._connecting = asyncio.Lock()
        self.connections = 0  # made so far: one more may mean that another engine answers

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()

    @property
    def card(self) -> ModelCard:
        """The card of the engine that was reached last. Raises EngineGone if there was none yet."""
        if self._card is None:
            raise EngineGone(f"no engine has answered at {self.address} yet")
        return self._card

    async def client(self) -> EngineClient:
        """A live connection. Raises EngineGone."""
        async with self._connecting:
            if self._client is None or not self._client.connected:
                if self._client is not None:
                    with contextlib.suppress(EngineGone):
                        await self._client.close()
                    self._client = None
                self._client = await EngineClient.connect(self.address)
                self._card = self._client.card
                self.connections += 1
            return self._client

    async def answers(self, within_s: float) -> bool:
        """Whether the engine says something. One that is silent for so long is given up: whoever waits for it gets
        EngineGone."""
        client: EngineClient | None = None
        try:
            async with asyncio.timeout(within_s):
                client = await self.client()
                await client.ping()
                return True
        except (EngineError, TimeoutError):
            if client is not None and client.connected:
                await client.abort()
            return False

    async def ready(self, timeout_s: float) -> bool:
        """Whether the engine answers within the time; it may be loading its model."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                await self.client()
                return True
            except EngineGone:
                if asyncio.get_running_loop().time() > deadline:
                    return False
            await asyncio.sleep(0.1)
