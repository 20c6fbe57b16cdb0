"""What goes over the wire: keys, retries, refusals, lists."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import unquote

import httpx
import pytest
import tenuto
from tenuto import _wire

from tests.sdk.server import DROP, Answer, as_json, events, frame, problem

INFO = {"id": "ses_1", "state": "idle", "model": "m", "seed": 1, "epoch": 1, "tokens": 3, "last_event": 7}


def test_a_request_carries_the_key_and_what_was_given(client, server) -> None:
    server.replies = [as_json(INFO, 201)]
    session = client.sessions.create(system="Be brief.", tools=["python"], seed=0, limits={"max_think_tokens": 5})
    assert session.id == "ses_1"
    (seen,) = server.seen
    assert (seen.method, seen.path) == ("POST", "/v1/sessions")
    assert seen.headers["authorization"] == "Bearer tk_test"
    assert json.loads(seen.body) == {
        "system": "Be brief.",
        "tools": ["python"],
        "seed": 0,
        "limits": {"max_think_tokens": 5},
    }


def test_every_post_carries_a_key_of_its_own(client, server) -> None:
    server.replies = [as_json(INFO)]
    session = client.sessions.create()
    session.send("one")
    session.send("two")
    session.cancel()
    keys = [seen.key for seen in server.seen if seen.method == "POST"]
    assert all(keys)
    assert len(set(keys)) == 4


@pytest.mark.parametrize("trouble", [problem(503), problem(502), problem(429), DROP, Answer(504, b"<html>")])
def test_what_may_pass_is_tried_again_with_the_same_key_and_body(client, server, trouble) -> None:
    server.replies = [trouble, trouble, as_json(INFO)]
    assert client.sessions.create(seed=3).id == "ses_1"
    assert len(server.seen) == 3
    assert len({(seen.key, seen.body) for seen in server.seen}) == 1


def test_a_key_that_was_given_is_the_one_that_is_sent(client, server) -> None:
    server.replies = [as_json(INFO)]
    session = client.sessions.create(idempotency_key="mine")
    session.send("hello", idempotency_key="mine too")
    assert [seen.key for seen in server.seen] == ["mine", "mine too"]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 500])
def test_a_refusal_is_raised_at_once_with_what_the_server_said(client, server, status) -> None:
    server.replies = [problem(status, "bad_thing", "seed: use a number", "seed")]
    with pytest.raises(tenuto.APIError, match=r"^seed: use a number$") as caught:
        client.sessions.create()
    assert (caught.value.status, caught.value.code, caught.value.param) == (status, "bad_thing", "seed")
    assert len(server.seen) == 1


@pytest.mark.parametrize("body", [b"<html>gone</html>", b'{"detail": "x"}', b'"text"', b'{"error": "x"}', b"[]"])
def test_a_refusal_in_another_form_is_still_an_api_error(client, server, body) -> None:
    server.replies = [Answer(404, body)]
    with pytest.raises(tenuto.APIError) as caught:
        client.sessions.get("ses_1")
    assert (caught.value.status, caught.value.code, str(caught.value)) == (404, "unknown", body.decode())


def test_a_server_that_stays_unwilling_is_an_api_error_after_a_bounded_number_of_tries(client, server) -> None:
    server.replies = [problem(503, "unavailable", "no node is up")]
    with pytest.raises(tenuto.APIError, match="no node is up"):
        client.models()
    assert len(server.seen) == _wire.ATTEMPTS


def test_a_server_that_never_answers_is_a_sentence(client, server) -> None:
    server.replies = [DROP]
    with pytest.raises(
        tenuto.ConnectionFailed, match=rf"^{server.url} does not answer \(.+\); is `tenuto up` running\?$"
    ):
        client.models()
    assert len(server.seen) == _wire.ATTEMPTS


@pytest.mark.parametrize("body", [b"<html>welcome</html>", b"[1]", b""])
def test_a_server_that_is_no_tenuto_is_a_sentence(client, server, body) -> None:
    server.replies = [Answer(200, body)]
    with pytest.raises(tenuto.TenutoError, match="did not answer as a Tenuto server does; check the address"):
        client.models()


def test_a_list_is_read_page_by_page(client, server) -> None:
    def page(*ids: str, more: bool) -> Answer:
        return as_json({"data": [{**INFO, "id": id} for id in ids], "has_more": more, "last_id": ids[-1]})

    server.replies = [page("a", "b", more=True), page("c", more=False)]
    assert [info.id for info in client.sessions.list(limit=2)] == ["a", "b", "c"]
    assert [seen.path for seen in server.seen] == ["/v1/sessions?limit=2", "/v1/sessions?limit=2&after=b"]


def test_events_are_read_page_by_page(client, server) -> None:
    def page(*ids: int, more: bool) -> Answer:
        rows = [{"id": id, "type": "x", "created_at": "2026-01-01T00:00:00Z", "data": {}} for id in ids]
        return as_json({"data": rows, "has_more": more, "last_id": ids[-1]})

    server.replies = [as_json(INFO), page(4, 5, more=True), page(6, more=False)]
    assert [event.id for event in client.sessions.get("ses_1").events(after=3)] == [4, 5, 6]
    assert [seen.path.partition("?")[2] for seen in server.seen[1:]] == ["after=3&limit=1000", "after=5&limit=1000"]


def test_the_position_costs_one_small_request(client, server) -> None:
    server.replies = [as_json(INFO)]
    session = client.sessions.get("ses_1")
    assert session.position() == 7
    assert [seen.path for seen in server.seen] == ["/v1/sessions/ses_1"] * 2


def test_fields_of_a_newer_server_are_kept(client, server) -> None:
    server.replies = [as_json({**INFO, "mood": "bright"})]
    assert client.sessions.get("ses_1").info().model_extra == {"mood": "bright"}


def test_cancel_waits_for_the_end_from_where_the_session_stood(client, server) -> None:
    ended = {**INFO, "state": "cancelled"}
    stream = events(frame(8, "sandbox.released") + frame(9, "session.cancelled"))
    server.replies = [as_json(INFO), as_json({**INFO, "state": "cancelling"}), stream, as_json(ended)]
    assert client.sessions.get("ses_1").cancel().state == "cancelled"
    assert server.seen[2].after == 7


def test_a_server_that_says_when_to_come_back_is_believed_up_to_a_minute() -> None:
    def waits(**headers: str) -> float:
        return _wire.pause(0, httpx.Response(429, headers=headers))

    assert (waits(**{"Retry-After": "7"}), waits(**{"Retry-After": "86400"})) == (7.0, 60.0)
    assert waits(**{"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}) <= 0.1
    assert max(waits(), _wire.pause(0, None)) <= 0.1


def test_a_refusal_says_when_to_come_back(client, server) -> None:
    refused = problem(409, "conflict", "busy")
    server.replies = [Answer(409, refused.body, headers={"Retry-After": "3"})]
    with pytest.raises(tenuto.APIError) as caught:
        client.models()
    assert caught.value.retry_after_s == 3.0


@pytest.mark.parametrize("odd", ["a/b", "a?b=1#c", "../keys/self", "ä b%2F"])
def test_an_id_is_one_part_of_the_address_whatever_is_in_it(client, server, odd) -> None:
    server.replies = [as_json(INFO)]
    client.sessions.get(odd)
    (seen,) = server.seen
    assert seen.path.count("/") == 3
    assert unquote(seen.path) == f"/v1/sessions/{odd}"


@pytest.mark.parametrize("none", ["", ".", ".."])
def test_what_can_be_no_id_is_refused_before_it_is_sent(client, server, none) -> None:
    with pytest.raises(tenuto.TenutoError, match="is no id"):
        client.sessions.get(none)
    with pytest.raises(tenuto.TenutoError, match="is no id"):
        client.agents.get(none)
    assert server.seen == []


def test_a_session_that_is_left_in_order_is_completed(server) -> None:
    server.replies = [as_json({**INFO, "state": "completed", "ending": "completed"})]
    with tenuto.Client(server.url, "k") as blocking, blocking.sessions.create():
        pass
    assert [seen.path for seen in server.seen] == ["/v1/sessions", "/v1/sessions/ses_1/complete"]


def test_a_session_that_does_not_rest_when_it_is_left_is_cancelled(server) -> None:
    ended = as_json({**INFO, "state": "cancelled", "ending": "cancelled"})
    server.replies = [as_json(INFO), problem(409), ended]

    async def work() -> None:
        async with tenuto.AsyncClient(server.url, "k") as client, await client.sessions.create():
            pass

    asyncio.run(work())
    assert [seen.path.rpartition("/")[2] for seen in server.seen] == ["sessions", "complete", "cancel"]


def test_a_session_that_is_left_by_an_error_is_cancelled_and_the_error_is_seen(server, hasty) -> None:
    server.replies = [as_json(INFO), problem(500)]
    with tenuto.Client(server.url, "k") as client, pytest.raises(LookupError), client.sessions.create():
        raise LookupError
    assert [seen.path.rpartition("/")[2] for seen in server.seen] == ["sessions", "cancel"]


@pytest.mark.parametrize("path", ["../../../../secrets/TOKEN", "a/../../x", "./x", ".."])
def test_a_path_that_would_name_another_thing_is_not_sent(client, server, path) -> None:
    for act in (client.get, client.delete, client.read, lambda path: client.put(path, b"")):
        with pytest.raises(tenuto.TenutoError, match=r"there can be no \. or \.\."):
            act(f"/v1/sessions/ses_1/sandbox/files/{path}")
    assert not server.seen


def test_what_is_no_text_is_refused_in_a_sentence(client, server) -> None:
    with pytest.raises(tenuto.TenutoError, match="no text in UTF-8"):
        client.sessions.create(system="\udcff")
    assert not server.seen


def test_a_key_that_can_be_none_is_refused_and_a_line_end_behind_it_is_not_part_of_it() -> None:
    for key in ("tk_a\nb", "schlüssel"):
        with pytest.raises(tenuto.TenutoError, match="the API key has characters"):
            tenuto.Client("http://127.0.0.1:1", key)
    assert _wire.Server.find("http://127.0.0.1:1", "tk_a\n").key == "tk_a"


def test_an_approve_that_is_no_function_is_refused_before_anything_is_sent(client, server) -> None:
    server.replies = [as_json(INFO)]
    session = client.sessions.create()
    with pytest.raises(tenuto.TenutoError, match="approve is True; it must be a function"):
        session.run("Go.", approve=True)
    assert len(server.seen) == 1


@pytest.mark.parametrize("tool", [None, 3])
def test_what_is_no_tool_is_refused_by_name(client, server, tool) -> None:
    with pytest.raises(tenuto.ToolError, match=f"{tool} is no tool"):
        client.sessions.create(tools=[tool])
    assert not server.seen
