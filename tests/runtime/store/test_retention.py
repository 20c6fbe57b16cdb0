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
