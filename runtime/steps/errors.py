"""One place decides what an error means to the workflow; everything below has its own retries off."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from engine import EngineLost, EngineRequestError
from runtime.errors import RequestError, StaleEpoch, Unavailable
from sandbox import NoSandbox, SandboxLost, SandboxRequestError
from workflows.contract import ErrorType
from workflows.states import IllegalTransition

P = ParamSpec("P")
R = TypeVar("R")

_MOVE_ON: dict[type[Exception], str] = {
    EngineLost: ErrorType.ENGINE_LOST,
    SandboxLost: ErrorType.SANDBOX_LOST,
    StaleEpoch: ErrorType.STALE_EPOCH,
    Unavailable: ErrorType.DRAINING,
}
_REFUSED = (RequestError, EngineRequestError, SandboxRequestError, NoSandbox, IllegalTransition)


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
        except tuple(_MOVE_ON) as error:
            kind = next(name for cls, name in _MOVE_ON.items() if isinstance(error, cls))
            raise ApplicationError(str(error), type=kind) from error
        except _REFUSED as error:
            raise ApplicationError(str(error), type=ErrorType.REFUSED, non_retryable=True) from error

    return run
