"""Errands at a node: what is asked is in a row, and so is what came of it, a refusal included."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from runtime import workspaces
from runtime.errors import InvalidRequest, NotFound, RequestError
from runtime.steps import asking_engine, importing
from runtime.steps.services import Services
from runtime.store import errands
from runtime.store.errands import Errand
from runtime.workspaces import Answer
from sandbox import BlobMissing, SandboxUsageError

_Work = Callable[[Services, Errand], Awaitable[Answer]]


async def run(s: Services, errand_id: str) -> None:
    """Do it, unless that is done. What nobody raised on purpose is the caller's to know, and is not tried again."""
    errand = await errands.get(s.db, errand_id)
    if errand is None or errand.state != "asked":
        return
    try:
        result, body = await KINDS[errand.kind](s, errand)
    except RequestError as refusal:
        await errands.end(s.db, errand_id, "refused", refusal.as_told())
    except SandboxUsageError as refusal:
        await errands.end(s.db, errand_id, "refused", InvalidRequest(str(refusal)).as_told())
    except BlobMissing as missing:
        await errands.end(s.db, errand_id, "refused", NotFound(str(missing), code="blob_missing").as_told())
    else:
        await errands.end(s.db, errand_id, "done", result, body)


async def _read(s: Services, errand: Errand) -> Answer:
    return await asyncio.to_thread(workspaces.answered, s.blobs, errand.kind, errand.request)


KINDS: Mapping[str, _Work] = {
    "list": _read,
    "read": _read,
    "blob": _read,
    "size": _read,
    "diff": _read,
    "import": importing.run,
    "kv": asking_engine.intend,
    "engine": asking_engine.describe,
    "audit": asking_engine.audit,
    "doctor": asking_engine.examine,
}
