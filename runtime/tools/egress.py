"""The only way out of a node: to hosts that the operator listed, at the address that was looked at."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2

from sandbox.egress import Egress as Rules
from sandbox.errors import EgressRefused


class TooMuch(httpx2.ReadError):
    """The answer is longer than we read."""


class Egress(Rules):
    """What the operator's list allows to tools that leave the node."""

    def check(self, url: str) -> None:
        """Raises EgressRefused for a host that is not listed; asks no name service."""
        self.check_place(*place_of(httpx2.URL(url)))


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
