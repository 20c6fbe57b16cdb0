"""What goes over the wire: keys, retries, refusals, lists."""

from __future__ import annotations

import json

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
