"""Who gets into the console, what each of its pages shows, and what its forms do: over the API, without JavaScript."""

from __future__ import annotations

import html
import re
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI

from runtime.console.actions import ACTIONS
from runtime.console.app import PAGES
from runtime.console.cookies import NAME, Signer
from runtime.console.inside import segment
from runtime.console.show import environment
from runtime.console.ways import HEADERS
from runtime.store import Event
from runtime.store.events import append
from tests.console.conftest import Operator, made
from tests.runtime.api.test_keys import bearer, make

PLACES = {"{tenant}": "default", "{name}": "node-down"}
# A field for each that a path or a body of an action names.
FIELDS = {
    "tenant": "default",
    "session": "ses_none",
    "question": "qst_none",
    "node": "none",
    "key": "key_none",
    "webhook": "whk_none",
    "delivery": "dlv_none",
    "step": "1",
    "filter": '{"states": ["failed"]}',
    "expect": "0",
    "content": "hi",
    "command": "ls",
    "id": "acme",
    "quotas": "open_sessions=3",
    "budget": "100",
    "output": "done",
    "scope": "use",
    "grace_s": "0",
}


def places(path: str, session: str) -> str:
    for name, value in {**PLACES, "{session}": session}.items():
        path = path.replace(name, value)
    return path


async def test_nobody_gets_in_without_an_admin_key(app: FastAPI, client: httpx.AsyncClient) -> None:
    use = (await make(client, scope="use"))["key"]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for path in PAGES:
            answer = await http.get(f"/console{places(path, 'ses_x')}")
            assert answer.status_code == 303, path
            assert answer.headers["location"].startswith("/console/login?next=%2Fconsole"), path
        for key, status in ((use, 403), ("tk_wrong", 401), ("", 401)):
            answer = await http.post("/console/login", data={"key": key})
            assert answer.status_code == status
            assert NAME not in answer.cookies
        assert (await http.post("/console/act/session.cancel", data=FIELDS)).status_code == 303
        assert (await http.get("/console/stream/default/ses_x")).status_code == 401


async def test_a_cookie_that_was_altered_or_has_run_out_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    signer = Signer(b"s" * 32)
    cookie = signer.cookie("key_1")
    assert (found := signer.read(cookie)) is not None
    assert found.key_id == "key_1"
    assert signer.read(Signer(b"t" * 32).cookie("key_1")) is None
    for bad in ("", ".", "x.y", cookie[:-1], "A" + cookie[1:], cookie + "0", "é.é", None):
        assert signer.read(bad) is None
    monkeypatch.setattr("runtime.console.cookies.LASTS_S", -1)
    assert signer.read(signer.cookie("key_1")) is None


async def test_a_key_that_was_revoked_is_out_at_the_next_page(
    operator: Operator, client: httpx.AsyncClient, app: FastAPI
) -> None:
    other = await make(client, scope="admin")
    assert (await operator.log_in(other["key"])).status_code == 303
    assert (await operator.http.get("/console/")).status_code == 200
    await client.post(f"/v1/admin/keys/{other['id']}/revoke")
    answer = await operator.http.get("/console/")
    assert (answer.status_code, answer.headers["location"][:14]) == (303, "/console/login")


async def test_each_page_is_there_on_an_empty_installation_and_has_nothing_that_the_policy_forbids(
    operator: Operator, client: httpx.AsyncClient, app: FastAPI
) -> None:
    session = await made(app, client)
    for path in PAGES:
        answer = await operator.http.get(f"/console{places(path, session)}")
        assert answer.status_code == 200, answer.text
        assert dict(answer.headers).items() >= {name.lower(): value for name, value in HEADERS.items()}.items()
        assert 'style="' not in answer.text, path
        assert "<script>" not in answer.text, path
        assert not re.search(r"<[^>]* on\w+=", answer.text), path


async def test_what_a_tenant_wrote_is_shown_as_text(
    operator: Operator, client: httpx.AsyncClient, app: FastAPI
) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    session = await made(app, client, evil, system=evil, metadata={"a": evil})
    page = await operator.page(f"/sessions/default/{session}")
    assert evil not in page
    assert "&lt;script&gt;alert(1)" in page


def test_what_a_call_will_do_reads_as_it_was_written() -> None:
    written = environment().from_string("{{ value | written }}")
    assert written.render(value="a < b && c") == "&#34;a &lt; b &amp;&amp; c&#34;"
    assert written.render(value="中\u202egpj.exe\x1b\0") == "&#34;中\\u202egpj.exe\\u001b\\u0000&#34;"


async def test_a_form_without_the_mark_of_this_login_does_nothing(
    operator: Operator, client: httpx.AsyncClient
) -> None:
    for data in ({"id": "acme"}, {"id": "acme", "mark": "x"}):
        answer = await operator.http.post("/console/act/tenant.create", data=data)
        assert answer.status_code == 403
    assert [one["id"] for one in (await client.get("/v1/admin/tenants")).json()["data"]] == ["default"]


async def test_the_way_back_leads_nowhere_else(operator: Operator) -> None:
    for evil in (
        "https://evil.example/",
        "//evil.example/console",
        "/v1/sessions",
        "javascript:alert(1)",
        "/consolex",
        "//[",
    ):
        answer = await operator.act("tenant.create", id="acme", back=evil)
        assert answer.headers["location"] == "/console/"
        answer = await operator.http.post("/console/login", data={"key": "tk_test", "next": evil})
        assert answer.headers["location"] == "/console/"


async def test_nothing_that_stands_in_an_address_or_a_form_breaks_a_page(
    operator: Operator, client: httpx.AsyncClient
) -> None:
    odd = ("..", ".", "a?b", "a#b", "a\0b", "\ufffd", "{x}", "²", "9" * 5000, "é" * 70)
    paths = [path.replace(name, "%s") for path in PAGES for name in ("{tenant}", "{name}") if name in path]
    for text in odd:
        for path in (*paths, "/sessions/default/%s", "/sessions/default/%s/files", "/act/%s"):
            address = "/console" + path.replace("%s", segment(text)).replace("{session}", "ses_x")
            answer = await operator.http.get(address)
            assert answer.status_code in (303, 400, 404), f"{path}, {text[:20]!r}: {answer.text[:300]}"
        for path in ("/usage?days=", "/sessions?older_than_s=", "/sessions?text=", "/sessions?after=", "/login?next="):
            answer = await operator.http.get(f"/console{path}{quote(text)}")
            assert answer.status_code == 200, f"{path}, {text[:20]!r}"
        answer = await operator.http.post("/console/act/tenant.create", data={"id": "x", "mark": text})
        assert answer.status_code == 403
        for name in ("session.cancel", "tenant.disable", "key.revoke", "node.drain"):
            fields = dict.fromkeys(("tenant", "session", "key", "node"), text)
            assert (await operator.act(name, **fields)).status_code == 303
            assert (await operator.told()).startswith(f"{ACTIONS[name].title}: "), f"{name}, {text!r}"
    await operator.act("sessions.cancel", filter="[" * 100_000, expect="0")
    assert "its filter is no JSON" in await operator.told()
    assert (await operator.http.get("/console/nowhere")).headers["content-security-policy"]


async def test_a_link_from_elsewhere_logs_nobody_out_and_has_nothing_pressed_by_itself(operator: Operator) -> None:
    """Without its cookie a request is not of this login; what an answer to it says of cookies would be."""
    async with httpx.AsyncClient(transport=operator.http._transport, base_url="http://localhost") as stranger:
        assert "set-cookie" not in (await stranger.get("/console/runbooks/node-down")).headers
    address = "/console/act/session.cancel?tenant=default&session=ses_x"
    assert "autofocus" in (await operator.http.get(address)).text
    assert "autofocus" not in (await operator.http.get(address, headers={"Sec-Fetch-Site": "cross-site"})).text


async def test_each_action_is_a_request_that_the_api_knows_and_is_in_the_audit_log(
    operator: Operator, client: httpx.AsyncClient
) -> None:
    """Nothing that it names exists, so the API says what is missing: never that there is no such route or field."""
    mark, before = await operator.mark(), 0
    for name in ACTIONS:
        answer = await operator.http.post(f"/console/act/{name}", data={"mark": mark, **FIELDS})
        assert answer.status_code in (200, 303), name
        said = html.unescape(await operator.told()) if answer.status_code == 303 else ""
        for wrong in ("there is nothing at", "is not for", "no such field", "a field is missing"):
            assert wrong not in said, f"{name}: {said}"
        log = (await client.get("/v1/admin/audit", params={"limit": 1000})).json()["data"]
        assert len(log) > before or name == "tenant.enable", f"{name} left no trace: {said}"
        before = len(log)
    assert {one["key_id"] for one in log} == {log[0]["key_id"]}


async def test_what_loses_something_is_asked_for_on_a_page_that_says_what(operator: Operator) -> None:
    for name, action in ACTIONS.items():
        if action.loses:
            page = html.unescape(await operator.page(f"/act/{name}", **FIELDS))
            assert action.loses in page
            assert f'action="/console/act/{name}"' in page


async def test_sessions_are_found_counted_and_cancelled_at_once(
    operator: Operator, client: httpx.AsyncClient, app: FastAPI
) -> None:
    ids = [await made(app, client) for _ in range(3)]
    page = html.unescape(await operator.page("/sessions", state="created"))
    assert all(one in page for one in ids)
    found = re.search(r'name="filter" value=\'?"?(.*?)"><input type="hidden" name="expect" value="(\d+)"', page)
    assert found is not None
    assert found[2] == "3"
    assert (await operator.act("sessions.cancel", filter='{"states": ["created"]}', expect="2")).status_code == 303
    assert "finds 3 open sessions, not 2" in html.unescape(await operator.told())
    await operator.act("sessions.cancel", filter='{"states": ["created"]}', expect="3")
    states = [(await client.get(f"/v1/sessions/{one}")).json()["state"] for one in ids]
    assert states == ["cancelling"] * 3 or set(states) <= {"cancelling", "cancelled"}


async def test_a_key_is_shown_once_and_works(operator: Operator, client: httpx.AsyncClient) -> None:
    once = {"once": "the-same", "tenant": "default", "scope": "use", "name": "ci"}
    first = await operator.act("key.create", **once)
    key = re.search(r"<code>(tk_[^<]+)</code>", first.text)
    assert key is not None
    assert (await client.get("/v1/keys/self", headers=bearer(key[1]))).json()["name"] == "ci"
    again = await operator.act("key.create", **once)
    assert "tk_" not in again.text
    assert key[1] not in await operator.page("/tenants")


async def test_an_action_that_is_not_for_now_is_off_and_says_why(
    operator: Operator, client: httpx.AsyncClient, app: FastAPI
) -> None:
    session = await made(app, client)
    page = await operator.page(f"/sessions/default/{session}")
    buttons = dict(re.findall(r'<button type="button" disabled title="([^"]+)">([^<]+)</button>', page))
    assert {"it is not paused": "Resume", "nothing of it has failed": "Retry"}.items() <= buttons.items()


async def test_a_page_says_what_is_known_while_the_database_is_away(
    operator: Operator, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    await operator.page("/")
    monkeypatch.setattr("runtime.console.inside.WITHIN_S", 0.5)
    app.state.db._pool.terminate()
    answer = await operator.http.get("/console/")
    assert answer.status_code == 503
    assert "As it was" in answer.text
    assert "/console/runbooks/postgres-away" in answer.text
    assert (await operator.http.get("/console/runbooks/postgres-away")).status_code == 200


async def test_what_a_sandbox_may_not_reach_is_shown_with_whose_it_was(
    operator: Operator, client: httpx.AsyncClient, app: FastAPI
) -> None:
    session = await made(app, client)
    denial = Event("sandbox.egress_denied", {"host": "evil.example", "port": 443, "reason": "not listed", "times": 3})
    await app.state.db.run(lambda connection: append(connection, session, [denial]))
    [told] = (await client.get("/v1/admin/attention")).json()["egress_denied"]
    assert (told["session_id"], told["host"], told["times"]) == (session, "evil.example", 3)
    page = await operator.page("/sandboxes")
    assert "evil.example:443" in page
    assert session in page
