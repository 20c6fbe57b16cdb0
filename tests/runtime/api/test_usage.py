"""Usage over the API: each tenant sees its own, in JSON or CSV, with what it costs."""

from __future__ import annotations

import csv
import io

import httpx
import pytest
from fastapi import FastAPI

from runtime.prices import Prices
from runtime.store import Database
from tests.runtime.api.test_keys import bearer, make

ROWS = """
INSERT INTO usage (session_id, step_no, attempt_no, tenant_id, model, kind, settled_at, sampled, device, host, nvme,
    shared, recomputed, computed, prefill_ms, engine_ms, tool_ms)
VALUES ('ses_a', 1, 1, 'default', 'small', 'think', '2026-03-01 12:00Z', 10, 0, 0, 0, 0, 0, 100, 50, 100, 0),
    ('ses_a', 2, 1, 'default', 'small', 'tool', '2026-03-01 12:00Z', 0, null, null, null, null, null, null, null, null,
     1500),
    ('ses_b', 1, 1, 'default', 'big', 'think', '2026-03-02 00:00Z', 20, 40, 0, 0, 0, 0, 0, null, 200, 0),
    ('ses_c', 1, 1, 'acme', 'small', 'think', '2026-03-02 12:00Z', 30, null, null, null, null, null, null, null, null,
     0)
"""
MARCH = {"from": "2026-03-01", "to": "2026-04-01T00:00:00Z"}


@pytest.fixture
async def acme(client: httpx.AsyncClient, app: FastAPI) -> dict[str, str]:
    await client.post("/v1/admin/tenants", json={"id": "acme"})
    db: Database = app.state.db
    await db.execute(ROWS)
    return bearer((await make(client, tenant="acme"))["key"])


async def test_each_tenant_sees_its_own_usage_and_an_operator_all(
    client: httpx.AsyncClient, acme: dict[str, str]
) -> None:
    own = (await client.get("/v1/usage", params=MARCH)).json()["data"]
    assert [(one["id"], one["sampled_tokens"], one["steps"]) for one in own] == [
        ("2026-03-01", 10, 2), ("2026-03-02", 20, 1)
    ]  # fmt: skip
    assert (own[0]["prefilled_tokens"], own[0]["engine_s"], own[0]["tool_s"], own[0]["cost"]) == (100, 0.1, 1.5, None)
    assert (own[1]["cached_tokens"], own[1]["avoided_s"]) == (40, None)  # its speed was not measured
    (theirs,) = (await client.get("/v1/usage", params={**MARCH, "group_by": "session"}, headers=acme)).json()["data"]
    assert (theirs["id"], theirs["sampled_tokens"], theirs["prefilled_tokens"]) == ("ses_c", 30, None)
    assert theirs["unknown_steps"] == 1
    everybody = (await client.get("/v1/admin/usage", params=MARCH)).json()["data"]
    assert [(one["id"], one["sampled_tokens"]) for one in everybody] == [("acme", 30), ("default", 30)]
    one = (await client.get("/v1/admin/usage", params={**MARCH, "tenant": "acme", "group_by": "model"})).json()["data"]
    assert [(row["id"], row["sampled_tokens"]) for row in one] == [("small", 30)]


async def test_what_one_session_used_is_told_to_its_tenant_alone(
    client: httpx.AsyncClient, acme: dict[str, str]
) -> None:
    asked = {**MARCH, "group_by": "session", "session": "ses_a"}
    (own,) = (await client.get("/v1/usage", params=asked)).json()["data"]
    assert (own["id"], own["sampled_tokens"]) == ("ses_a", 10)
    assert (await client.get("/v1/usage", params=asked, headers=acme)).json()["data"] == []
    assert (await client.get("/v1/usage", params={**asked, "session": "ses_none"})).json()["data"] == []


async def test_a_price_file_makes_money_of_it_and_what_is_not_known_costs_none(
    client: httpx.AsyncClient, app: FastAPI, acme: dict[str, str]
) -> None:
    models = {"big": {"sampled_per_million": 2_000_000}}
    app.state.prices = Prices.model_validate(
        {"currency": "EUR", "sampled_per_million": 1_000_000, "prefilled_per_million": 10_000, "models": models}
    )
    rows = (await client.get("/v1/admin/usage", params={**MARCH, "group_by": "session"})).json()["data"]
    assert [(one["id"], one["cost"], one["currency"]) for one in rows] == [
        ("ses_a", 11.0, "EUR"), ("ses_b", 40.0, "EUR"), ("ses_c", None, "EUR")
    ]  # fmt: skip


async def test_usage_comes_as_csv_with_a_row_of_names(client: httpx.AsyncClient, acme: dict[str, str]) -> None:
    answer = await client.get("/v1/admin/usage", params={**MARCH, "format": "csv", "group_by": "session"})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["id"] for row in rows] == ["ses_a", "ses_b", "ses_c"]
    assert (rows[0]["sampled_tokens"], rows[2]["prefilled_tokens"], rows[2]["cost"]) == ("10", "", "")


async def test_groups_come_in_pages_and_odd_times_are_refused(client: httpx.AsyncClient, acme: dict[str, str]) -> None:
    asked = {**MARCH, "group_by": "session", "limit": 2}
    page = (await client.get("/v1/admin/usage", params=asked)).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (["ses_a", "ses_b"], True)
    rest = (await client.get("/v1/admin/usage", params={**asked, "after": page["last_id"]})).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (["ses_c"], False)
    assert (await client.get("/v1/usage")).json()["data"] == []
    for wrong in (
        {"from": "2026-03-02", "to": "2026-03-01"},
        {"from": "yesterday"},
        {"from": -576},
        {"to": "0001-01-01T00:00:00+14:00"},
        {"group_by": "hour"},
        {"after": "2026-01-01"},
        {"format": "xml"},
    ):
        assert (await client.get("/v1/usage", params=wrong)).status_code == 400, wrong
    assert (await client.get("/v1/usage", params={"to": "0001-01-01T00:00:00Z"})).json()["data"] == []
    assert (await client.get("/v1/usage", params={"to": "9999-12-31T23:59:59Z", "from": "0001-01-01"})).is_success
