import asyncio
import json

import pytest

from runtime import delivery
from runtime.api.stream import sse
from runtime.store import sessions
from runtime.store.values import Event
from workflows.states import Event as Move

TOOL = {"name": "ping", "description": "Ping.", "command": ["true"]}


async def create(client, **body):
    response = await client.post("/v1/sessions", json=body)
    assert response.status_code == 201, response.text
    return response.json()


async def test_a_session_is_created_with_what_was_asked_and_the_served_model(client):
    session = await create(client, system="Be brief.", tools=["python", TOOL], seed=5)
    assert session["state"] == "created"
    assert session["model"] == "smollm2-135m-instruct"
    assert session["seed"] == 5
    assert (await client.get(f"/v1/sessions/{session['id']}")).json() == session


async def test_sessions_are_listed_newest_first_with_a_cursor(client):
    made = [(await create(client))["id"] for _ in range(3)]
    first = (await client.get("/v1/sessions", params={"limit": 2})).json()
    assert [row["id"] for row in first["data"]] == made[:0:-1]
    assert first["has_more"]
    rest = (await client.get("/v1/sessions", params={"limit": 2, "after": first["last_id"]})).json()
    assert [row["id"] for row in rest["data"]] == made[:1]
    assert not rest["has_more"]


async def test_a_post_with_the_same_key_makes_one_thing(client):
    headers = {"Idempotency-Key": "k1"}
    ids = {(await client.post("/v1/sessions", json={"seed": 1}, headers=headers)).json()["id"] for _ in range(3)}
    assert len(ids) == 1
    other = await client.post("/v1/sessions", json={"seed": 2}, headers=headers)
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "idempotency_mismatch"
    path = f"/v1/sessions/{ids.pop()}/events"
    sent = {
        (await client.post(path, json={"content": "hi"}, headers={"Idempotency-Key": "k2"})).json()["id"]
        for _ in range(3)
    }
    assert len(sent) == 1


@pytest.mark.parametrize("repeated", ["pause", "complete", "cancel"])
async def test_what_is_repeated_after_the_end_starts_nothing(db, client, repeated, monkeypatch):
    session_id = (await create(client))["id"]
    await sessions.place(db, session_id, "n", "b")
    path, headers = f"/v1/sessions/{session_id}/{repeated}", {"Idempotency-Key": "k"}
    if repeated == "complete":
        placed = await sessions.get(db, session_id)
        await db.run(lambda c: sessions.move(c, placed, Move.REST))
    said = []

    async def say(_: object, *about: str) -> None:
        said.append(about)

    for name in ("command", "end"):
        monkeypatch.setattr(delivery, name, say)
    assert (await client.post(path, headers=headers)).status_code == 202
    await sessions.finish(db, session_id, "completed", {})
    again = await client.post(path, headers=headers)
    assert again.status_code == 202
    assert again.json()["state"] in ("completed", "cancelled")
    assert len(said) == 1


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"model": "gpt-9"}, "model", "'gpt-9' is not served here; there is smollm2-135m-instruct"),
        ({"modle": "x"}, "modle", "there is no such field"),
        ({"tools": ["teleport"]}, "tools", "'teleport' is no built-in tool; there are python"),
        ({"tools": ["python", "python"]}, "tools", "python stands twice"),
        ({"tools": [{**TOOL, "parameters": {"type": "string"}}]}, "tools", "must be a JSON schema"),
        ({"tools": [{**TOOL, "command": []}]}, "tools", "at least 1 item"),
        ({"files": {"../x": "y"}}, "files", "../x"),
        ({"tools": [{**TOOL, "name": "read_file"}]}, "tools", "is the name of a built-in tool"),
        ({"files": {"." * 300: "y"}}, "files", "longer than the 255 bytes"),
        ({"files": {"a/" * 200 + "b": "y"}}, "files", "folders deep"),
        ({"system": "a\0b"}, "", "system: must not contain the character NUL"),
        ({"files": {"/etc/passwd": "y"}}, "files", "/etc/passwd"),
        (
            {"files": {"big.txt": "x" * 800_000}, "limits": {"workspace_bytes": 1 << 20}},
            "",
            "raise limits.workspace_bytes",
        ),
        ({"limits": {"max_think_tokens": 0}}, "limits.max_think_tokens", "greater than or equal to 1"),
        ({"sampling": {"temperature": 9}}, "sampling.temperature", "less than or equal to 2"),
        ({"sampling": {"min_p": -0.1}}, "sampling.min_p", "greater than or equal to 0"),
        ({"sampling": {"presence_penalty": 3}}, "sampling.presence_penalty", "less than or equal to 2"),
        ({"sampling": {"logit_bias": {"x": 1}}}, "sampling.logit_bias", "pattern"),
        ({"sampling": {"logit_bias": {"7": 101}}}, "sampling.logit_bias", "less than or equal to 100"),
        ({"sampling": {"logit_bias": {"49152": 1}}}, "sampling.logit_bias", "there is no token 49152"),
        ({"sampling": {"stop": [""]}}, "sampling.stop", "at least 1 character"),
        ({"sampling": {"stop": ["a"] * 9}}, "sampling.stop", "at most 8 items"),
        ({"sampling": {"logprobs": 21}}, "sampling.logprobs", "less than or equal to 20"),
        ({"sampling": {"speculation": "on"}}, "sampling.speculation", "'auto', 'off' or 'ratio'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs a json_schema"),
        ({"response_format": {"type": "regex", "json_schema": {}}}, "response_format", "has no json_schema"),
        ({"response_format": {"type": "regex", "pattern": "("}}, "response_format", "cannot be used"),
        ({"response_format": {"type": "json_schema", "json_schema": {"enum": []}}}, "response_format", "Unsatisfiable"),
        ({"response_format": {"type": "json_object"}, "sampling": {"stop": ["}"]}}, "", "sampling.stop"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"system": "tide " * 9000}, "system", "the context of smollm2-135m-instruct holds 8192"),
    ],
)
async def test_a_bad_session_is_refused_by_field_and_nothing_is_made(client, body, param, says):
    response = await client.post("/v1/sessions", json=body)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/problem+json"
    error = response.json()["error"]
    assert (error["param"] or "").startswith(param)
    assert says in error["message"]
    assert (await client.get("/v1/sessions")).json()["data"] == []


async def test_malformed_json_is_refused_with_where_it_breaks(client):
    response = await client.post("/v1/sessions", content=b'{"seed": ', headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "not valid JSON" in response.json()["detail"]


async def test_a_body_of_fifty_megabytes_is_refused_before_it_is_read(client):
    response = await client.post("/v1/sessions", content=b"x" * (50 << 20))
    assert response.status_code == 413

    async def endless():
        for _ in range(50):
            yield b"x" * (1 << 20)

    response = await client.post("/v1/sessions", content=endless())
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"content": ""}, None, "a message has content"),
        ({}, None, "a message has content"),
        ({"content": "x", "tool_choice": "required"}, "tool_choice", "the session has no tools"),
        ({"content": "x", "type": "rewind"}, "type", "cannot be posted"),
        ({"content": "tide " * 9000}, "content", "context"),
    ],
)
async def test_a_bad_message_is_refused_by_field_and_nothing_is_accepted(client, db, body, param, says):
    session = await create(client)
    response = await client.post(f"/v1/sessions/{session['id']}/events", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert says in response.json()["error"]["message"]
    assert await db.fetch("SELECT 1 FROM messages") == []


async def test_a_tool_choice_that_names_no_tool_lists_those_there_are(client):
    session = await create(client, tools=[TOOL])
    body = {"content": "x", "tool_choice": "pong"}
    response = await client.post(f"/v1/sessions/{session['id']}/events", json=body)
    assert response.status_code == 400
    assert "required or one of ping" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["", "/events", "/steps", "/attempts", "/checkpoints", "/transcript", "/kv", "/events/stream"]
)
async def test_an_unknown_session_is_not_found_on_every_route(client, path):
    response = await client.get(f"/v1/sessions/ses_nowhere{path}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


async def test_a_wrong_or_missing_key_opens_nothing(client):
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer nope"}, {"Authorization": "Basic abc"}):
        assert (await client.get("/v1/sessions", headers=headers)).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Host": "127.0.0.1.evil.example"},
    ],
)
async def test_a_page_of_the_web_cannot_reach_the_api_through_a_browser(client, headers):
    response = await client.get("/v1/sessions", headers=headers)
    assert response.status_code == 403


@pytest.mark.parametrize("host", ["localhost:8300", "127.0.0.1:8300", "[::1]:8300"])
async def test_loopback_names_are_ours(client, host):
    assert (await client.get("/healthz", headers={"Host": host, "Origin": f"http://{host}"})).status_code == 200


async def test_cancel_is_accepted_once_and_says_so(client):
    session = await create(client)
    for _ in range(2):
        response = await client.post(f"/v1/sessions/{session['id']}/cancel")
        assert response.status_code == 202
        assert response.json()["state"] == "cancelling"
    response = await client.post(f"/v1/sessions/{session['id']}/events", json={"content": "x"})
    assert response.status_code == 409
    assert "takes no more messages" in response.json()["detail"]


async def test_readiness_names_what_is_missing(client, db):
    assert (await client.get("/readyz")).json()["checks"] == {"postgres": "ok", "nodes": "ok", "temporal": "ok"}
    await db.execute("UPDATE nodes SET heartbeat_at = now() - interval '1 hour'")
    response = await client.get("/readyz")
    assert response.status_code == 503
    assert response.json()["checks"]["nodes"] == "no node is up"
    refused = await client.post("/v1/sessions", json={})
    assert refused.status_code == 503
    assert refused.headers["Retry-After"] == "1"


async def test_openapi_is_served(client):
    document = (await client.get("/v1/openapi.json")).json()
    assert "/v1/sessions/{session_id}/events/stream" in document["paths"]


async def frames(client, path, headers=None, until="session.cancelled"):
    """Frames of a stream as (id, event) up to an event's type."""
    found = []
    async with client.stream("GET", path, headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("id:"):
                found.append(int(line[3:]))
            elif line.startswith("data:") and json.loads(line[5:])["type"] == until:
                return found
    return found


async def test_a_stream_comes_back_at_its_cursor_and_misses_and_repeats_nothing(client, db):
    session = await create(client)
    for i in range(20):
        await db.run(lambda c, i=i: _write(c, session["id"], i))
    await sessions.request_end(db, "default", session["id"])
    await sessions.finish(db, session["id"], "cancelled", {})
    path = f"/v1/sessions/{session['id']}/events/stream"
    whole = await frames(client, path)
    assert whole == list(range(1, len(whole) + 1))
    for cut in range(len(whole)):
        again = await frames(client, path, {"Last-Event-ID": str(cut)})
        assert again == whole[cut:]


async def test_events_that_commit_while_a_reader_waits_reach_it(app, db, client):
    session = await create(client)
    seen: list[int] = []

    async def read():
        async for frames in sse(app.state.hub, db, session["id"], 0, "key"):
            seen.extend(int(line[4:]) for line in frames.decode().splitlines() if line.startswith("id: "))

    reader = asyncio.create_task(read())
    for i in range(5):
        await db.run(lambda c, i=i: _write(c, session["id"], i))
    await sessions.request_end(db, "default", session["id"])
    await sessions.finish(db, session["id"], "cancelled", {})
    await reader
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) >= 8


async def _write(connection, session_id, i):
    from runtime.store import events

    await events.append(connection, session_id, [Event("sandbox.note", {"i": i})])


async def test_a_retry_is_answered_as_the_first_was_even_after_a_cancel(client, db):
    session = await create(client)
    path, headers = f"/v1/sessions/{session['id']}/events", {"Idempotency-Key": "again"}
    first = await client.post(path, json={"content": "hi"}, headers=headers)
    await client.post(f"/v1/sessions/{session['id']}/cancel")
    await db.execute("UPDATE nodes SET heartbeat_at = now() - interval '1 hour'")
    again = await client.post(path, json={"content": "hi"}, headers=headers)
    assert (again.status_code, again.json()) == (first.status_code, first.json())


@pytest.mark.parametrize(
    "path",
    ["/v1/sessions/%00", "/v1/sessions?after=%00", "/v1/sessions/x/events?after=99999999999999999999"],
)
async def test_values_that_nothing_can_hold_are_the_callers_fault(client, path):
    assert (await client.get(path)).status_code in (400, 404)


@pytest.mark.parametrize("headers", [{"Host": "["}, {"Origin": "http://["}])
async def test_a_broken_host_is_refused(client, headers):
    assert (await client.get("/v1/sessions", headers=headers)).status_code == 403


async def test_a_stream_from_the_end_of_an_ended_session_ends(client, db):
    session = await create(client)
    await sessions.request_end(db, "default", session["id"])
    await sessions.finish(db, session["id"], "cancelled", {})
    path = f"/v1/sessions/{session['id']}/events/stream"
    last = (await frames(client, path))[-1]
    for cursor in (last, last + 1000):
        assert await frames(client, path, {"Last-Event-ID": str(cursor)}) == []


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("body", "headers", "says"),
    [
        (b"", JSON, "the body is empty; send a JSON object, {} where there is nothing to say"),
        (b"[]", JSON, "the body must be a JSON object"),
        (b'"x"', JSON, "the body must be a JSON object"),
        (b"{}", {}, "the body's Content-Type is not given; send a JSON object as application/json"),
        (
            b"a=b",
            {"Content-Type": "application/x-www-form-urlencoded"},
            "application/x-www-form-urlencoded; send a JSON",
        ),
        (b'{"system": "\xff"}', JSON, "the body is not UTF-8: byte 12 cannot be read"),
        (b'{"tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}", JSON, "nested too deeply"),
        (b'{"tools":' + b"[" * 100 + b"]" * 100 + b"}", JSON, "goes deeper than 64 levels"),
        (b'{"seed": ' + b"9" * 5000 + b"}", JSON, "a number in it has too many digits"),
        (b'{"seed": NaN}', JSON, "seed: Input should be a finite number"),
        (b'{"limits": {"tool_timeout_s": 1e999}}', JSON, "limits.tool_timeout_s: Input should be less than"),
        (b'{"tools": [{"name": "auto", "description": "x", "command": ["true"]}]}', JSON, "is what tool_choice says"),
        (
            b'{"tools": [{"type": "session", "name": "s", "description": "x", "tool_choice": "nonsense"}]}',
            JSON,
            "tools: s: tool_choice is 'nonsense', but the session has no tools",
        ),
    ],
)
async def test_a_body_that_is_no_session_is_refused_with_what_is_wrong_and_nothing_is_made(client, body, headers, says):
    answer = await client.post("/v1/sessions", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert says in answer.json()["error"]["message"]
    assert (await client.get("/v1/sessions")).json()["data"] == []


async def test_an_address_that_does_not_exist_and_a_method_that_it_does_not_take_are_told_apart(client):
    nowhere = await client.get("/v1/sesions")
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")
    assert "/v1/openapi.json describes what there is" in nowhere.json()["detail"]
    for path, takes in (("/v1/sessions", "GET, POST"), ("/v1/approvals/q_1", "GET, POST"), ("/healthz", "GET")):
        other = await client.delete(path)
        assert (other.status_code, other.headers["Allow"]) == (405, takes)
        assert other.json()["detail"] == f"DELETE is not for {path}; it takes {takes}"


async def test_a_parameter_that_a_route_does_not_have_is_refused(client):
    answer = await client.get("/v1/sessions", params={"limt": 5})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limt")
    assert answer.json()["detail"] == "limt: there is no such parameter; do you mean limit?"


async def test_a_key_that_is_missing_or_unknown_is_asked_for_in_the_usual_way(client):
    answer = await client.get("/v1/sessions", headers={"Authorization": "Bearer no"})
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")


async def test_a_session_shows_how_its_answers_are_drawn(client):
    sampling = {"temperature": 0.5, "stop": ["END"], "logit_bias": {"7": -100}, "logprobs": 2, "speculation": "off"}
    made = (await client.post("/v1/sessions", json={"sampling": sampling})).json()
    assert {name: made["sampling"][name] for name in sampling} == sampling
    assert (made["sampling"]["min_p"], made["response_format"]) == (0.0, None)
    form = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    made = (await client.post("/v1/sessions", json={"response_format": form})).json()
    assert {name: value for name, value in made["response_format"].items() if value is not None} == form
