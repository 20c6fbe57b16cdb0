"""One connection to an agent: frames, numbers and proofs, as `sandbox.agent.wire` describes them."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import SandboxLost

HEAD = struct.Struct(">II")
Frame = tuple[dict[str, Any], bytes]


def proof(token: str, role: str, nonce: str) -> str:
    return hmac.new(token.encode(), (role + nonce).encode(), "sha256").hexdigest()


def unix_connect(path: Path) -> socket.socket | None:
    """Connects however long the path is: through the folder's descriptor, since an address holds 107 bytes.

    None where the listener is too busy to take one more; raises OSError where nobody listens.
    """
    sock = socket.socket(socket.AF_UNIX)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        sock.setblocking(False)
        sock.connect(f"/proc/self/fd/{folder}/{path.name}")
    except BlockingIOError:
        sock.close()
        return None
    except OSError:
        sock.close()
        raise
    finally:
        os.close(folder)
    return sock


def peer_pid(sock: socket.socket) -> int:
    """Who called listen() at the other end."""
    return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


class Link:
    """Frames over one socket. Replies are sorted by the id of their request; when it ends, all waiters are told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.sent = 0
        self.received = 0
        self.last_id = 0
        self.waiting: dict[int, asyncio.Queue[Frame | None]] = {}
        self.ended = False
        self.task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, path: Path, token: str, listener: int | None = None, deadline_s: float = 10.0) -> Link:
        """Raises SandboxLost where nobody listens or the other side cannot prove that it is our agent.

        `listener` is the pid that must have made the socket, where tools could put another in its place.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while (sock := unix_connect(path)) is None:
                    await asyncio.sleep(0.01)
                if listener is not None and peer_pid(sock) != listener:
                    sock.close()
                    raise SandboxLost("the sandbox's socket was replaced by something that is not its agent")
                link = cls(*await asyncio.open_unix_connection(sock=sock))
                try:
                    await link._greet(token)
                except BaseException:
                    await link.close()
                    raise
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise SandboxLost(f"no agent answers at {path}: {type(error).__name__} {error}".rstrip()) from None
        link.task = asyncio.create_task(link._receive_all())
        return link

    async def _greet(self, token: str) -> None:
        hello, _ = await self._read()
        nonce = os.urandom(16).hex()
        self._write({"proof": proof(token, "controller", hello["nonce"]), "nonce": nonce})
        answer, _ = await self._read()
        if not hmac.compare_digest(str(answer.get("proof", "")), proof(token, "agent", nonce)):
            raise SandboxLost("what listens on the sandbox's socket is not its agent")

    def _write(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        text = json.dumps({**header, "n": self.sent}, separators=(",", ":")).encode()
        self.sent += 1
        self.writer.write(HEAD.pack(len(text), len(body)) + text + body)

    async def _read(self) -> Frame:
        sizes = HEAD.unpack(await self.reader.readexactly(HEAD.size))
        header = json.loads(await self.reader.readexactly(sizes[0]))
        body = await self.reader.readexactly(sizes[1])
        if not isinstance(header, dict) or header.get("n") != self.received:
            raise ConnectionError("a frame is missing")
        self.received += 1
        return header, body

    async def _receive_all(self) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            while True:
                frame = await self._read()
                queue = self.waiting.get(frame[0].get("id", -1))
                if queue is not None:
                    queue.put_nowait(frame)
        self.ended = True
        for queue in self.waiting.values():
            queue.put_nowait(None)

    @property
    def over(self) -> bool:
        return self.ended or self.writer.is_closing()

    def ask(self, header: Mapping[str, Any], body: bytes = b"") -> tuple[int, asyncio.Queue[Frame | None]]:
        """Sends a request; its replies come in the queue, and None when the connection ends. `forget` the id after."""
        self.last_id += 1
        queue: asyncio.Queue[Frame | None] = asyncio.Queue()
        if self.over:
            queue.put_nowait(None)
        else:
            self.waiting[self.last_id] = queue
            self._write({**header, "id": self.last_id}, body)
        return self.last_id, queue

    def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Something that is not answered; lost where the connection is over."""
        if not self.over:
            self._write(header, body)

    def forget(self, number: int) -> None:
        self.waiting.pop(number, None)

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            with suppress(asyncio.CancelledError):
                await self.task
        self.ended = True
        for queue in self.waiting.values():
            queue.put_nowait(None)
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()
