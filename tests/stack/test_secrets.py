"""Secrets in a real call: the tool has them, and nothing that is kept or told does."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator

import pytest
from temporalio.client import Client

from runtime.store import Database
from tests.runtime.api.test_secrets import every_row
from workflows.contract import workflow_id

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]

ECHO = "import base64, os; v = os.environ['V']; print('it is', v, base64.b64encode(v.encode()).decode())"


def forms(secret: str) -> Iterator[bytes]:
    plain = secret.encode()
    yield plain
    yield plain.hex().encode()  # bytes as Postgres shows them
    yield from (base64.b64encode(bytes(shift) + plain)[4:-4] for shift in range(3))


async def test_a_secret_is_in_no_history_log_row_or_answer(client, stack, web):
    by_name, literal = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    await client.put("/v1/secrets/STACK_TOKEN", {"value": by_name})
    reference = {"secret": "STACK_TOKEN", "prefix": "Bearer "}
    tools = [
        {
            "type": "http", "name": "ask", "description": "Ask.", "url": f"{web.url}/secret", "method": "POST",
            "headers": {"Authorization": reference, "X-Other": literal},
        },
        {"name": "echo", "description": "Echo.", "command": ["python3", "-c", ECHO], "env": {"V": reference}},
    ]  # fmt: skip
    session = await client.sessions.create(tools=tools, limits={"max_think_tokens": 60}, seed=41)
    calls = []
    for name in ("ask", "echo"):
        turn = await session.run(f"Call {name}.", tool_choice=name, max_tool_rounds=1)
        calls += turn.tool_calls
    assert [(call["name"], call["code"]) for call in calls] == [("ask", 200), ("echo", 0)]
    seen = next(each for each in web.requests if each["path"] == "/secret")["headers"]
    assert (seen["Authorization"], seen["X-Other"]) == (f"Bearer {by_name}", literal)
    assert calls[1]["preview"].startswith("it is ***")

    state = stack.state()
    temporal = await Client.connect(state["temporal"])
    history = (await temporal.get_workflow_handle(workflow_id(session.id)).fetch_history()).to_json()
    async with Database(state["dsn"]) as db:
        rows = await every_row(db)
    at = f"/v1/sessions/{session.id}"
    parts = ("", "/steps", "/attempts", "/checkpoints", "/transcript", "/events?limit=1000", "/kv", "/kv/decisions")
    answers = [await client.get(at + part) for part in parts]
    answers += [await client.get(path) for path in ("/v1/sessions", "/v1/secrets", "/v1/secrets/STACK_TOKEN")]
    logs = {path.name: path.read_bytes() for path in stack.settings.logs_dir.iterdir()}
    places = {"history": history.encode(), "rows": rows.encode(), "answers": repr(answers).encode(), **logs}
    found = {name for name, text in places.items() for one in (by_name, literal) for form in forms(one) if form in text}
    assert found == set()
    await session.cancel()
    await client.delete("/v1/secrets/STACK_TOKEN")
