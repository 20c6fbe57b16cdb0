"""What a hostile tool says to the proxy, and where it may get to. The agent is real; the names are the tests'."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from sandbox import Egress, Handle, gate
from sandbox.allow import parse_allow
from sandbox.link import Link
from tests.sandbox.outside import Outside, Proxy, echo, serving


@pytest.mark.parametrize(
    "place",
    [
        "169.254.169.254:80", "metadata.google.internal:80", "127.0.0.1:{port}", "localhost:{port}", "api.test:1",
        "[::1]:{port}", "[::ffff:127.0.0.1]:{port}", "[::ffff:7f00:1]:{port}", "[fe80::1%25lo]:{port}",
        "2130706433:{port}", "0x7f000001:{port}", "0177.0.0.1:{port}", "127.1:{port}", "0:{port}", "api.test.:{port}",
        "api.test@127.0.0.1:{port}", "127.0.0.1:{port}#api.test", "api.test\\.127.0.0.1:{port}", "xapi.test:{port}",
        "api.test:{port}:80", "api.test", ":{port}", "api.test:0", "api.test:+80",
    ],
)  # fmt: skip
async def test_no_other_way_of_writing_an_address_is_let_through(proxy: Proxy, place: str) -> None:
    async with serving() as outside:
        await proxy.open(outside.egress())
        place = place.format(port=outside.port)
        for request in (f"CONNECT {place} HTTP/1.1\r\n\r\n", f"GET http://{place}/ HTTP/1.1\r\n\r\n"):
            answer = await proxy.say(request.encode())
            if request == "GET http://api.test/ HTTP/1.1\r\n\r\n":
                assert answer.startswith(b"HTTP/1.1 403 api.test:80 ")
            assert answer.startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 400 ")), answer
        assert not outside.begun.is_set()


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
                "::1", "::ffff:127.0.0.1", "fe80::1", "fd00::1", "64:ff9b::7f00:1", "2002:7f00:1::"],
)  # fmt: skip
@pytest.mark.parametrize("allow", ["inner.test", "*.test", "127.0.0.1"])
async def test_a_listed_name_with_an_address_that_is_not_public_is_refused(
    proxy: Proxy, address: str, allow: str
) -> None:
    async def lookup(host: str, port: int) -> Sequence[str]:
        return [address]

    host = allow.replace("*", "inner")
    await proxy.open(Egress(parse_allow(allow), lookup))
    answer = await proxy.say(f"CONNECT {host}:80 HTTP/1.1\r\n\r\n".encode())
    assert answer.startswith(f"HTTP/1.1 403 {host} has no public address".encode())
    assert [(each.host, each.port) for each in proxy.denied] == [(host, 80)]


async def test_only_the_operators_list_opens_an_address_that_is_not_public(proxy: Proxy) -> None:
    async with serving() as outside:

        async def lookup(host: str, port: int) -> Sequence[str]:
            return ["127.0.0.1"]

        wanted = parse_allow(f"api.test:{outside.port}")
        request = f"GET http://api.test:{outside.port}/ HTTP/1.1\r\n\r\n".encode()
        await proxy.open(Egress(wanted, lookup, within=parse_allow("*.test")))
        assert b"403 api.test has no public address; list it as" in await proxy.say(request)
        await proxy.open(Egress(wanted, lookup, within=parse_allow("other.test")))
        assert b"(TENUTO_SANDBOX_EGRESS_ALLOW)" in await proxy.say(request)
        await proxy.open(Egress(wanted, lookup, within=wanted))
        assert b"hello" in await proxy.say(request)


async def test_a_name_is_looked_up_once_and_only_if_it_is_listed(proxy: Proxy) -> None:
    async with serving() as outside, serving() as inner:
        asked: list[str] = []

        async def lookup(host: str, port: int) -> Sequence[str]:
            asked.append(host)
            return ["127.0.0.1"] if asked.count(host) == 1 else ["127.0.0.2"]

        await proxy.open(Egress(parse_allow(f"api.test:{outside.port}"), lookup))
        assert b"hello" in await proxy.say(f"GET http://api.test:{outside.port}/ HTTP/1.1\r\n\r\n".encode())
        assert b" 403 " in await proxy.say(b"CONNECT c2VjcmV0.evil.test:443 HTTP/1.1\r\n\r\n")
        assert asked == ["api.test"]
        assert not inner.begun.is_set()


async def test_what_comes_after_a_request_reaches_nobody(proxy: Proxy) -> None:
    async with serving() as outside, serving() as other:
        await proxy.open(outside.egress(f"other.test:{other.port}", other_test=["127.0.0.1"]))
        there, port = f"http://other.test:{other.port}/", outside.port
        second = f"GET {there} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        for length in ("", "Content-Length: 3\r\n"):
            body = b"abc" if length else b""
            first = f"POST http://api.test:{port}/ HTTP/1.1\r\nHost: other.test\r\n{length}Connection: keep-alive\r\n"
            answer = await proxy.say(first.encode() + b"\r\n" + body + second)
            assert answer.count(b"HTTP/1.1 ") == 1
            assert answer.endswith(b"hello")
            await outside.ended.wait()
            seen = outside.seen[-1]
            assert seen.startswith(f"POST / HTTP/1.1\r\nHost: api.test:{port}\r\n".encode())
            assert seen.endswith(b"Connection: close\r\n\r\n" + body)
            assert seen.count(b"Host:") == seen.count(b"Connection:") == 1
        assert not other.begun.is_set()


@pytest.mark.parametrize(
    "fields",
    ["Transfer-Encoding: chunked", "Transfer-encoding: identity", "Content-Length: 1\r\nContent-Length: 2",
     "Content-Length: +3", "Content-Length: 3, 3", "Content-Length: 0x3", "X: a\r\n b", "X: a\nY: b", "X : a", "X",
     "X: a\rY: b", "X: a\0"],
)  # fmt: skip
async def test_a_request_that_two_could_read_differently_is_refused(proxy: Proxy, fields: str) -> None:
    async with serving() as outside:
        await proxy.open(outside.egress())
        request = f"POST http://api.test:{outside.port}/ HTTP/1.1\r\n{fields}\r\n\r\nabc".encode()
        assert (await proxy.say(request)).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 411 "))
        assert not outside.begun.is_set()


@pytest.mark.parametrize(
    ("said", "status"),
    [(b"\x05\x01\x00\r\n\r\n", 400), (b"GET / HTTP/1.1\r\n\r\n", 400), (b"GET https://api.test/ HTTP/1.1\r\n\r\n", 400),
     (b"GET ftp://api.test/ HTTP/1.1\r\n\r\n", 400), (b"\x16\x03\x01\x00\x05hello", 400), (b"", 400),
     (bytes(range(256)) * 400, 431), (b"GET http://api.test/ HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 431),
     (b"CONNECT api.test:80 HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, 431), (b"GET http://[::1/ HTTP/1.1\r\n\r\n", 400)],
)  # fmt: skip
async def test_what_is_no_request_for_a_proxy_is_answered_and_ended(proxy: Proxy, said: bytes, status: int) -> None:
    await proxy.open(Outside(port=1).egress())
    assert (await proxy.say(said)).startswith(f"HTTP/1.1 {status} ".encode())
    assert proxy.denied == []


async def test_what_a_refused_tool_still_sends_is_taken_so_that_it_hears_the_answer(proxy: Proxy) -> None:
    await proxy.open(Outside(port=1).egress())
    request = b"POST http://other.test/ HTTP/1.1\r\nContent-Length: 5000000\r\n\r\n" + bytes(5_000_000)
    assert (await proxy.say(request)).startswith(b"HTTP/1.1 403 other.test:80 ")


async def test_a_head_that_never_ends_is_ended(proxy: Proxy) -> None:
    await proxy.open(Outside(port=1).egress(), head_s=0.05)
    reader, writer = await proxy.connect()
    writer.write(b"CONNECT api.test:1 HTTP/1.1\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 408 ")


async def test_a_tunnel_stays_with_the_host_that_it_was_asked_for(proxy: Proxy) -> None:
    async with serving(echo) as outside, serving() as other:
        await proxy.open(outside.egress(f"other.test:{other.port}", other_test=["127.0.0.1"]))
        inner = f"GET http://other.test:{other.port}/ HTTP/1.1\r\n\r\n".encode()
        answer = await proxy.say(f"CONNECT api.test:{outside.port} HTTP/1.1\r\n\r\n".encode() + inner)
        assert answer == b"HTTP/1.1 200 Connection established\r\n\r\n" + inner
        assert not other.begun.is_set()


async def test_a_tool_that_goes_in_the_middle_takes_its_connection_with_it(proxy: Proxy) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    for request in ("CONNECT api.test:{port}", "POST http://api.test:{port}/"):
        async with serving(silent) as outside:
            await proxy.open(outside.egress())
            _, writer = await proxy.connect()
            writer.write(f"{request.format(port=outside.port)} HTTP/1.1\r\nContent-Length: 100\r\n\r\n12345".encode())
            await outside.begun.wait()
            writer.transport.abort()
            await outside.ended.wait()


async def test_a_link_that_breaks_is_opened_again(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    links: list[Link] = []
    taken: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
    open_link = gate.open_link

    async def noted(handle: Handle) -> Link:
        links.append(await open_link(handle))
        return links[-1]

    monkeypatch.setattr(gate, "open_link", noted)
    monkeypatch.setattr(gate, "raise_refusal", taken.put_nowait)
    async with serving() as outside:
        await proxy.open(outside.egress())
        await taken.get()
        links[0].writer.transport.abort()
        assert "port" in await taken.get()
        assert len(links) == 2
        assert (await proxy.say(f"GET http://api.test:{outside.port}/ HTTP/1.1\r\n\r\n".encode())).endswith(b"hello")


async def test_a_gate_that_closes_cuts_off_and_nothing_looks_complete(proxy: Proxy) -> None:
    async with serving(echo) as outside:
        await proxy.open(outside.egress())
        reader, writer = await proxy.connect()
        writer.write(f"CONNECT api.test:{outside.port} HTTP/1.1\r\n\r\nabc".encode())
        await reader.readuntil(b"\r\n\r\n")
        assert proxy.gate is not None
        assert proxy.gate.open_streams == 1
        await proxy.gate.close()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await outside.ended.wait()


async def test_a_server_that_cuts_off_and_one_that_is_not_there_are_told_apart_from_one_that_ends(proxy: Proxy) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhal")
        await writer.drain()
        sock = writer.get_extra_info("socket")
        sock.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER: closing resets
        writer.transport.abort()

    async with serving(cut) as outside:
        await proxy.open(outside.egress("gone.test:1", gone_test=["127.0.0.1"]))
        assert (await proxy.say(f"GET http://api.test:{outside.port}/ HTTP/1.1\r\n\r\n".encode())).endswith(b"[reset]")
        assert (await proxy.say(b"CONNECT gone.test:1 HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 502 gone.test: ")
