"""One place decides what an error means to the workflow; everything below has its own retries off."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import asyncpg
from temporalio import activity
from temporalio.exceptions import ApplicationError

import engine
import sandbox
from runtime.errors import RequestError, StaleEpoch, Unavailable
from runtime.sealing import SealError
from workflows.contract import ErrorType
from workflows.states import IllegalTransition

P = ParamSpec("P")
R = TypeVar("R")

# The first match counts, so the narrower class stands above the wider one.
_MEANING: tuple[tuple[type[Exception], str], ...] = (
    (StaleEpoch, ErrorType.STALE_EPOCH),
    (sandbox.StaleEpoch, ErrorType.STALE_EPOCH),
    (Unavailable, ErrorType.DRAINING),
    (engine.EngineFault, ErrorType.ENGINE_LOST),
    (sandbox.OperationFailed, ErrorType.REFUSED),  # the sandbox lives and says no: a new one would say the same
    (sandbox.BlobMissing, ErrorType.REFUSED),
    (sandbox.BlobCorrupt, ErrorType.REFUSED),
    (sandbox.NoSandbox, ErrorType.REFUSED),
    (sandbox.SandboxFailure, ErrorType.SANDBOX_LOST),  # lost, or not made in time: Docker may be starting again
    (RequestError, ErrorType.REFUSED),
    (SealError, ErrorType.REFUSED),
    (engine.RequestError, ErrorType.REFUSED),
    (sandbox.SandboxUsageError, ErrorType.REFUSED),
    (IllegalTransition, ErrorType.REFUSED),
)


DISK_FULL = "No space left on device: free some where TENUTO_HOME lies, then send the message again"


def disk_is_full(error: Exception) -> bool:
    """Ours, or the database's."""
    if isinstance(error, asyncpg.DiskFullError):
        return True
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def asked_to_wait_s(error: Exception) -> float | None:
    """For how long a model server wants to be left alone."""
    return error.retry_after_s if isinstance(error, engine.ServerUnavailable) else None


def meaning(error: Exception) -> str | None:
    """The ErrorType of an error, or None for one that nobody raised on purpose."""
    if isinstance(error, engine.RequestError) and error.code == "stale_epoch":
        return ErrorType.STALE_EPOCH  # a newer owner, not the request's fault
    if disk_is_full(error):
        return ErrorType.DISK_FULL
    return next((kind for cls, kind in _MEANING if isinstance(error, cls)), None)


def told_to_the_workflow(work: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Turn what an activity raises into an ApplicationError of a type that the workflow acts on."""

    @functools.wraps(work)
    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await work(*args, **kwargs)
        except asyncio.CancelledError:
            if activity.is_worker_shutdown():
                raise ApplicationError("the node is draining", type=ErrorType.DRAINING) from None
            raise
        except Exception as error:
            kind = meaning(error)
            if kind is None:
                raise
            message = DISK_FULL if disk_is_full(error) else str(error)
            details = () if (wait_s := asked_to_wait_s(error)) is None else (wait_s,)
            raise ApplicationError(message, *details, type=kind, non_retryable=kind == ErrorType.REFUSED) from error

    return run
