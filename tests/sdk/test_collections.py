"""What a tenant has beside sessions: which request each call is, and lists over all their pages."""

from __future__ import annotations

import json

import pytest
import tenuto

from tests.sdk.server import Answer, as_json

TIME = "2026-01-01T00:00:00Z"
AGENT = {"id": "a", "version": 1, "tools": ["bash"]}
SCHEDULE = {"id": "sch_1", "agent": "a", "message": "Go."}
RUN = {"id": "run_1", "session_id": "ses_1"}
SECRET = {"id": "S", "created_at": TIME, "updated_at": TIME}
WEBHOOK = {"id": "whk_1", "url": "https://x", "types": ["session.*"]}
DELIVERY = {"id": "whd_1", "webhook": "whk_1", "type": "session.idle", "state": "sent"}
KEY = {"id": "key_1", "tenant": "t", "scope": "use"}
TENANT = {"id": "t", "state": "enabled", "quotas": {"sandboxes": None}}


@pytest.mark.parametrize(
    ("call", "row", "request_line", "body"),
    [
        (lambda c: c.agents.create("a", tools=["bash"]), AGENT, "POST /v1/agents", {"name": "a", "tools": ["bash"]}),
        (lambda c: c.agents.get("a@3"), AGENT, "GET /v1/agents/a@3", None),
        (lambda c: c.agents.revise("a", system="x"), {"id": 2}, "POST /v1/agents/a/versions", {"system": "x"}),
        (lambda c: c.agents.version("a", 2), {"id": 2}, "GET /v1/agents/a/versions/2", None),
        (lambda c: c.agents.archive("a"), AGENT, "POST /v1/agents/a/archive", {}),
        (
            lambda c: c.schedules.create("a", "Go.", every_s=60, paused=True),
            SCHEDULE,
            "POST /v1/schedules",
            {"agent": "a", "message": "Go.", "every_s": 60, "paused": True},
        ),
        (lambda c: c.schedules.get("sch_1"), SCHEDULE, "GET /v1/schedules/sch_1", None),
        (
            lambda c: c.schedules.change("sch_1", cron="@daily"),
            SCHEDULE,
            "PATCH /v1/schedules/sch_1",
            {"cron": "@daily"},
        ),
        (lambda c: c.schedules.pause("sch_1"), SCHEDULE, "POST /v1/schedules/sch_1/pause", {}),
        (lambda c: c.schedules.unpause("sch_1"), SCHEDULE, "POST /v1/schedules/sch_1/unpause", {}),
        (lambda c: c.schedules.trigger("sch_1"), RUN, "POST /v1/schedules/sch_1/trigger", {}),
        (lambda c: c.secrets.set("S", "v"), SECRET, "PUT /v1/secrets/S", {"value": "v"}),
        (lambda c: c.secrets.get("S"), SECRET, "GET /v1/secrets/S", None),
        (
            lambda c: c.webhooks.create("https://x", ["session.*"]),
            WEBHOOK,
            "POST /v1/webhooks",
            {"url": "https://x", "types": ["session.*"], "description": ""},
        ),
        (lambda c: c.webhooks.get("whk_1"), WEBHOOK, "GET /v1/webhooks/whk_1", None),
        (lambda c: c.webhooks.change("whk_1", disabled=True), WEBHOOK, "PATCH /v1/webhooks/whk_1", {"disabled": True}),
        (
            lambda c: c.webhooks.rotate("w", overlap_s=0),
            WEBHOOK,
            "POST /v1/webhooks/w/rotate",
            {"overlap_s": 0},
        ),
        (lambda c: c.webhooks.test("whk_1"), DELIVERY, "POST /v1/webhooks/whk_1/test", {}),
        (
            lambda c: c.webhooks.replay("whk_1", "whd_1"),
            DELIVERY,
            "POST /v1/webhooks/whk_1/deliveries/whd_1/replay",
            {},
        ),
        (lambda c: c.keys.own(), KEY, "GET /v1/keys/self", None),
        (
            lambda c: c.keys.create(tenant="t", name="ci"),
            KEY,
            "POST /v1/admin/keys",
            {"tenant": "t", "scope": "use", "name": "ci"},
        ),
        (lambda c: c.keys.get("key_1"), KEY, "GET /v1/admin/keys/key_1", None),
        (lambda c: c.keys.rotate("key_1", grace_s=5), KEY, "POST /v1/admin/keys/key_1/rotate", {"grace_s": 5}),
        (lambda c: c.keys.revoke("key_1"), KEY, "POST /v1/admin/keys/key_1/revoke", {}),
        (
            lambda c: c.tenants.create("t", quotas={"sandboxes": 2}),
            TENANT,
            "POST /v1/admin/tenants",
            {"id": "t", "quotas": {"sandboxes": 2}},
        ),
        (lambda c: c.tenants.get("t"), TENANT, "GET /v1/admin/tenants/t", None),
        (
            lambda c: c.tenants.limit("t", sandboxes=None),
            TENANT,
            "PATCH /v1/admin/tenants/t",
            {"quotas": {"sandboxes": None}},
        ),
        (lambda c: c.tenants.disable("t"), TENANT, "POST /v1/admin/tenants/t/disable", {}),
        (lambda c: c.tenants.enable("t"), TENANT, "POST /v1/admin/tenants/t/enable", {}),
    ],
)
def test_each_call_is_one_request_and_its_answer(client, server, call, row, request_line, body) -> None:
    server.replies = [as_json(row)]
    assert call(client).id == row["id"]
    (seen,) = server.seen
    assert f"{seen.method} {seen.path}" == request_line
    assert (json.loads(seen.body) if seen.body else None) == body
    assert (seen.key is None) == (seen.method in ("GET", "PATCH"))


@pytest.mark.parametrize(
    ("call", "row", "path"),
    [
        (lambda c: c.agents.list(), AGENT, "/v1/agents"),
        (lambda c: c.agents.list(archived=True), AGENT, "/v1/agents?archived=true"),
        (lambda c: c.agents.versions("a"), {"id": 1}, "/v1/agents/a/versions"),
        (lambda c: c.schedules.list(), SCHEDULE, "/v1/schedules"),
        (lambda c: c.schedules.runs("sch_1"), RUN, "/v1/schedules/sch_1/runs"),
        (lambda c: c.secrets.list(), SECRET, "/v1/secrets"),
        (lambda c: c.webhooks.list(), WEBHOOK, "/v1/webhooks"),
        (lambda c: c.webhooks.deliveries("whk_1"), DELIVERY, "/v1/webhooks/whk_1/deliveries"),
        (lambda c: c.keys.list(), KEY, "/v1/admin/keys"),
        (lambda c: c.tenants.list(), TENANT, "/v1/admin/tenants"),
        (
            lambda c: c.usage.list(),
            {"id": "2026-01-01", "sessions": 1, "steps": 2, "sampled_tokens": 3},
            "/v1/usage?group_by=day",
        ),
        (
            lambda c: c.usage.list(tenant="t", since="2026-01-01"),
            {"id": "x", "sessions": 1, "steps": 2, "sampled_tokens": 3},
            "/v1/admin/usage?group_by=day&from=2026-01-01&tenant=t",
        ),
    ],
)
def test_a_list_goes_over_all_its_pages(client, server, call, row, path) -> None:
    def page(more: bool) -> Answer:
        return as_json({"data": [row], "has_more": more, "last_id": "cursor"})

    server.replies = [page(True), page(False)]
    assert [one.id for one in call(client)] == [row["id"]] * 2
    first, second = server.seen
    assert first.path == path
    assert second.path in (f"{path}?after=cursor", f"{path}&after=cursor")


def test_what_is_removed_is_gone(client, server) -> None:
    server.replies = [as_json({"id": "x", "deleted": True})]
    client.schedules.delete("sch_1")
    client.secrets.delete("S")
    client.webhooks.delete("whk_1")
    assert [f"{seen.method} {seen.path}" for seen in server.seen] == [
        "DELETE /v1/schedules/sch_1",
        "DELETE /v1/secrets/S",
        "DELETE /v1/webhooks/whk_1",
    ]


def test_an_agent_can_name_functions(client, server) -> None:
    @tenuto.tool
    def now() -> str:
        """The time."""
        return "noon"

    server.replies = [as_json(AGENT)]
    client.agents.create("a", tools=[now, "bash"])
    told, builtin = json.loads(server.seen[0].body)["tools"]
    assert (told["type"], told["name"], builtin) == ("client", "now", "bash")
