"""MCP over the standard input and output of a process in a sandbox, which outlives the node that speaks with it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import anyio
import mcp_types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage

from sandbox import Sandbox, SandboxError

RING_BYTES = 4 << 20  # of a server's output are kept; a longer message cannot be read
INITIALIZED = "initialized"
Message = mcp_types.JSONRPCMessage
Inward = MemoryObjectSendStream[SessionMessage | Exception]
FromServer = MemoryObjectReceiveStream[SessionMessage | Exception]


@dataclass
class Conversation:
    """One speaker's part of the talk with a server that others spoke with before.

    A request's id on the wire is `<speaker>/<id>`, so an answer to somebody else is nobody's here; a tool call's is
    `<speaker>/call`, which the agent takes once: whoever comes back under the same name finds the answer to the call
    that was made. `failure` is why the talk ended early.
    """

    sandbox: Sandbox
    key: str
    speaker: str
    offset: int
    failure: SandboxError | None = None
    too_long: bool = False
    ids: dict[str, mcp_types.RequestId] = field(default_factory=dict)
    asked: anyio.Event = field(default_factory=anyio.Event)

    @contextlib.asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[FromServer, MemoryObjectSendStream[SessionMessage]]]:
        inward, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, outward = anyio.create_memory_object_stream[SessionMessage](0)
        async with anyio.create_task_group() as group, inward, read, write, outward:
            group.start_soon(self._listen, inward)
            group.start_soon(self._speak, outward, inward)
            try:
                yield read, write
            finally:
                group.cancel_scope.cancel()

    # Outwards -------------------------------------------------------------------------------------------------------

    async def _speak(self, outward: MemoryObjectReceiveStream[SessionMessage], inward: Inward) -> None:
        try:
            async for each in outward:
                message = each.message
                once = self._name(message)
                line = message.model_dump_json(by_alias=True, exclude_unset=True)
                await self.sandbox.write(self.key, line.encode() + b"\n", once=once)
        except SandboxError as error:
            self.failure = error
            await inward.aclose()

    def _name(self, message: Message) -> str | None:
        """Puts the speaker's name into a message of ours, and says by which name it is to be taken once."""
        if isinstance(message, mcp_types.JSONRPCRequest):
            is_call = message.method == "tools/call"
            number = f"{self.speaker}/call" if is_call else f"{self.speaker}/{message.id}"
            self.ids[number] = message.id
            message.id = number
            self.asked.set()
            return number if is_call else None
        if isinstance(message, mcp_types.JSONRPCNotification):
            if message.method == "notifications/initialized":
                return INITIALIZED
            if message.method == "notifications/cancelled" and message.params is not None:
                known = {own: number for number, own in self.ids.items()}
                meant = known.get(message.params.get("requestId"))  # type: ignore[arg-type]
                message.params = {**message.params, "requestId": meant}
        return None

    # Inwards --------------------------------------------------------------------------------------------------------

    async def _listen(self, inward: Inward) -> None:
        try:
            async with inward:
                await self.asked.wait()  # an answer that is there already must find its question
                async for line in self._lines():
                    if (message := self._ours(line)) is not None:
                        await inward.send(SessionMessage(message))
        except SandboxError as error:
            self.failure = error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            pass  # the session has heard enough

    async def _lines(self) -> AsyncIterator[bytes]:
        """Whole lines from `offset` on, until the server ends or says what is too long to be kept."""
        rest = bytearray()
        begun = False  # where it begins may be long gone; after that nothing may be missed
        while True:
            said = await self.sandbox.read(self.key, self.offset)
            if said.offset > self.offset and begun:
                self.too_long = True
                return
            begun = True
            rest += said.data
            self.offset = said.offset + len(said.data)
            *lines, last = rest.split(b"\n")
            for line in lines:
                yield bytes(line)
            rest = bytearray(last)
            if len(rest) > RING_BYTES:
                self.too_long = True
                return
            if said.result is not None:
                return

    def _ours(self, line: bytes) -> Message | None:
        """What concerns this speaker; a line that is no message is a server's chatter."""
        try:
            message: Message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            return None
        if isinstance(message, mcp_types.JSONRPCResponse | mcp_types.JSONRPCError):
            if not isinstance(message.id, str) or message.id not in self.ids:
                return None
            message.id = self.ids[message.id]
        return message
