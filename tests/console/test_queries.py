"""What pages of the console ask the database is found by an index once there is much."""

from __future__ import annotations

import asyncpg
import pytest

from bench.console import NEEDED
from bench.console_fill import fill
from runtime.store import Database, attention, search
from runtime.store.search import Filter

SESSIONS = 2000


@pytest.fixture
async def filled(dsn: str) -> asyncpg.Connection:
    await fill(dsn, SESSIONS)
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


async def plan(connection: asyncpg.Connection, sql: str, *values: object) -> str:
    await connection.execute("SET plan_cache_mode = force_generic_plan")
    return "\n".join(row[0] for row in await connection.fetch(f"EXPLAIN {sql}", *values))


@pytest.mark.parametrize(
    "wanted",
    [Filter(), Filter(tenant_id="tenant-3"), Filter(tier="shared"), Filter(tier="device"), Filter(older_than_s=1e6)],
    ids=["all", "tenant", "rare tier", "tier", "age"],
)
async def test_sessions_are_listed_in_order_by_an_index(filled, wanted):
    matches, values = wanted.conditions()
    told = await plan(
        filled, f"SELECT s.session_id {matches} ORDER BY s.created_at DESC, s.session_id DESC LIMIT 25", *values
    )
    assert "Seq Scan on sessions" not in told, told
    assert "Seq Scan on kv_residency" not in told, told


async def test_what_needs_a_person_is_found_by_an_index(filled):
    for sql, values in (
        (attention._STUCK, (300.0, 20)),
        (attention._FAILED, (20,)),
        (attention._LATENCIES, (2000,)),
    ):
        told = await plan(filled, sql, *values)
        assert "Seq Scan on s" not in told, told


async def test_each_index_that_the_bench_takes_away_is_there(filled):
    rows = await filled.fetch("SELECT indexname FROM pg_indexes WHERE schemaname = 'public'")
    assert set(NEEDED) <= {row["indexname"] for row in rows}


async def test_a_filter_finds_what_a_look_at_every_row_finds(filled, dsn):
    rows = await filled.fetch("SELECT s.*, k.tier FROM sessions s LEFT JOIN kv_residency k USING (session_id)")
    async with Database(dsn) as db:
        for wanted, holds in (
            (Filter(), lambda row: True),
            (Filter(states=["failed", "waiting"]), lambda row: row["state"] in ("failed", "waiting")),
            (Filter(tenant_id="tenant-3"), lambda row: row["tenant_id"] == "tenant-3"),
            (Filter(tier="host"), lambda row: row["tier"] == "host"),
            (Filter(text="00f"), lambda row: "00f" in row["session_id"]),
            (Filter(model="bench", node_id="node-1"), lambda row: True),
            (Filter(tier="none", states=["idle"]), lambda row: (row["tier"], row["state"]) == ("none", "idle")),
        ):
            found = {row["session_id"] for row in await search.sessions(db, wanted, "newest", None, SESSIONS + 1)}
            assert found == {row["session_id"] for row in rows if holds(row)}
            ended = ("cancelling", "cancelled", "completed")
            open_ones = sum(holds(row) and row["state"] not in ended for row in rows)
            assert await search.count_open(db, wanted) == open_ones
