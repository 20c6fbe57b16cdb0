"""Webhooks as the Standard Webhooks specification has them: secrets, signatures, and how a node hands deliveries to
Temporal (https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import logging
import secrets
from collections.abc import Sequence
from typing import Final

from temporalio.client import Client
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError

from runtime.delivery import RPC_TIMEOUT
from runtime.store import Database, outbox
from workflows.contract import SESSIONS_QUEUE, DeliveryIn, delivery_workflow_id
from workflows.webhook import DeliveryWorkflow

log = logging.getLogger(__name__)

PREFIX: Final = "whsec_"
SECRET: Final = "webhook secret"  # the name under which it is sealed
SECRET_BYTES: Final = 32
LOOK_EVERY_S: Final = 1.0
# Seconds after each try, but for the last: eight tries in about a day.
WAITS_S: Final[Sequence[float]] = (1, 10, 60, 600, 3600, 4 * 3600, 18 * 3600)
TRIES: Final = len(WAITS_S) + 1


def new_secret() -> str:
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signature(secret: str, delivery_id: str, timestamp: int, body: bytes) -> str:
    """`v1,` and in base64 the HMAC-SHA256 of id, time (seconds) and body."""
    key = base64.b64decode(secret.removeprefix(PREFIX))
    return "v1," + base64.b64encode(hmac.digest(key, f"{delivery_id}.{timestamp}.".encode() + body, "sha256")).decode()


def headers(delivery_id: str, timestamp: int, body: bytes, secrets: Sequence[str]) -> dict[str, str]:
    return {
        "content-type": "application/json",
        "user-agent": "tenuto-webhooks/1",
        "webhook-id": delivery_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signature(secret, delivery_id, timestamp, body) for secret in secrets),
    }


async def hand_over(client: Client, db: Database) -> None:
    """Start the workflow of every delivery that has none. One that was started and not noted is started once."""
    for row in await outbox.to_hand_over(db):
        await _start(client, DeliveryIn(row["delivery_id"], row["round"]))
        await outbox.note_handed(db, row["delivery_id"], row["round"])


async def _start(client: Client, what: DeliveryIn) -> None:
    with contextlib.suppress(WorkflowAlreadyStartedError):  # it runs
        await client.start_workflow(
            DeliveryWorkflow.run,
            what,
            id=delivery_workflow_id(what),
            task_queue=SESSIONS_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            rpc_timeout=RPC_TIMEOUT,
        )


async def hand_over_forever(client: Client, db: Database) -> None:
    while True:
        try:
            await hand_over(client, db)
        except RPCError as error:
            log.info("webhooks are not handed over yet: %s", error)
        except Exception:
            log.exception("webhooks could not be handed over; trying again")
        await asyncio.sleep(LOOK_EVERY_S)
