"""The only way out of a node: to hosts that the operator listed, at the address that was looked at."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import httpx2

from runtime.errors import TenutoError
from runtime.tools.allow import Entry

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# They carry an IPv4 address that somebody on the way unpacks.
_CARRIERS = [ipaddress.ip_network(each) for each in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")]


class EgressRefused(TenutoError):
    """The operator's list does not allow this; the message says what it would take."""


class TooMuch(httpx2.ReadError):
    """The answer is longer than we read."""


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
    """What the list allows. `lookup` is the name service; tests bring their own."""

    def __init__(self, allow: Sequence[Entry] = (), lookup: Resolve = resolve) -> None:
        self._allow = tuple(allow)
        self._lookup = lookup

    def check(self, url: str) -> None:
        """Raises EgressRefused for a host that is not listed; asks no name service."""
        self._listed(*place_of(httpx2.URL(url)))

    def _listed(self, host: str, port: int) -> None:
        if not any(entry.matches(host, port) for entry in self._allow):
            raise EgressRefused(f"{Entry(host, port)} is not in the list of hosts that may be reached"
                                " (TENUTO_EGRESS_ALLOW)")  # fmt: skip

    async def addresses(self, host: str, port: int) -> list[str]:
        """Where a connection to a host may go. Raises EgressRefused; OSError where the name is not known."""
        self._listed(host, port)
        found = await self._lookup(host, port)
        if Entry(host, port) in self._allow:
            return list(found)
        public = [each for each in found if is_public(ipaddress.ip_address(each.partition("%")[0]))]
        if not public:
            raise EgressRefused(
                f"{host} has no public address; list it as {Entry(host, port)} to reach it all the same"
            )
        return public


def place_of(url: httpx2.URL) -> tuple[str, int]:
    """Host (as the name service knows it) and port."""
    return url.raw_host.decode("ascii").strip("[]").lower(), url.port or (443 if url.scheme == "https" else 80)


class GuardedTransport(httpx2.AsyncBaseTransport):
    """Connects to the address that the list was asked about, never to one that is looked up again.

    Every request has its own connection, so none is shared by two names that have one address. Reading more than
    `limit_bytes` of an answer raises TooMuch.
    """

    def __init__(self, egress: Egress, limit_bytes: int) -> None:
        self._egress = egress
        self._limit_bytes = limit_bytes
        self._inner = httpx2.AsyncHTTPTransport(trust_env=False, limits=httpx2.Limits(max_keepalive_connections=0))

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.scheme not in ("http", "https"):
            raise EgressRefused(f"{request.url.scheme}: is no scheme that may be used")
        host, port = place_of(request.url)
        try:
            addresses = await self._egress.addresses(host, port)
        except OSError as error:
            raise httpx2.ConnectError(f"{host}: {error.strerror or error}", request=request) from None
        failure: httpx2.TransportError | None = None
        for address in addresses:
            try:
                response = await self._inner.handle_async_request(_pinned(request, address))
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                failure = error
            else:
                assert isinstance(response.stream, httpx2.AsyncByteStream)
                response.stream = _Bounded(response.stream, self._limit_bytes)
                return response
        raise failure or httpx2.ConnectError(f"{host} has no address", request=request)

    async def aclose(self) -> None:
        await self._inner.aclose()


def _pinned(request: httpx2.Request, address: str) -> httpx2.Request:
    """The same request to an address; its Host header is there already, and TLS still asks for the name."""
    extensions = {**request.extensions, "sni_hostname": place_of(request.url)[0]}
    url = request.url.copy_with(host=address)
    return httpx2.Request(request.method, url, headers=request.headers, stream=request.stream, extensions=extensions)


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, limit_bytes: int) -> None:
        self._inner = inner
        self._limit_bytes = limit_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        seen = 0
        async for piece in self._inner:
            seen += len(piece)
            if seen > self._limit_bytes:
                raise TooMuch(f"the answer is longer than {self._limit_bytes} bytes")
            yield piece

    async def aclose(self) -> None:
        await self._inner.aclose()


def client(egress: Egress, headers: dict[str, str], timeout_s: float, limit_bytes: int) -> httpx2.AsyncClient:
    """No proxies, no redirects by itself, nothing from the environment."""
    return httpx2.AsyncClient(
        transport=GuardedTransport(egress, limit_bytes),
        headers=headers,
        timeout=httpx2.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
        trust_env=False,
    )
