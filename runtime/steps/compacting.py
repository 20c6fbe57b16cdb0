"""A context that fills up: what gives way, by the session's policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.errors import InvalidRequest
from runtime.steps.services import Services
from workflows.contract import Progress, StepIn


def is_full(s: Services, config: Mapping[str, Any], tokens: int, at: Progress) -> bool:
    return False


async def compact(s: Services, what: StepIn, execution: str) -> None:
    raise InvalidRequest("the context is full; start a new session", code="context_length_exceeded")
