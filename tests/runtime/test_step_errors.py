"""What an error means to the workflow: another placement, or the session's own failure."""

import errno

import asyncpg
import pytest

import engine
import sandbox
from runtime.errors import InvalidRequest, StaleEpoch, Unavailable
from runtime.steps.errors import meaning
from workflows.contract import ErrorType
from workflows.states import Event, IllegalTransition, State


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (engine.EngineGone("x"), ErrorType.ENGINE_LOST),
        (engine.EngineFault("x"), ErrorType.ENGINE_LOST),
        (engine.RequestError("stale_epoch", "x"), ErrorType.STALE_EPOCH),
        (engine.RequestError("context_length_exceeded", "x"), ErrorType.REFUSED),
        (sandbox.SandboxLost("x"), ErrorType.SANDBOX_LOST),
        (sandbox.StaleEpoch("x"), ErrorType.STALE_EPOCH),
        (sandbox.NoSandbox("x"), ErrorType.REFUSED),
        (sandbox.CreateFailed("x"), ErrorType.SANDBOX_LOST),
        (sandbox.SandboxFailure("docker rm did not answer within 30 s"), ErrorType.SANDBOX_LOST),
        # The sandbox lives and says no: a new one would say the same, for ever.
        (sandbox.OperationFailed("apply: No space left on device"), ErrorType.REFUSED),
        (sandbox.BlobMissing("x"), ErrorType.REFUSED),
        (sandbox.BlobCorrupt("x"), ErrorType.REFUSED),
        (sandbox.BadPath("x"), ErrorType.REFUSED),
        (InvalidRequest("x"), ErrorType.REFUSED),
        (IllegalTransition(State.IDLE, Event.RUN_TOOL), ErrorType.REFUSED),
        (OSError(errno.ENOSPC, "full"), ErrorType.DISK_FULL),
        (asyncpg.DiskFullError("full"), ErrorType.DISK_FULL),
        (StaleEpoch("x"), ErrorType.STALE_EPOCH),
        (Unavailable("x"), ErrorType.DRAINING),
        (KeyError("a bug"), None),
    ],
)
def test_every_error_has_one_meaning(error, expected):
    assert meaning(error) == expected
