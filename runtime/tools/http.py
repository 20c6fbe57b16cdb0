"""A call that is one HTTP request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx2

from runtime.tools.egress import Egress, client
from runtime.tools.kinds import PLACEHOLDER, HttpTool, texts
from runtime.tools.outcome import Outcome, capped
from sandbox import BadArguments, EgressRefused

MAX_REDIRECTS = 5
IN_THE_QUERY = ("GET", "HEAD", "DELETE")
MORE_BYTES = 4 << 20  # on the wire, beyond what is kept: the last piece, and the answers that redirect


def effect_of(tool: HttpTool) -> str:
    return tool.effect or ("idempotent" if tool.method in ("GET", "HEAD") else "unsafe")


async def request(egress: Egress, tool: HttpTool, arguments: Mapping[str, Any], key: str, limit_bytes: int) -> Outcome:
    """Makes the request. Raises BadArguments; all else that can go wrong is an outcome."""
    headers = {"Accept-Encoding": "identity", **texts(tool.headers)}
    if effect_of(tool) == "idempotent":
        headers["Idempotency-Key"] = key
    url, rest = filled(tool.url, arguments)
    async with client(egress, headers, tool.timeout_s, limit_bytes + MORE_BYTES) as http:
        asked = _request(http, tool.method, url, rest)
        try:
            return await _followed(http, asked, tool, limit_bytes)
        except EgressRefused as refused:
            return Outcome.refused(str(refused))
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            return Outcome("unreachable", None, str(error).encode())
        except httpx2.TimeoutException:
            return Outcome("timeout", None, b"no whole answer came in time; the request may have taken effect")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            return Outcome("no_answer", None, f"{type(error).__name__}: {error}".encode())


def filled(url: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The URL with its placeholders filled, and the arguments that are left. Raises BadArguments."""
    rest = dict(arguments)
    values = {}
    for name in PLACEHOLDER.findall(url):
        if name not in arguments:
            raise BadArguments(f"the argument {name!r} is missing")
        rest.pop(name, None)
        values[name] = _as_word(arguments[name])
        if values[name] in ("", ".", ".."):
            raise BadArguments(f"{name!r} must not be {values[name]!r}: it would name another address")
    return PLACEHOLDER.sub(lambda found: quote(values[found[1]], safe=""), url), rest


def _as_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _request(http: httpx2.AsyncClient, method: str, url: str, rest: dict[str, Any]) -> httpx2.Request:
    if method not in IN_THE_QUERY:
        return http.build_request(method, url, json=rest)
    at = httpx2.URL(url)
    more = {name: _as_word(value) for name, value in rest.items()}
    return http.build_request(method, at.copy_merge_params(more) if more else at)


async def _followed(http: httpx2.AsyncClient, asked: httpx2.Request, tool: HttpTool, limit_bytes: int) -> Outcome:
    """The answer at the end of the redirects; each hop is asked about anew, and what was meant for one host is not
    told to another."""
    for _ in range(MAX_REDIRECTS + 1):
        response = await http.send(asked, stream=True, follow_redirects=False)
        try:
            if response.next_request is None:
                return await _read(response, limit_bytes)
        finally:
            await response.aclose()
        onwards = response.next_request
        if _origin(onwards.url) != _origin(asked.url):
            for name in tool.headers:
                onwards.headers.pop(name, None)
        asked = onwards
    return Outcome("no_answer", None, f"redirected more than {MAX_REDIRECTS} times".encode())


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


async def _read(response: httpx2.Response, limit_bytes: int) -> Outcome:
    """The status and the body, which is read no further than it is kept."""
    body = bytearray()
    try:
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > limit_bytes:
                break
    except httpx2.DecodingError as error:
        return Outcome("no_answer", None, f"the answer cannot be decoded: {error}".encode())
    length = response.headers.get("content-length", "")
    output, truncated = capped(bytes(body), limit_bytes, int(length) if length.isdecimal() else None)
    facts = {"content_type": response.headers.get("content-type", "")[:200]}
    return Outcome("http", response.status_code, output, truncated, facts)
