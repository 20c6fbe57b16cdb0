"""Errands of the API: what only a node can do, asked and waited for.

A node is reached as its steps are, through its own queue: no port of it is open, and where it lies is Temporal's to
know. It is a workflow of its own, not an update of the session's, so that it waits for no step of the session and an
answer comes while a tool runs. Where the API shares the folder of blobs with its node, as under `tenuto up`, it reads
them itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from fastapi import Request
from temporalio.client import Client, WorkflowFailureError
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError

from runtime.errors import NotFound, Unavailable, refusal
from runtime.store import Database, errands, fleet
from runtime.store.errands import Errand
from runtime.store.sessions import new_id
from runtime.workspaces import Answer, Blobs, answered
from sandbox import BlobCorrupt, BlobMissing
from workflows.contract import SESSIONS_QUEUE, ErrandIn, errand_workflow_id
from workflows.errand import ErrandWorkflow

WITHIN_S: Final = 30.0
_NODES: Final = 4  # that are asked at most, one after the other


async def of_workspace(
    request: Request, db: Database, tenant: str, row: Mapping[str, Any], kind: str, asked: dict[str, Any]
) -> Answer:
    """What a workspace holds. `row`: the session's. Raises what it was refused with, and Unavailable."""
    blobs: Blobs = request.app.state.blobs
    with contextlib.suppress(BlobMissing, BlobCorrupt):
        return await asyncio.to_thread(answered, blobs, kind, asked)
    return await of_any_node(request, db, tenant, row["session_id"], row["node_id"], kind, asked)


async def of_any_node(
    request: Request, db: Database, tenant: str, session_id: str, node_id: str | None, kind: str, asked: dict[str, Any]
) -> Answer:
    """Of the session's node, else of whichever has the blobs."""
    failure: Exception = Unavailable("no node is up")
    for queue in (await errands.queues(db, node_id))[:_NODES]:
        errand_id = new_id("err")
        await errands.ask(db, tenant, errand_id, kind, asked, session_id)
        try:
            done = await carried_out(request, db, errand_id, session_id, queue)
            return dict(done.result or {}), done.body
        except NotFound as missing:
            if missing.code != "blob_missing":
                raise
            failure = Unavailable("no node that is up has the files of this workspace")
        except Unavailable as away:
            failure = away
        finally:
            await errands.forget(db, errand_id)
    raise failure


async def carried_out(
    request: Request, db: Database, errand_id: str, session_id: str, queue: str, *, within_s: float = WITHIN_S
) -> Errand:
    """The errand once it is done. Raises what it was refused with; Unavailable where the node did not do it in time."""
    found = await errands.get(db, errand_id)
    if found is None or found.state == "asked":
        await _run(request.app.state.temporal, ErrandIn(session_id, errand_id, queue, within_s))
        found = await errands.get(db, errand_id)
    if found is None or found.state == "asked":
        raise Unavailable("the node did not do what it was asked")
    if found.state == "refused":
        raise refusal(found.result or {"message": "it was refused"})
    return found


async def of_nodes(
    request: Request, db: Database, tenant: str, kind: str, asked: dict[str, Any], node: str | None, within_s: float
) -> list[tuple[str, Mapping[str, Any]]]:
    """What each node answers, by its name; `error` is why one did not. Raises NotFound."""
    alive = [row for row in await fleet.nodes(db) if row["alive"] and node in (None, row["node_id"])]
    if node is not None and not alive:
        raise NotFound(f"there is no node {node} that is up")

    async def one(row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        errand_id = new_id("err")
        await errands.ask(db, tenant, errand_id, kind, asked, None)
        try:
            done = await carried_out(request, db, errand_id, "", row["queue"], within_s=within_s)
            return row["node_id"], done.result or {}
        except Unavailable as away:
            return row["node_id"], {"error": str(away)}
        finally:
            await errands.forget(db, errand_id)

    return list(await asyncio.gather(*(one(row) for row in alive)))


async def _run(client: Client, what: ErrandIn) -> None:
    try:
        async with asyncio.timeout(what.within_s + 5):
            await client.execute_workflow(
                ErrandWorkflow.run,
                what,
                id=errand_workflow_id(what.errand_id),
                task_queue=SESSIONS_QUEUE,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                execution_timeout=timedelta(seconds=what.within_s + 5),
            )
    except TimeoutError:
        raise Unavailable(f"no node answered within {what.within_s:g} seconds") from None
    except WorkflowFailureError as failure:
        cause = getattr(failure.cause, "cause", None) or failure.cause
        raise Unavailable(f"the node could not do it: {cause}") from failure
    except RPCError as error:
        raise Unavailable(f"Temporal does not answer: {error.message}") from error
