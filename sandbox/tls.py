"""The name that a TLS client asks for, read from its first record (RFC 8446 4.1.2, RFC 6066 3)."""

from __future__ import annotations

import struct

HANDSHAKE, CLIENT_HELLO, SERVER_NAME = 22, 1, 0


class NotTls(ValueError):
    """These bytes are no ClientHello."""


def record_bytes(head: bytes) -> int:
    """How long the body of the first record is, from its 5 bytes. Raises NotTls."""
    kind, major, _, size = struct.unpack(">BBBH", head)
    if kind != HANDSHAKE or major != 3 or not 0 < size <= 1 << 14:
        raise NotTls
    return int(size)


def server_name(body: bytes) -> str | None:
    """The server name in a ClientHello that lies in one record; None where it names none. Raises NotTls."""
    try:
        if body[0] != CLIENT_HELLO or int.from_bytes(body[1:4]) + 4 > len(body):
            raise NotTls
        at = 4 + 2 + 32  # after the version and the random bytes
        at += 1 + body[at]  # session id
        at += 2 + int.from_bytes(body[at : at + 2])  # cipher suites
        at += 1 + body[at]  # compression
        end = at + 2 + int.from_bytes(body[at : at + 2])
        at += 2
        while at < end:
            kind, size = struct.unpack_from(">HH", body, at)
            if kind == SERVER_NAME:
                length = int.from_bytes(body[at + 7 : at + 9])
                return body[at + 9 : at + 9 + length].decode("ascii").lower()
            at += 4 + size
    except (IndexError, struct.error, UnicodeDecodeError):
        raise NotTls from None
    return None
