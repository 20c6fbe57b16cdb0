"""Lists of hosts that may be reached, as settings and sessions write them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

_HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\Z")
USE = "use host, host:port, *.domain or *.domain:port, separated by commas; [address]:port for IPv6"


@dataclass(frozen=True)
class Entry:
    """One line of the list. `host` is lower case, with `*.` for all names below a domain; no port means any."""

    host: str
    port: int | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Self:
        host, port = text.strip().lower(), ""
        if found := re.fullmatch(r"\[([0-9a-f:.]+)\](?::(\d{1,5}))?", host):
            host, port = str(ipaddress.ip_address(found[1])), found[2] or ""
        elif ":" in host:
            host, _, port = host.partition(":")
        if (":" not in host and not _HOST.match(host)) or (port and not 0 < int(port) < 65536):
            raise ValueError(USE)
        return cls(host, int(port) if port else None)

    def matches(self, host: str, port: int) -> bool:
        below = self.host.startswith("*.") and host.endswith(self.host[1:]) and len(host) >= len(self.host)
        return (below or host == self.host) and self.port in (None, port)

    def lies_in(self, other: Entry) -> bool:
        """Whether `other` matches all that this one does."""
        below = other.host.startswith("*.") and self.host.endswith(other.host[1:])
        return (below or self.host == other.host) and other.port in (None, self.port)


def parse_allow(text: str) -> tuple[Entry, ...]:
    """A list as a setting writes it. Raises ValueError."""
    try:
        return tuple(Entry.parse(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(USE) from None


def uncovered(wanted: Sequence[Entry], allowed: Sequence[Entry]) -> list[Entry]:
    """Those of `wanted` of which something lies outside of `allowed`."""
    return [entry for entry in wanted if not any(entry.lies_in(each) for each in allowed)]
