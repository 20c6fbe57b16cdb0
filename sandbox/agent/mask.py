"""Secrets of a call, kept out of what it prints: as they are and in base64, also where they come in two pieces."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator

HIDDEN = b"***"
LEAST_BASE64 = 8  # shorter pieces would blot out ordinary words


class Mask:
    """One stream. What may be the beginning of a secret is held back until more is read, or `rest` is asked for."""

    def __init__(self, secrets: Iterable[str]) -> None:
        needles = {needle for secret in secrets for needle in forms(secret)}
        self.needles = sorted(needles, key=len, reverse=True)
        self.pattern = re.compile(b"|".join(map(re.escape, self.needles)))
        self.first = {needle[0] for needle in needles}
        self.held = b""

    def read(self, data: bytes) -> bytes:
        data = self.held + data
        out, at, hold = [], 0, self._hold(data, 0)
        for found in self.pattern.finditer(data):
            if found.start() >= hold:
                break
            out += [data[at : found.start()], HIDDEN]
            at = found.end()
            hold = self._hold(data, at) if hold < at else hold
        self.held = data[hold:]
        return b"".join([*out, data[at:hold]])

    def rest(self) -> bytes:
        held, self.held = self.held, b""
        return self.whole(held)

    def whole(self, data: bytes) -> bytes:
        return self.pattern.sub(HIDDEN, data)

    def _hold(self, data: bytes, least: int) -> int:
        """Where the first end of `data` begins that is the beginning of a secret, and not all of it."""
        for at in range(max(least, len(data) - len(self.needles[0]) + 1), len(data)):
            if data[at] in self.first:
                end = data[at:]
                if any(len(end) < len(needle) and needle.startswith(end) for needle in self.needles):
                    return at
        return len(data)


def forms(secret: str) -> Iterator[bytes]:
    """The secret, with the line ends that a terminal makes of its own, and as base64 has it anywhere in a text."""
    plain = secret.encode("utf-8", "surrogateescape").strip()
    yield plain
    if b"\n" in plain:
        yield plain.replace(b"\n", b"\r\n")
    for shift in range(3):
        text = base64.b64encode(bytes(shift) + plain)
        # Characters that also carry bits of a neighbour are not the secret's alone.
        inner = text[(0, 2, 3)[shift] : (len(plain) + shift) * 8 // 6]
        if len(inner) >= LEAST_BASE64:
            yield inner
            yield inner.translate(bytes.maketrans(b"+/", b"-_"))
