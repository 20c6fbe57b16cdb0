"""The values that chat formats speak in."""

from __future__ import annotations

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
