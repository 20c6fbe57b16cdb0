"""The name that a TLS client asks for, from real clients and from none."""

from __future__ import annotations

import ssl
from contextlib import suppress

import pytest

from sandbox import gate
from sandbox.tls import NotTls, record_bytes, server_name
from tests.sandbox.outside import Proxy, echo, serving


def hello(name: str | None) -> bytes:
    """What Python's own client sends first."""
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    out = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


@pytest.mark.parametrize("name", ["api.test", "a-very.long-" + "x" * 40 + ".name.test", None])
def test_the_name_is_read_from_a_clients_first_record(name: str | None) -> None:
    said = hello(name)
    assert record_bytes(said[:5]) == len(said) - 5
    assert server_name(said[5:]) == name


def test_what_is_cut_or_is_no_hello_is_refused_and_never_misread() -> None:
    said = hello("api.test")
    for length in range(len(said) - 5):
        with pytest.raises(NotTls):
            server_name(said[5 : 5 + length])
    for head in (b"GET /", b"\x16\x02\x01\x00\x10", b"\x16\x03\x01\x00\x00", b"\x17\x03\x03\x00\x10"):
        with pytest.raises(NotTls):
            record_bytes(head)
    with pytest.raises(NotTls):
        server_name(b"\x02" + said[6:])


def test_no_changed_byte_makes_it_fail_in_another_way() -> None:
    said = bytearray(hello("api.test")[5:])
    for at in range(len(said)):
        for value in (0, 1, 127, 255):
            changed = bytes(said[:at]) + bytes([value]) + bytes(said[at + 1 :])
            with suppress(NotTls):
                assert isinstance(server_name(changed), str | None)


async def test_at_the_port_of_https_a_tunnel_carries_only_tls_for_its_own_host(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(echo) as outside:
        monkeypatch.setattr(gate, "HTTPS", outside.port)
        await proxy.open(outside.egress())
        connect = f"CONNECT api.test:{outside.port} HTTP/1.1\r\n\r\n".encode()
        established = b"HTTP/1.1 200 Connection established\r\n\r\n"
        for own in (hello("api.test"), hello(None)):
            assert await proxy.say(connect + own + b"more") == established + own + b"more"
        assert proxy.denied == []
        for other in (hello("evil.test"), b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"):
            assert await proxy.say(connect + other) == established + b"[reset]"
        assert [each.reason for each in proxy.denied] == [
            "what was sent to api.test asks it for another host, evil.test",
            f"what was sent to api.test is not TLS; use another port than {outside.port} for it",
        ]
