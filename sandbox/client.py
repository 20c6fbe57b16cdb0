"""The controller's side of an agent: one channel, many calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .errors import (
    BadPath,
    FileMissing,
    KeyConflict,
    OperationFailed,
    SandboxBusy,
    SandboxError,
    SandboxLost,
    SandboxUsageError,
    StaleEpoch,
)
from .link import Frame, Link
from .spec import Chunk, Handle, Result, Said

REPLY_S = 60.0
GRACE_S = 15.0
LEAST_SECRET = 4  # characters; shorter values would blot out ordinary text
ERRORS: dict[str, type[SandboxError]] = {
    "epoch": StaleEpoch,
    "conflict": KeyConflict,
    "path": BadPath,
    "missing": FileMissing,
    "busy": SandboxBusy,
    "os": OperationFailed,
    "request": SandboxUsageError,
}
SPEAKS = 2  # the agent's protocol; see `sandbox.earlier`
NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})
BASE_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/work",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}


def raise_refusal(header: Mapping[str, Any]) -> None:
    if "error" in header:
        raise ERRORS.get(header["error"], OperationFailed)(header["message"])


async def open_link(handle: Handle) -> Link:
    """Raises SandboxLost."""
    return await Link.open(Path(handle.socket), handle.token, handle.pid if handle.driver == "docker" else None)


class Channel:
    """A link that is opened again when it breaks while the agent lives."""

    def __init__(self, handle: Handle, epoch: int) -> None:
        self.handle = handle
        self.epoch = epoch
        self.speaks = SPEAKS
        self.link: Link | None = None
        self.lock = asyncio.Lock()
        self.closed = False
        self.following: set[asyncio.Task[Result]] = set()

    async def connected(self) -> Link:
        async with self.lock:
            if self.closed:
                raise SandboxUsageError("this connection was closed; attach again, and start the same key again")
            if self.link is None or self.link.over:
                if self.link is not None:
                    await self.link.close()
                self.link = await open_link(self.handle)
            return self.link

    async def request(self, op: str, body: bytes = b"", *, reply_s: float | None = REPLY_S, **fields: Any) -> Frame:
        """One request, one reply. Raises what the agent refused with, or SandboxLost."""
        link = await self.connected()
        number, queue = link.ask({"op": op, "epoch": self.epoch, **fields}, body)
        try:
            async with asyncio.timeout(reply_s):
                frame = await queue.get()
        except TimeoutError:
            raise SandboxLost(f"the agent did not answer {op!r} within {reply_s:.0f} s") from None
        finally:
            link.forget(number)
        if frame is None:
            raise SandboxLost(f"the agent went away during {op!r}")
        raise_refusal(frame[0])
        return frame

    async def close(self) -> None:
        self.closed = True
        async with self.lock:
            if self.link is not None:
                await self.link.close()
                self.link = None
        await asyncio.gather(*self.following, return_exceptions=True)


class Call:
    """A call in flight, or one from the journal. Iterate for its chunks, await `result()` for its end.

    Both may be done at once, in any order, and each only once by one reader. Losing the connection is not losing the
    call: it is found again by its key and continued after the bytes already seen.
    """

    def __init__(self, channel: Channel, key: str, request: Mapping[str, Any], stdin: bytes) -> None:
        self.key = key
        self._channel = channel
        self._request = request
        self._stdin = stdin
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._output = bytearray()
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._follow())
        channel.following.add(self._task)
        self._task.add_done_callback(self._settle)

    def _settle(self, task: asyncio.Task[Result]) -> None:
        self._channel.following.discard(task)
        self._chunks.put_nowait(None)
        if not self._begun.done():
            self._begun.set_result(None)
        if not task.cancelled():
            task.exception()  # seen; `result()` raises it again for whoever asks

    async def begun(self) -> None:
        """Returns when the agent has taken the call; raises what it refused with."""
        await self._begun
        if self._task.done() and not self._task.cancelled():
            error = self._task.exception()
            if error is not None:
                raise error

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
        self._chunks.put_nowait(None)

    async def result(self) -> Result:
        """Reason "lost" where the agent is gone or did not end the call by its deadline."""
        return await asyncio.shield(self._task)

    async def kill(self) -> None:
        """Kills the call's whole tree; its result then says "signal"."""
        await self._channel.request("kill", key=self.key)

    async def aclose(self) -> None:
        """Stops following; the call itself goes on."""
        self._task.cancel()
        with suppress(asyncio.CancelledError, SandboxError):
            await self._task

    async def _follow(self) -> Result:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        timeout_s = self._request["timeout_s"]
        with suppress(SandboxLost):
            while True:
                try:
                    async with asyncio.timeout(None if timeout_s is None else float(timeout_s) + GRACE_S):
                        for _ in range(3):
                            result = await self._follow_once()
                            if result is not None:
                                return result
                        break
                except TimeoutError:
                    if not await self._is_paused():
                        break
        return Result("lost", None, 0, 0, True, loop.time() - begin, bytes(self._output))

    async def _is_paused(self) -> bool:
        """Then its deadline is later than we thought."""
        header, _ = await self._channel.request("lookup", key=self.key, output=False)
        return bool(header.get("paused"))

    async def _follow_once(self) -> Result | None:
        link = await self._channel.connected()
        number, queue = link.ask({**self._request, "offset": len(self._output)}, self._stdin)
        try:
            while (frame := await queue.get()) is not None:
                header, body = frame
                raise_refusal(header)
                if not self._begun.done():
                    self._begun.set_result(None)
                if "result" in header:
                    return Result(**header["result"], output=bytes(self._output))
                if body:
                    self._output += body
                    self._chunks.put_nowait(Chunk(header["stream"], body))
            return None
        finally:
            link.forget(number)


async def said(channel: Channel, key: str, offset: int | None) -> Said:
    """See `Sandbox.read`. Asking again costs nothing, so a connection that breaks does not end it."""
    for _ in range(2):
        with suppress(SandboxLost):
            return _said(*await channel.request("output", reply_s=None, key=key, offset=offset))
    return _said(*await channel.request("output", reply_s=None, key=key, offset=offset))


def _said(header: Mapping[str, Any], body: bytes) -> Said:
    result = header["result"]
    return Said(header["offset"], header["end"], body, None if result is None else Result(**result))


def check_size(rows: int, columns: int) -> None:
    if not all(type(each) is int and 0 < each < 1 << 16 for each in (rows, columns)):
        raise SandboxUsageError(f"a terminal has from 1 to 65535 rows and columns, not {rows!r} and {columns!r}")


def start_request(
    key: str,
    argv: Sequence[str],
    epoch: int,
    env: Mapping[str, str],
    cwd: str,
    timeout_s: float | None,
    output_bytes: int,
    secrets: Mapping[str, str],
) -> dict[str, Any]:
    if not argv or not argv[0] or not all(isinstance(word, str) for word in argv) or any("\0" in word for word in argv):
        raise SandboxUsageError("argv must be a list of one or more strings without NUL, the first of them not empty")
    for name, value in secrets.items():
        if len(value.strip()) < LEAST_SECRET:
            raise SandboxUsageError(
                f"the secret {name!r} is shorter than {LEAST_SECRET} characters: it cannot be masked"
            )
    if any("=" in name or "\0" in name + value for name, value in {**env, **secrets}.items()):
        raise SandboxUsageError("the environment has a name with '=' or a NUL in it")
    return {
        "op": "start",
        "key": key,
        "argv": list(argv),
        "env": {**BASE_ENVIRONMENT, **env},
        "cwd": cwd,
        "epoch": epoch,
        "timeout_s": timeout_s,
        "output_bytes": output_bytes,
        "secrets": dict(secrets),
    }
