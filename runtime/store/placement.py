"""Which node a session goes to: back to its own while that one's lease lives, else to the least loaded one.

    fresh     its heartbeat is younger than the lease; of a queue that lost a step just now, much younger
    serves    it has the session's model, and its engine has answered lately
    open      fresh, serves, and is not draining

A lease alone moves nobody: placement is asked for when a session begins, and when a step was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import asyncpg

from runtime.errors import NotFound, Unavailable
from runtime.store import events
from runtime.store.database import Database
from runtime.store.fleet import NODE_ALIVE_S
from runtime.store.held import locked
from runtime.store.sessions import move
from runtime.store.values import Event
from workflows.states import Event as Move
from workflows.states import State

LOST_AFTER_S: Final = 3.5  # a heartbeat is due every second
ENGINE_AWAY_S: Final = 9.0  # a restart takes two or three; a node gives up an engine that is silent for eight
ENGINE_ANSWERS_S: Final = 2.5
_LOCK: Final = 0x74656E75746F0001  # one placement after the other, or two sessions would see the same load


@dataclass(frozen=True)
class Node:
    """A node as placement sees it. `busy`: sessions that think or run a tool there; `held`: all open ones."""

    node_id: str
    boot: str
    queue: str
    age_s: float
    engine_age_s: float
    draining: bool
    busy: int
    held: int


@dataclass(frozen=True)
class Placed:
    node: Node
    epoch: int
    came_from: str | None
    reason: str  # new, returned, lost or draining

    @property
    def engine_answers(self) -> bool:
        return self.node.engine_age_s < ENGINE_ANSWERS_S


def is_open(node: Node, lost_queue: str) -> bool:
    """Whether a session may go there now; `lost_queue` has just lost a step of it."""
    lease_s = LOST_AFTER_S if node.queue == lost_queue else NODE_ALIVE_S
    return node.age_s < lease_s and node.engine_age_s < ENGINE_AWAY_S and not node.draining


def choose(home: str | None, lost_queue: str, nodes: Sequence[Node]) -> tuple[Node, str] | None:
    """The node and the reason; None where no node is open."""
    candidates = [node for node in nodes if is_open(node, lost_queue)]
    if not candidates:
        return None
    own = next((node for node in candidates if node.node_id == home), None)
    if own is not None:
        return own, "returned"
    least = min(candidates, key=lambda node: (node.busy, node.held, node.node_id))
    if home is None:
        return least, "new"
    left = next((node for node in nodes if node.node_id == home), None)
    return least, "draining" if left is not None and left.draining else "lost"


async def place(
    db: Database, session_id: str, lost_queue: str = "", *, known: int = 0, by: tuple[str, str] | None = None
) -> Placed:
    """Choose a node and raise the epoch: whoever held the session before can write no more.

    `known`: the epoch of the last placement that the session's workflow heard of. One that was made since, by an
    attempt whose answer was lost, or after the one that asks here was stopped, stands while its node is open.
    `by`: id and boot of the node that asks, which is alive, then. Raises NotFound, Unavailable.
    """

    async def work(connection: asyncpg.Connection) -> Placed:
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
        row = await connection.fetchrow(
            "SELECT node_id, node_boot, epoch, config ->> 'model' AS model FROM sessions WHERE session_id = $1"
            " FOR UPDATE",
            session_id,
        )
        if row is None:
            raise NotFound(f"there is no session {session_id}")
        if by is not None:
            await connection.execute("UPDATE nodes SET heartbeat_at = now() WHERE node_id = $1 AND boot = $2", *by)
        nodes = await _nodes(connection, row["model"])
        if 0 < known < row["epoch"] and (there := _home(row, lost_queue, nodes)) is not None:
            return Placed(there, row["epoch"], row["node_id"], "returned")
        chosen = choose(row["node_id"], lost_queue, nodes)
        if chosen is None:
            raise Unavailable(f"no node that serves {row['model']} takes sessions now")
        node, reason = chosen
        epoch = await _take(connection, session_id, node.node_id, node.boot, row["node_id"], reason)
        return Placed(node, epoch, row["node_id"], reason)

    return await db.run(work)


def _home(row: asyncpg.Record, lost_queue: str, nodes: Sequence[Node]) -> Node | None:
    """The node that has the session, if it lives still and is open."""
    own = (node for node in nodes if (node.node_id, node.boot) == (row["node_id"], row["node_boot"]))
    return next((node for node in own if is_open(node, lost_queue)), None)


async def take(db: Database, session_id: str, node_id: str, boot: str) -> int:
    """Take a session over in order to end it; returns its epoch. Raises NotFound."""

    async def work(connection: asyncpg.Connection) -> int:
        row = await connection.fetchrow("SELECT node_id FROM sessions WHERE session_id = $1 FOR UPDATE", session_id)
        if row is None:
            raise NotFound(f"there is no session {session_id}")
        return await _take(connection, session_id, node_id, boot, row["node_id"], "ending")

    return await db.run(work)


async def _take(
    connection: asyncpg.Connection, session_id: str, node_id: str, boot: str, came_from: str | None, reason: str
) -> int:
    epoch = int(
        await connection.fetchval(
            "UPDATE sessions SET epoch = epoch + 1, node_id = $2, node_boot = $3, updated_at = now()"
            " WHERE session_id = $1 RETURNING epoch",
            session_id,
            node_id,
            boot,
        )
    )
    session = await locked(connection, session_id, epoch)
    if session.state == State.CREATED:
        await move(connection, session, Move.PROVISION)
    about = {"node": node_id, "from": came_from, "epoch": epoch, "reason": reason}
    await events.append(connection, session_id, [Event("session.placed", about)])
    return epoch


async def _nodes(connection: asyncpg.Connection, model: str) -> list[Node]:
    rows: list[Any] = await connection.fetch(
        "SELECT node_id, boot, queue, draining, extract(epoch FROM now() - heartbeat_at)::float8 AS age_s,"
        " extract(epoch FROM now() - engine_at)::float8 AS engine_age_s,"
        " (SELECT count(*) FROM sessions s WHERE s.node_id = n.node_id"
        "   AND s.state IN ('provisioning', 'thinking', 'tool_running')) AS busy,"
        " (SELECT count(*) FROM sessions s WHERE s.node_id = n.node_id"
        "   AND s.state NOT IN ('cancelled', 'completed')) AS held"
        " FROM nodes n WHERE card ->> 'model' = $1 AND heartbeat_at > now() - interval '10 minutes'",
        model,
    )
    return [Node(**dict(row)) for row in rows]


async def others_open(db: Database, node_id: str) -> bool:
    """Whether another node could take this one's sessions."""
    return await db.run(lambda connection: _others(connection, node_id), patience_s=2)


async def _others(connection: asyncpg.Connection, node_id: str) -> bool:
    model = await connection.fetchval("SELECT card ->> 'model' FROM nodes WHERE node_id = $1", node_id)
    return any(is_open(node, "") for node in await _nodes(connection, model) if node.node_id != node_id)


async def engine_answered_since(db: Database, node_id: str, boot: str, age_s: float) -> bool:
    """Whether the engine of this life of a node has answered within `age_s`."""
    row = await db.fetchrow(
        "SELECT engine_at > now() - make_interval(secs => $3) AS yes FROM nodes WHERE node_id = $1 AND boot = $2",
        node_id,
        boot,
        age_s,
    )
    return bool(row and row["yes"])
