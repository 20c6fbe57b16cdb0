"""What a tool asks of the proxy: the head of a request, read strictly, and what is answered where it may not go on.

Only two forms are known: `CONNECT host:port`, and a request for an absolute http:// address. The second is passed on
alone: with `Connection: close` and exactly its body, so that nothing after it can be a request to somebody else.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_HEAD = 32 << 10
_LINE = re.compile(rb"([A-Z]{1,32}) ([\x21-\x7e]+) (HTTP/1\.[01])\Z")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)\Z")
_HOST = re.compile(r"[a-z0-9_.-]{1,253}\Z")
_HOP = frozenset({b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"host"})
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


class Answered(Exception):
    """The request goes no further; the tool is given a status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status

    def as_bytes(self) -> bytes:
        """The sentence is the reason too: of a refused CONNECT, most clients show only that."""
        text = str(self).encode("ascii", "replace").replace(b"\r", b" ").replace(b"\n", b" ")
        head = f"Content-Type: text/plain\r\nContent-Length: {len(text) + 1}\r\nConnection: close\r\n\r\n".encode()
        return b"HTTP/1.1 %d %b\r\n" % (self.status, text) + head + text + b"\n"


@dataclass(frozen=True)
class Asked:
    """Where a tool wants to go. `head` is what to send there first, `body_bytes` what may follow; None: a tunnel."""

    host: str
    port: int
    head: bytes = b""
    body_bytes: int | None = None


def parse(head: bytes) -> Asked:
    """`head` ends with an empty line. Raises Answered."""
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    found = _LINE.match(first)
    if found is None:
        raise Answered(400, "this is a proxy: it takes CONNECT host:port and requests for http:// addresses")
    method, target, version = found.groups()
    fields = [_field(line) for line in lines]
    if method == b"CONNECT":
        return Asked(*_place(target.decode(), None))
    return _plain(method, target.decode(), version, fields)


def _field(line: bytes) -> tuple[bytes, bytes]:
    found = _FIELD.match(line)
    if found is None:
        raise Answered(400, "a header line of the request is malformed")
    return found[1], found[2].rstrip(b" \t")


def _place(authority: str, default: int | None) -> tuple[str, int]:
    host, colon, port = authority.rpartition(":")
    if authority.endswith("]") or (not colon and default is not None):
        host, port = authority, str(default or "")
    host = host.lower()
    try:
        if host.startswith("[") and host.endswith("]"):
            host = str(ipaddress.IPv6Address(host[1:-1]))
        elif not _HOST.match(host):
            raise ValueError(host)
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(port)
    except ValueError:
        raise Answered(400, "the address must be host:port, with an IPv6 host in brackets") from None
    return host, int(port)


def _plain(method: bytes, target: str, version: bytes, fields: list[tuple[bytes, bytes]]) -> Asked:
    try:
        url = urlsplit(target)
    except ValueError:
        raise Answered(400, "the address of the request is malformed") from None
    if url.scheme.lower() != "http" or not url.netloc or "@" in url.netloc:
        raise Answered(400, "only http:// addresses can be asked for, without a user in them; use CONNECT for others")
    host, port = _place(url.netloc, 80)
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    size = _body_bytes(fields)
    lines = [b"%b %b %b" % (method, path.encode(), version), b"Host: " + url.netloc.encode()]
    lines += [b"%b: %b" % field for field in _end_to_end(fields)]
    return Asked(host, port, b"\r\n".join([*lines, b"Connection: close", b"", b""]), size)


def _end_to_end(fields: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """What is meant for the server; the length of the body always is, whatever the request calls it."""
    named = b",".join(value for key, value in fields if key.lower() == b"connection").lower().split(b",")
    dropped = (_HOP | {name.strip() for name in named}) - {b"content-length"}
    return [each for each in fields if (key := each[0].lower()) not in dropped and not key.startswith(b"proxy-")]


def _body_bytes(fields: list[tuple[bytes, bytes]]) -> int:
    """One length that everybody reads alike; what leaves it open could hide another request."""
    if any(key.lower() == b"transfer-encoding" for key, _ in fields):
        raise Answered(411, "a request in chunks is not passed on; send it with a Content-Length, or use https")
    sizes = [value for key, value in fields if key.lower() == b"content-length"]
    if len(sizes) > 1 or any(not re.fullmatch(rb"\d{1,15}", size) for size in sizes):
        raise Answered(400, "the Content-Length of the request is malformed")
    return int(sizes.pop()) if sizes else 0
