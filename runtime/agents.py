"""Sessions that are made of an agent: its configuration, and what is said otherwise for one session."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

AGENT_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
AGENT: Final = rf"^{AGENT_NAME}(@[1-9][0-9]{{0,8}})?$"
# What is said of one member leaves the others as they are. Lists, the tools for one, are replaced whole.
BY_MEMBER: Final = frozenset({"limits", "sampling", "kv", "budget", "files", "approvals"})


@dataclass(frozen=True)
class Origin:
    """Where a session comes from, and what its owner notes of it."""

    agent: str | None = None
    version: int | None = None
    schedule_id: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


def parse_agent(text: str) -> tuple[str, int | None]:
    """`name`, or `name@3`."""
    found = re.fullmatch(rf"({AGENT_NAME})(?:@([0-9]+))?", text)
    assert found is not None, "checked at the edge"
    return found[1], int(found[2]) if found[2] else None


def merged(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The agent's configuration with what was given in its place, member by member where BY_MEMBER says so."""
    over = {
        name: {**base[name], **value} if name in BY_MEMBER and isinstance(base.get(name), Mapping) else value
        for name, value in given.items()
    }
    return {**base, **over}
