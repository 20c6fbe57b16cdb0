"""The values that chat formats speak in."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ToolSchemaError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class ToolSpec:
    """A tool as the model sees it. `parameters` is a JSON schema of an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ToolSchemaError(f"the tool name {self.name!r} must be 1 to 64 letters, digits, '_', '-' or '.'")

    def as_function(self) -> dict[str, Any]:
        described = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class ToolResult:
    """What a call gave back, as text for the model."""

    call_id: str
    name: str
    content: str


def exact_json(text: str) -> Any:
    """JSON that means one thing and can be written again: no member stands twice, and numbers are finite.

    Raises ValueError where it is none, or deeper than Python reads.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A member that stands twice could be told as one thing and mean another."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a member stands twice")
    return found


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:20]} is no number that JSON can write")
    return value


@dataclass(frozen=True)
class Call:
    """A whole call that the model wrote; `raw` is its JSON text."""

    name: str
    arguments: dict[str, Any]
    raw: str


@dataclass(frozen=True)
class Parsed:
    """An assistant message. `complete`: it ended by itself and every call it began is whole."""

    text: str
    calls: tuple[Call, ...]
    complete: bool
