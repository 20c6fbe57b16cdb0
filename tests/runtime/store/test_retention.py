from runtime.store import fleet, retention, sessions

TENANT = fleet.DEFAULT_TENANT


async def counts(db) -> dict[str, int]:
    return {table: (await db.fetchrow(f"SELECT count(*) AS n FROM {table}"))["n"] for table in retention._TABLES}


async def test_what_ended_long_ago_is_removed_whole_and_nothing_else_is(story, db):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    await story.begin(owner, 2)
    await sessions.request_end(db, TENANT, story.session_id)
    await sessions.finish(db, story.session_id, "cancelled", {})
    await sessions.create(db, TENANT, "ses_open", {"model": "m"}, 1)
    assert await retention.sweep(db, 1) == 0
    await db.execute("UPDATE sessions SET updated_at = now() - interval '2 days'")
    assert await retention.sweep(db, 1) == 1
    left = await counts(db)
    assert left == dict.fromkeys(retention._TABLES, 0) | {"sessions": 1, "events": 1}


async def test_whatever_names_a_session_is_removed_before_it(db):
    rows = await db.fetch(
        "SELECT c.conrelid::regclass::text AS of, c.confrelid::regclass::text AS to FROM pg_constraint c"
        " WHERE c.contype = 'f' AND c.confrelid::regclass::text = ANY($1)",
        list(retention._TABLES),
    )
    order = {table: place for place, table in enumerate(retention._TABLES)}
    assert {row["of"] for row in rows} <= set(order)
    assert [row["of"] for row in rows if order[row["of"]] > order[row["to"]]] == []


async def test_a_session_with_tool_servers_is_removed_too(story, db):
    await story.placed()
    await db.execute(
        "INSERT INTO session_tools (session_id, tenant_id, listings) VALUES ($1, $2, '{}')", story.session_id, TENANT
    )
    await sessions.request_end(db, TENANT, story.session_id)
    await sessions.finish(db, story.session_id, "cancelled", {})
    assert await retention.sweep(db, -1) == 1
