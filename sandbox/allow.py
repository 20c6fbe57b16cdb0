"""Lists of hosts that may be reached, as settings and sessions write them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

_ENTRY = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<host>[^:]+))(?::(?P<port>[0-9]{1,5}))?\Z")
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
        """Raises ValueError with what it may be: what is no port must not come to mean any port."""
        found = _ENTRY.match(text.strip().lower())
        if found is None:
            raise ValueError(USE)
        host, port = _address(found["address"]) or found["host"], int(found["port"] or 0)
        if not (found["address"] or _HOST.match(host)) or (found["port"] and not 0 < port < 65536):
            raise ValueError(USE)
        return cls(host, port or None)

    def matches(self, host: str, port: int) -> bool:
        below = self.host.startswith("*.") and host.endswith(self.host[1:]) and len(host) >= len(self.host)
        return (below or host == self.host) and self.port in (None, port)

    def lies_in(self, other: Entry) -> bool:
        """Whether `other` matches all that this one does."""
        below = other.host.startswith("*.") and self.host.endswith(other.host[1:])
        return (below or self.host == other.host) and other.port in (None, self.port)


def _address(text: str | None) -> str | None:
    try:
        return text and str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError(USE) from None


def parse_allow(text: str) -> tuple[Entry, ...]:
    """A list as a setting writes it. Raises ValueError."""
    return tuple(Entry.parse(part) for part in text.split(",") if part.strip())


def uncovered(wanted: Sequence[Entry], allowed: Sequence[Entry]) -> list[Entry]:
    """Those of `wanted` of which something lies outside of `allowed`."""
    return [entry for entry in wanted if not any(entry.lies_in(each) for each in allowed)]
