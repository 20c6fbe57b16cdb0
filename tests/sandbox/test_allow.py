from __future__ import annotations

import re

import pytest

from sandbox.allow import USE, Entry, parse_allow


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("PyPI.org", Entry("pypi.org")),
        (" pypi.org:443 ", Entry("pypi.org", 443)),
        ("*.example.org:80", Entry("*.example.org", 80)),
        ("127.0.0.1:8080", Entry("127.0.0.1", 8080)),
        ("[2001:DB8:0::1]", Entry("2001:db8::1")),
        ("[::1]:443", Entry("::1", 443)),
    ],
)
def test_a_host_is_read_with_its_port_or_with_any(text: str, entry: Entry) -> None:
    assert Entry.parse(text) == entry
    assert Entry.parse(str(entry)) == entry


@pytest.mark.parametrize(
    "text",
    ["", "*", "nonsense egress", "http://example.org", "pypi.org:", "pypi.org:+443", "pypi.org:https", "pypi.org:0",
     "pypi.org:65536", "pypi.org:443:443", ":443", "::1", "[::1", "[::1]:", "[::1]443", "[:::]:1", "a,b", "-a.org"],
)  # fmt: skip
def test_what_is_no_host_is_refused_with_what_it_may_be(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(USE)}$"):
        Entry.parse(text)


def test_a_list_is_refused_for_one_of_its_hosts() -> None:
    assert parse_allow("a.org, b.org:1,") == (Entry("a.org"), Entry("b.org", 1))
    with pytest.raises(ValueError, match="use host"):
        parse_allow("a.org,b.org:")
