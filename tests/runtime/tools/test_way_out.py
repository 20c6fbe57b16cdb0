"""Sandboxes that are opened to hosts: while a step runs, within what the operator allows, and every refusal is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from runtime.config import SessionConfig
from runtime.tools.kinds import SessionTool
from sandbox.allow import parse_allow
from tests.runtime.tools import servers
from tests.runtime.tools.conftest import STDIO, Node

GET = """
import urllib.request, urllib.error
for url in {urls!r}:
    try:
        print(urllib.request.urlopen(url).status)
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
"""


async def lookup(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


def opened(node: Node, allow: str) -> Node:
    return Node(dataclasses.replace(node.services, sandbox_egress=parse_allow(allow), lookup=lookup))


def port(web: servers.Seen) -> str:
    return web.url.rpartition(":")[2].strip("/")


@pytest.mark.sandbox
@pytest.mark.model
async def test_a_listed_host_is_reached_and_what_is_refused_is_told_once_with_its_count(
    node: Node, web: servers.Seen
) -> None:
    place = f"api.test:{port(web)}"
    open_node = opened(node, f"{place},*.example.org")
    session = await open_node.session(["python"], egress=[place])
    urls = [f"http://{place}/x", "http://a.example.org/", "http://a.example.org/", "http://169.254.169.254/"]
    [row] = await open_node.called(session, ("python", {"code": GET.format(urls=urls)}))
    lines = row["output"].decode().splitlines()
    assert lines[0] == "200"
    assert lines[1].startswith("403 a.example.org:80 is not in the list of hosts that may be reached (the session's")
    assert row["effect"] == "unsafe"
    assert [each["path"] for each in web.requests] == ["/x"]
    told = await open_node.events(session, "sandbox.egress_denied")
    assert [(each["host"], each["port"], each["times"]) for each in told] == [
        ("a.example.org", 80, 2), ("169.254.169.254", 80, 1),
    ]  # fmt: skip
    assert "not in the list" in told[0]["reason"]


@pytest.mark.sandbox
@pytest.mark.model
async def test_a_tool_that_asks_for_hosts_without_number_fills_no_record(node: Node) -> None:
    open_node = opened(node, "api.test")
    session = await open_node.session(["python"], egress=["api.test"])
    urls = [f"http://h{number}.test/" for number in range(40)]
    await open_node.called(session, ("python", {"code": GET.format(urls=urls)}))
    assert len(await open_node.events(session, "sandbox.egress_denied")) == 16


@pytest.mark.sandbox
@pytest.mark.model
async def test_what_the_operator_no_longer_allows_is_closed_at_once(node: Node, web: servers.Seen) -> None:
    place = f"api.test:{port(web)}"
    shut = opened(node, "other.test")
    session = await shut.session(["python"], egress=[place])
    [row] = await shut.called(session, ("python", {"code": GET.format(urls=[f"http://{place}/"])}))
    assert row["output"].startswith(b"403 ")
    assert b"TENUTO_SANDBOX_EGRESS_ALLOW" in row["output"]
    assert web.requests == []


@pytest.mark.sandbox
@pytest.mark.model
async def test_a_session_that_asks_for_nothing_has_no_way_out_and_its_tools_stay_undoable(
    node: Node, web: servers.Seen
) -> None:
    open_node = opened(node, f"api.test:{port(web)}")
    session = await open_node.session(["bash"])
    [row] = await open_node.called(session, ("bash", {"command": "env | grep -ci proxy"}))
    assert row["output"].strip() == b"0"


@pytest.mark.sandbox
@pytest.mark.model
async def test_a_server_in_the_sandbox_has_the_way_out_from_its_first_word(node: Node, web: servers.Seen) -> None:
    place = f"api.test:{port(web)}"
    fetch = f"import urllib.request as r; r.urlopen('http://{place}/begun').read()"
    command = ["bash", "-c", f'python3 -c "{fetch}" && exec env PYTHONPATH=/mnt/libs python3 /work/server.py stdio']
    open_node = opened(node, place)
    session = await open_node.session([{**STDIO, "command": command}], egress=[place])
    [row] = await open_node.called(session, ("counting__add", {"a": 2, "b": 3}))
    assert row["output"] == b"2 + 3 = 5"
    assert row["effect"] == "unsafe"
    assert [each["path"] for each in web.requests] == ["/begun"]


def test_hosts_are_read_at_the_edge_and_kept_as_they_are_written() -> None:
    config = SessionConfig.model_validate({"model": "m", "egress": ["API.example.org:443", "*.test", "[::1]:80"]})
    kept = config.model_dump()
    assert kept["egress"] == ["api.example.org:443", "*.test", "[::1]:80"]
    assert SessionConfig.model_validate(kept) == config
    for wrong in ("https://a.org", "*", "a.org:0", 7):
        with pytest.raises(ValidationError, match="egress"):
            SessionConfig.model_validate({"model": "m", "egress": [wrong]})


def test_a_session_that_runs_as_a_tool_reaches_no_more_than_its_parent() -> None:
    tool = SessionTool(type="session", name="ask", description="Ask.")
    config = SessionConfig.model_validate({"model": "m", "tools": [tool], "egress": ["a.test"]})
    assert config.of_child(tool).egress == config.egress
