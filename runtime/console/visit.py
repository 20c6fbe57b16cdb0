"""What a view is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from runtime.console.inside import Inside, Refused


@dataclass(frozen=True)
class Visit:
    """A page that an operator asks for: their request, and the API as they may use it."""

    request: Request
    api: Inside

    @property
    def query(self) -> Mapping[str, str]:
        return {name: text for name, text in self.request.query_params.items() if text}

    def path(self, name: str) -> str:
        return str(self.request.path_params[name])


def rows(answer: Any) -> list[dict[str, Any]]:
    """Of a list; none where it was refused."""
    return [] if isinstance(answer, Refused) else list(answer["data"])


def needed(answer: Any) -> Any:
    """Raises Refused: without this answer there is no page."""
    if isinstance(answer, Refused):
        raise answer
    return answer


def lacks(**answers: Any) -> dict[str, str]:
    """What a page goes without, and why."""
    return {name: answer.message for name, answer in answers.items() if isinstance(answer, Refused)}
