"""One try at a webhook's delivery: within the operator's list of hosts, signed, without following redirects."""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from typing import Any

import httpx2

from runtime import webhooks
from runtime.sealing import SealError
from runtime.steps.services import Services
from runtime.store import outbox
from runtime.tools.egress import client
from sandbox import EgressRefused
from workflows.contract import DeliveryIn, DeliveryOut

TIMEOUT_S = 15.0  # of silence
WHOLE_S = 30.0  # of a try, however the answer comes
ANSWER_BYTES = 64 << 10
MOST_S = 86_400.0  # that a receiver may ask us to wait
GONE, ASKS_TO_WAIT = 410, (429, 503)
_DONE = DeliveryOut(0.0)


async def send(s: Services, what: DeliveryIn) -> DeliveryOut:
    """Try once, unless it is too early or there is nothing left to do."""
    row = await outbox.to_send(s.db, what.delivery_id, what.round)
    if row is None:
        return _DONE
    if row["left_s"] > 1.0 and row["attempts"]:
        return DeliveryOut(row["left_s"])
    if row["disabled_at"] is not None:
        await outbox.cancel(s.db, row, "its webhook is disabled")
        return _DONE
    status, error, asked_s = await _post(s, row)
    if status is not None and 200 <= status < 300:
        await outbox.note_try(s.db, row, "delivered", status, None, 0.0)
        return _DONE
    if status == GONE:
        await outbox.disable(s.db, row["webhook_id"], "its receiver answered 410 Gone")
    if status == GONE or row["attempts"] + 1 >= webhooks.TRIES:
        await outbox.note_try(s.db, row, "failed", status, error, 0.0)
        return _DONE
    wait_s = max(webhooks.WAITS_S[row["attempts"]] * random.uniform(0.9, 1.1), asked_s)
    await outbox.note_try(s.db, row, "pending", status, error, wait_s)
    return DeliveryOut(wait_s)


async def _post(s: Services, row: Any) -> tuple[int | None, str | None, float]:
    """Status, what went wrong, and for how long the receiver asks to be left alone."""
    body = row["body"].encode()
    try:
        kept = [one for one in (row["secret"], row["old_secret"]) if one]
        keys = [s.sealer.open(row["tenant_id"], webhooks.SECRET, one) for one in kept]
        signed = webhooks.headers(row["delivery_id"], int(time.time()), body, keys)
        async with asyncio.timeout(WHOLE_S), client(s.egress, {}, TIMEOUT_S, ANSWER_BYTES) as http:
            async with http.stream("POST", row["url"], content=body, headers=signed, follow_redirects=False) as answer:
                return answer.status_code, _complaint(answer.status_code), _asked_s(answer)
    except (EgressRefused, SealError) as refused:
        return None, str(refused), 0.0
    except TimeoutError:
        return None, f"it did not answer within {WHOLE_S:g} seconds", 0.0
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        return None, f"{type(error).__name__}: {error}"[:500], 0.0


def _complaint(status: int) -> str | None:
    if 300 <= status < 400:
        return "it answered with a redirect, which is not followed"
    return None if 200 <= status < 300 else f"it answered {status}"


def _asked_s(answer: httpx2.Response) -> float:
    """Of `Retry-After`: seconds, or a date."""
    said = answer.headers.get("retry-after", "").strip()
    if answer.status_code not in ASKS_TO_WAIT or not said:
        return 0.0
    if said.isascii() and said.isdigit():
        return min(float(said), MOST_S)
    try:
        return min(max(email.utils.parsedate_to_datetime(said).timestamp() - time.time(), 0.0), MOST_S)
    except (TypeError, ValueError, OverflowError):
        return 0.0
