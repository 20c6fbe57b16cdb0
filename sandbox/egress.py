"""Which hosts may be reached, and at which addresses: one set of rules for all that leaves a node.

A name is looked up only if it is listed, so asking for one carries nothing out; who connects must do so to an address
that was given here, never to one that is looked up again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from .allow import Entry
from .errors import EgressRefused

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# They carry an IPv4 address that somebody on the way unpacks.
_CARRIERS = [ipaddress.ip_network(each) for each in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")]


@dataclass(frozen=True)
class Denial:
    """Something that a tool wanted to reach and may not. `at`: seconds since 1970."""

    host: str
    port: int
    reason: str
    at: float


async def resolve(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def is_public(address: Address) -> bool:
    """Anybody's, not this machine's or its network's."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in carrier for carrier in _CARRIERS):
            return False
    return address.is_global and not address.is_multicast


class Egress:
    """What the lists allow. `lookup` is the name service; tests bring their own.

    `allow` is what is asked for; with `within`, the operator's list, a host must be in both, and only `within` opens an
    address that is not public. `named` and `within_named` say in refusals where the lists stand.
    """

    def __init__(
        self,
        allow: Sequence[Entry] = (),
        lookup: Resolve = resolve,
        *,
        named: str = "TENUTO_EGRESS_ALLOW",
        within: Sequence[Entry] | None = None,
        within_named: str = "TENUTO_SANDBOX_EGRESS_ALLOW",
    ) -> None:
        self._lists = [(tuple(allow), named)]
        if within is not None:
            self._lists.append((tuple(within), within_named))
        self._lookup = lookup

    def check_place(self, host: str, port: int) -> None:
        """Raises EgressRefused for a host that is not listed; asks no name service."""
        for entries, named in self._lists:
            if not any(entry.matches(host, port) for entry in entries):
                raise EgressRefused(f"{Entry(host, port)} is not in the list of hosts that may be reached ({named})")

    async def addresses(self, host: str, port: int) -> list[str]:
        """Where a connection to a host may go. Raises EgressRefused; OSError where the name is not known."""
        self.check_place(host, port)
        found = await self._lookup(host, port)
        entries, named = self._lists[-1]
        if Entry(host, port) in entries:
            return list(found)
        public = [each for each in found if is_public(ipaddress.ip_address(each.partition("%")[0]))]
        if not public:
            raise EgressRefused(
                f"{host} has no public address; list it as {Entry(host, port)} in {named} to reach it all the same"
            )
        return public
