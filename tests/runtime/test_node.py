"""What a node does beside its steps."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from runtime.node import reap
from runtime.store import Database, fleet, sandboxes
from sandbox import Driver
from tests.runtime.store.conftest import Story


class BusyDriver:
    """While it looks for sandboxes, a session announces one and creates it."""

    def __init__(self, db: Database, session_id: str) -> None:
        self.db, self.session_id = db, session_id
        self.there = ["lost"]

    async def found(self) -> list[str]:
        found = list(self.there)
        await sandboxes.open_one(self.db, fleet.DEFAULT_TENANT, self.session_id, "young", "node-1", "fake")
        self.there.append("young")
        return found

    async def reap(self, live: Collection[str], among: Collection[str]) -> list[str]:
        return sorted(set(among) - set(live))


async def test_a_sandbox_that_is_made_while_the_node_reaps_is_left_alone(db: Database) -> None:
    session = Story(db)
    await session.placed()
    driver = BusyDriver(db, session.session_id)
    assert await reap(db, cast(Driver, driver)) == ["lost"]
    assert await reap(db, cast(Driver, driver)) == ["lost"]
