"""The list of hosts: what it lets through, and at which address."""

from __future__ import annotations

from collections.abc import Sequence

import httpx2
import pytest

from runtime.tools.egress import Egress, TooMuch, client
from sandbox import EgressRefused
from sandbox.allow import Entry, parse_allow
from tests.runtime.tools.servers import Seen


def egress(allow: str, *answers: Sequence[str]) -> tuple[Egress, list[str]]:
    """With a name service that gives one answer after the other, and the names it was asked for."""
    asked: list[str] = []

    async def lookup(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return answers[len(asked) - 1]

    return Egress(parse_allow(allow), lookup), asked


@pytest.mark.parametrize(
    ("allow", "url", "allowed"),
    [
        ("", "https://example.org", False),
        ("example.org", "https://example.org/x", True),
        ("example.org", "https://EXAMPLE.org:8443/x", True),
        ("example.org", "https://www.example.org", False),
        ("example.org:443", "https://example.org", True),
        ("example.org:443", "http://example.org", False),
        ("*.example.org", "https://a.b.example.org", True),
        ("*.example.org", "https://example.org", False),
        ("*.example.org", "https://badexample.org", False),
        ("*.example.org:8443", "https://a.example.org", False),
        (" a.org , b.org:80 ", "http://b.org", True),
        ("[::1]:80", "http://[::1]/", True),
        ("xn--mnchen-3ya.de", "https://münchen.de/", True),
        ("127.0.0.1:80", "http://127.0.0.1./", False),
    ],
)
def test_a_host_is_allowed_by_its_name_and_port(allow: str, url: str, allowed: bool) -> None:
    if allowed:
        Egress(parse_allow(allow)).check(url)
    else:
        with pytest.raises(EgressRefused, match="TENUTO_EGRESS_ALLOW"):
            Egress(parse_allow(allow)).check(url)


@pytest.mark.parametrize("text", ["*", "*.", "a b", "http://a.org", "a.org:0", "a.org:99999", "a.org:x", "[::1", "-"])
def test_what_is_no_host_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="use host, host:port"):
        parse_allow(text)


def test_an_entry_is_written_as_it_is_read() -> None:
    text = "example.org,*.example.org:8443,[::1]:80,127.0.0.1:80"
    assert ",".join(map(str, parse_allow(text))) == text
    assert parse_allow("EXAMPLE.org") == (Entry("example.org"),)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.9", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "::1", "fe80::1%eth0", "fd00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::1", "::"],
)  # fmt: skip
async def test_an_address_that_is_not_public_is_refused_unless_host_and_port_are_listed(address: str) -> None:
    for allow in ("example.org", "*.org:443"):
        guarded, _ = egress(allow, [address])
        with pytest.raises(EgressRefused, match="no public address"):
            await guarded.addresses("example.org", 443)
    literal, _ = egress("example.org:443", [address])
    assert await literal.addresses("example.org", 443) == [address]


async def test_only_the_public_ones_of_several_addresses_are_used() -> None:
    guarded, _ = egress("example.org", ["10.0.0.1", "93.184.215.14"])
    assert await guarded.addresses("example.org", 443) == ["93.184.215.14"]


async def test_the_address_that_was_looked_at_is_the_one_connected_to(web: Seen) -> None:
    """A name service that says something else the second time is not asked a second time."""
    port = web.url.rpartition(":")[2]
    guarded, asked = egress(f"api.example.org:{port}", ["127.0.0.1"], ["10.255.255.1"])
    async with client(guarded, {}, 10, 1 << 20) as http:
        answer = await http.get(f"http://api.example.org:{port}/here")
    assert answer.status_code == 200
    assert asked == ["api.example.org"]
    assert web.requests[0]["headers"]["Host"] == f"api.example.org:{port}"


async def test_the_next_address_is_tried_where_one_does_not_answer(web: Seen) -> None:
    port = web.url.rpartition(":")[2]
    guarded, _ = egress(f"api.example.org:{port}", ["127.0.0.2", "127.0.0.1"])
    async with client(guarded, {}, 10, 1 << 20) as http:
        assert (await http.get(f"http://api.example.org:{port}/")).status_code == 200


async def test_a_name_that_nobody_knows_is_a_failure_to_connect() -> None:
    guarded = Egress(parse_allow("no-such-host.invalid"))
    async with client(guarded, {}, 10, 1 << 20) as http:
        with pytest.raises(httpx2.ConnectError):
            await http.get("http://no-such-host.invalid/")


async def test_an_answer_beyond_the_limit_is_not_read_to_its_end(web: Seen) -> None:
    async with client(Egress(parse_allow(web.url[7:])), {}, 10, 1000) as http:
        with pytest.raises(TooMuch, match="longer than 1000"):
            await http.get(f"{web.url}/big/100000000")
