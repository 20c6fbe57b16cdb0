"""The contract of the way out, over every driver: what is allowed arrives, and there is no other way."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandbox import Denial, Driver, Egress, Gate, Sandbox, StaleEpoch, image
from tests.sandbox.conftest import Make, bash, python
from tests.sandbox.outside import Outside, echo, flood, serving

GET = """
import urllib.error, urllib.request
try:
    print(urllib.request.urlopen({url!r}).read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except urllib.error.URLError as error:
    print(error.reason)
"""
TUNNEL = """
import os, socket
from urllib.parse import urlsplit
proxy = urlsplit(os.environ["HTTPS_PROXY"])
sock = socket.create_connection((proxy.hostname, proxy.port))
sock.sendall(b"CONNECT api.test:{port} HTTP/1.1\\r\\n\\r\\n")
while not (head := sock.recv(4096)).endswith(b"\\r\\n\\r\\n"): pass
print(head.split(b"\\r\\n")[0].decode())
sock.sendall(b"over" * 50_000)
sock.shutdown(socket.SHUT_WR)
data = b""
while piece := sock.recv(65536): data += piece
print(len(data), data == b"over" * 50_000)
"""
DIRECT = """
import socket
def tried(what):
    try:
        return what()
    except OSError as error:
        return type(error).__name__
def udp():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1)
        sock.sendto(b"x", ("127.0.0.1", {udp}))
        return sock.recv(10)
print(tried(lambda: socket.create_connection(("127.0.0.1", {port}), 5)))
print(tried(lambda: socket.create_connection(("93.184.215.14", 80), 5)))
print(tried(lambda: socket.create_connection(("169.254.169.254", 80), 5)))
print(tried(lambda: socket.getaddrinfo("api.test", 80)))
print(tried(udp))
print(open("/proc/net/route").read().count("\\n"))
"""
HASH = """
import hashlib, urllib.request
digest, size = hashlib.sha256(), 0
with urllib.request.urlopen({url!r}) as answer:
    while piece := answer.read(1 << 16):
        digest.update(piece)
        size += len(piece)
print(size, digest.hexdigest())
"""
STUCK = """
import time, urllib.request
answer = urllib.request.urlopen({url!r})
print(len(answer.read(1)))
time.sleep(600)
"""
CROWD = """
import asyncio, os
from urllib.parse import urlsplit
proxy = urlsplit(os.environ["http_proxy"])
async def one(number):
    reader, writer = await asyncio.open_connection(proxy.hostname, proxy.port)
    writer.write(b"CONNECT api.test:{port} HTTP/1.1\\r\\n\\r\\n")
    await reader.readuntil(b"\\r\\n\\r\\n")
    text = b"%d " % number * 2000
    writer.write(text)
    writer.write_eof()
    same = await reader.read() == text
    writer.close()
    return same
async def main():
    print(sum(await asyncio.gather(*map(one, range(200)))))
asyncio.run(main())
"""


@asynccontextmanager
async def opened(sandbox: Sandbox, egress: Egress) -> AsyncIterator[tuple[Gate, list[Denial]]]:
    denied: list[Denial] = []
    gate = await sandbox.open_gate(egress, denied.append)
    try:
        yield gate, denied
    finally:
        await gate.close()


async def get(sandbox: Sandbox, url: str) -> bytes:
    """What a tool is answered, or why not."""
    return (await python(sandbox, GET.format(url=url))).output


async def test_a_listed_host_is_reached_and_another_is_refused_in_words_and_told(sandbox: Sandbox) -> None:
    async with serving() as outside, opened(sandbox, outside.egress()) as (gate, denied):
        url = f"http://api.test:{outside.port}/x?y=1"
        assert (await get(sandbox, url)) == b"hello\n"
        assert outside.seen[0].startswith(f"GET /x?y=1 HTTP/1.1\r\nHost: api.test:{outside.port}\r\n".encode())
        refusal = b"is not in the list of hosts that may be reached (the test's list)\n"
        assert (await get(sandbox, "http://other.test/")) == b"403 other.test:80 " + refusal + b"\n"
        tunnel = await get(sandbox, "https://other.test/")
        assert tunnel == b"Tunnel connection failed: 403 other.test:443 " + refusal
        assert [(each.host, each.port) for each in denied] == [("other.test", 80), ("other.test", 443)]
        assert "other.test:80 is not in the list" in denied[0].reason
        assert gate.denials == 2


async def test_a_tunnel_carries_both_ways_and_closes_one_way_at_a_time(sandbox: Sandbox) -> None:
    async with serving(echo) as outside, opened(sandbox, outside.egress()):
        result = await python(sandbox, TUNNEL.format(port=outside.port))
        assert result.output == b"HTTP/1.1 200 Connection established\n200000 True\n"


async def test_two_hundred_connections_go_out_at_the_same_time(sandbox: Sandbox) -> None:
    async with serving(echo) as outside, opened(sandbox, outside.egress()):
        assert (await python(sandbox, CROWD.format(port=outside.port))).output == b"200\n"


async def test_fifty_megabytes_arrive_whole_and_wait_for_nobody_in_memory(make: Make) -> None:
    block, count = bytes(range(256)) * 4096, 50
    whole = hashlib.sha256(block * count).hexdigest()

    async def download(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(count):
            writer.write(block)
            await writer.drain()

    handle, sandbox = await make()
    async with serving(download) as outside, opened(sandbox, outside.egress()):
        before = _peak_bytes(handle.pid)
        result = await python(sandbox, HASH.format(url=f"http://api.test:{outside.port}/"))
        assert result.output == f"{count << 20} {whole}\n".encode()
        assert _peak_bytes(handle.pid) - before < 8 << 20


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


async def test_a_reader_that_stops_stops_the_sender_and_nobody_else(sandbox: Sandbox) -> None:
    async with serving(flood) as slow, serving() as outside:
        egress = outside.egress(f"slow.test:{slow.port}", slow_test=["127.0.0.1"])
        async with opened(sandbox, egress):
            code = STUCK.format(url=f"http://slow.test:{slow.port}/")
            stuck = await sandbox.start("stuck", ["python3", "-c", code])
            async for _ in stuck:
                break
            assert (await get(sandbox, f"http://api.test:{outside.port}/")) == b"hello\n"
            assert not slow.ended.is_set()
            await stuck.kill()
            await slow.ended.wait()  # a tool that is killed takes its connections with it


async def test_without_a_gate_a_tool_is_told_so_until_there_is_one_again(make: Make, driver: Driver) -> None:
    handle, sandbox = await make()
    async with serving() as outside:
        url = f"http://api.test:{outside.port}/"
        assert (await bash(sandbox, "env | grep -i proxy")).output == b""
        async with opened(sandbox, outside.egress()):
            assert (await get(sandbox, url)) == b"hello\n"
        assert (await get(sandbox, url)).startswith(b"503 no way out of the sandbox now")
        again = await driver.attach(handle, epoch=2)
        async with opened(again, outside.egress()):
            assert (await get(again, url)) == b"hello\n"
        await again.close()


async def test_only_the_newest_gate_lets_out_and_an_older_epoch_opens_none(make: Make, driver: Driver) -> None:
    handle, old = await make(epoch=1)
    async with serving() as outside, opened(old, outside.egress()) as (first, _):
        url = f"http://api.test:{outside.port}/"
        async with opened(old, Egress(named="nothing")) as (_, denied):
            assert b"(nothing)" in (await get(old, url))
            assert len(denied) == 1
            assert first.denials == 0
            new = await driver.attach(handle, epoch=2)
            assert (await get(new, url)).startswith(b"503 no way out of the sandbox now")
            with pytest.raises(StaleEpoch):
                await old.open_gate(outside.egress(), denied.append)
            await new.close()
        assert outside.seen == []


@pytest.mark.isolated
async def test_beside_the_gate_nothing_is_reached_by_address_by_name_or_by_datagram(sandbox: Sandbox) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("127.0.0.1", 0))
        datagrams.setblocking(False)
        async with serving() as outside, opened(sandbox, outside.egress()):
            code = DIRECT.format(port=outside.port, udp=datagrams.getsockname()[1])
            refused, unrouted, metadata, name, datagram, routes = (await python(sandbox, code)).output.split()
            assert refused == b"ConnectionRefusedError"
            assert unrouted == metadata == b"OSError"
            assert name == b"gaierror"
            assert datagram in (b"TimeoutError", b"ConnectionRefusedError")
            assert routes == b"1"  # the table's head
            assert outside.seen == []
        with pytest.raises(BlockingIOError):
            datagrams.recv(10)


@pytest.mark.isolated
async def test_a_tool_that_speaks_https_trusts_whom_the_host_trusts(sandbox: Sandbox) -> None:
    if not any(os.path.isfile(path) for path in image.CERTIFICATES):
        pytest.skip("this host trusts nobody")
    code = "import ssl; print(ssl.create_default_context().cert_store_stats()['x509_ca'] > 10)"
    assert (await python(sandbox, code)).output == b"True\n"


async def test_a_calls_own_environment_wins_over_the_gates(sandbox: Sandbox) -> None:
    outside = Outside(port=1)
    async with opened(sandbox, outside.egress()):
        result = await bash(sandbox, "echo $http_proxy $NO_PROXY", env={"http_proxy": "mine"})
        assert result.output == b"mine localhost,127.0.0.1,::1\n"
