"""One connection of the controller: frames, their numbers, and the proof of who is there.

A frame is two big-endian uint32 (length of header and of body), a JSON header and raw bytes. Headers are numbered from
0 in each direction ("n"); a gap ends the connection. The agent speaks first, with a nonce; the controller answers with
HMAC-SHA256(token, "controller" + nonce) and a nonce of its own, and is answered with HMAC(token, "agent" + nonce). The
token itself never crosses the socket.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
from typing import Any

HEAD = struct.Struct(">II")
MAX_FRAME = 64 << 20
Json = dict[str, Any]


class Broken(Exception):
    """The peer does not speak our protocol, or is not who it must be."""


def proof(token: str, role: str, nonce: str) -> str:
    return hmac.new(token.encode(), (role + nonce).encode(), "sha256").hexdigest()


class Connection:
    """Non-blocking; the loop calls `receive` when readable and `flush` when writable."""

    def __init__(self, sock: socket.socket, token: str) -> None:
        self.sock = sock
        self.token = token
        self.known = False
        self.epoch = 0
        self.nonce = os.urandom(16).hex()
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.received = 0
        self.sent = 0
        self.frozen: list[int] = []
        self.freezing = False
        self.uploads: dict[str, tuple[int, int, str]] = {}  # path -> (file, directory, temporary name)
        sock.setblocking(False)
        self.send({"nonce": self.nonce})

    def send(self, header: Json, body: bytes = b"") -> None:
        text = json.dumps({**header, "n": self.sent}, separators=(",", ":")).encode()
        self.sent += 1
        self.outbox += HEAD.pack(len(text), len(body)) + text + body
        self.flush()

    def flush(self) -> None:
        while self.outbox:
            try:
                count = self.sock.send(memoryview(self.outbox)[: 1 << 18])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                raise Broken("the controller is gone") from None
            del self.outbox[:count]

    def receive(self) -> list[tuple[Json, bytes]]:
        """All whole frames that have arrived."""
        try:
            data = self.sock.recv(1 << 18)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            data = b""
        if not data:
            raise Broken("the controller is gone")
        self.inbox += data
        frames = []
        while len(self.inbox) >= HEAD.size:
            header_size, body_size = HEAD.unpack_from(self.inbox)
            end = HEAD.size + header_size + body_size
            if end > (MAX_FRAME if self.known else 4096):
                raise Broken("a frame is too large")
            if len(self.inbox) < end:
                break
            header = json.loads(bytes(self.inbox[HEAD.size : HEAD.size + header_size]))
            body = bytes(self.inbox[HEAD.size + header_size : end])
            del self.inbox[:end]
            if not isinstance(header, dict) or header.get("n") != self.received:
                raise Broken("a frame is missing, or is none of ours")
            self.received += 1
            frames.append((header, body))
        return frames

    def greet(self, header: Json) -> None:
        """Checks the controller's proof and gives ours."""
        given = str(header.get("proof", ""))
        if not hmac.compare_digest(given, proof(self.token, "controller", self.nonce)):
            raise Broken("the token is wrong")
        self.known = True
        self.send({"proof": proof(self.token, "agent", str(header.get("nonce", "")))})
