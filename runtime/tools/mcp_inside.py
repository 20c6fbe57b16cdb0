"""An MCP server in the session's sandbox: started when it is first needed, there until the sandbox is released."""

from __future__ import annotations

import asyncio

from mcp.client import ClientSession
from mcp_types import InitializeResult
from temporalio import activity

from runtime.tools.kinds import McpTool, texts
from runtime.tools.mcp import ABOUT_US, McpFault, T, Work, attempt
from runtime.tools.talking import INITIALIZED, RING_BYTES, Conversation
from runtime.unwanted import is_unwanted
from sandbox import Result, Running, Sandbox, SandboxBusy, SandboxLost

LAST_WORDS = 500


class InsideServer:
    """`handshake`: what the server said to the first who spoke with it, as the record keeps it; None before that.

    A server that ended is started again under the next number, so its journal still answers for its calls.
    """

    def __init__(
        self, sandbox: Sandbox, tool: McpTool, handshake: dict[str, object] | None, lock: asyncio.Lock
    ) -> None:
        self._sandbox = sandbox
        self._tool = tool
        self._handshake = handshake
        self._greeting = lock

    async def speak(self, work: Work[T], *, speaker: str, again: bool = False) -> T:
        key = ""
        try:
            async with self._greeting:
                key, greeted = await self._started(f"{speaker}/call" if again else None)
                if greeted and self._handshake is None:
                    await self._end_it(key)  # whoever greeted it died before writing down what it said
                    key, greeted = await self._started(None)
            offset = 0 if again else await self._end(key)
            return await self._talk(work, Conversation(self._sandbox, key, speaker, offset))
        except asyncio.CancelledError:
            if key and (not activity.in_activity() or is_unwanted()):
                await asyncio.shield(self._end_it(key))  # cancelled, not drained: it must not go on
            raise

    async def stop(self, speaker: str) -> None:
        """Ends the server that runs, if it was given a call by this name."""
        key, state = await self._found(f"{speaker}/call")
        if isinstance(state, Running) and await self._sandbox.wrote(key, f"{speaker}/call"):
            await self._end_it(key)

    async def _started(self, call: str | None) -> tuple[str, bool]:
        """The key of the server that runs, or of an ended one that was given `call`; whether it was greeted."""
        assert self._tool.command is not None
        key, state = await self._found(call)
        if state is None:
            env = texts(self._tool.env)
            await self._sandbox.start(key, self._tool.command, env=env, stdin_open=True, output_bytes=RING_BYTES)
        return key, await self._sandbox.wrote(key, INITIALIZED)

    async def _found(self, call: str | None) -> tuple[str, Result | Running | None]:
        number = 1
        while True:
            key = f"mcp/{self._tool.name}/{number}"
            state = await self._sandbox.lookup(key, output=False)
            if not isinstance(state, Result) or (call and await self._sandbox.wrote(key, call)):
                return key, state
            number += 1

    async def _end_it(self, key: str) -> None:
        """Kills its tree, and returns when the journal says so."""
        await self._sandbox.kill(key)
        while (said := await self._sandbox.read(key, await self._end(key))).result is None:
            assert said.data

    async def _end(self, key: str) -> int:
        return (await self._sandbox.read(key, None)).end

    async def _talk(self, work: Work[T], talk: Conversation) -> T:
        async with talk.streams() as (read, write), ClientSession(read, write, client_info=ABOUT_US) as session:
            fault = await self._greet(session, talk)
            value: T | McpFault = fault if fault is not None else await attempt(work, session, self._tool.timeout_s)
        if not isinstance(value, McpFault):
            return value
        if value.reason == "timeout":
            await self._end_it(talk.key)  # as a command at its time limit; the next call starts it anew
        elif value.reason == "server_ended":
            value = await self._why_it_ended(talk)
        raise value

    async def _greet(self, session: ClientSession, talk: Conversation) -> McpFault | None:
        async with self._greeting:
            if await self._sandbox.wrote(talk.key, INITIALIZED):
                session.adopt(InitializeResult.model_validate(self._handshake))
                return None

            async def greet(session: ClientSession) -> None:
                await session.initialize()

            said = await attempt(greet, session, self._tool.timeout_s)
            return said if isinstance(said, McpFault) else None

    async def _why_it_ended(self, talk: Conversation) -> McpFault:
        if isinstance(talk.failure, SandboxLost):
            raise talk.failure
        if talk.too_long:
            return McpFault("error", f"it says more than {RING_BYTES} bytes at once")
        if isinstance(talk.failure, SandboxBusy):
            return McpFault("error", "it does not read what it is told")
        state = await self._sandbox.lookup(talk.key)
        if not isinstance(state, Result):
            return McpFault("error", str(talk.failure or "the server closed the conversation"))
        words = state.output[-LAST_WORDS:].decode("utf-8", "replace").strip()
        return McpFault("server_ended", f"{words}\nthe server ended ({state.reason} {state.code})".strip())
