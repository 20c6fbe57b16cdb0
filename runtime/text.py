"""Text that Postgres can keep: no NUL, no half of a surrogate pair."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 64  # of a body; the deepest that makes sense, a tool's schema, needs a quarter of it
# An escaped NUL, not the text `\u0000` with its backslash escaped.
_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def as_jsonb(value: Any) -> str:
    """JSON for a jsonb column. What Postgres refuses becomes U+FFFD: tools print anything."""
    text = json.dumps(value, ensure_ascii=False)
    return _NUL.sub("\\1\ufffd", re.sub("[\ud800-\udfff]", "\ufffd", text))


def fault(value: Any, where: str = "", depth: int = 0) -> str | None:
    """What is wrong with the strings of a body, or with how deep it goes; None: nothing."""
    if depth > MAX_DEPTH:
        return f"{where[:80]}…: goes deeper than {MAX_DEPTH} levels"
    if isinstance(value, str):
        if "\0" in value:
            return f"{where}: must not contain the character NUL"
        if re.search("[\ud800-\udfff]", value):
            return f"{where}: must not contain half of a surrogate pair"
    parts: list[tuple[Any, str]] = []
    if isinstance(value, dict):
        parts = [(key, "a name in " + (where or "the body")) for key in value]
        parts += [(item, f"{where}.{key}".lstrip(".")) for key, item in value.items()]
    elif isinstance(value, list):
        parts = [(item, f"{where}.{i}".lstrip(".")) for i, item in enumerate(value)]
    return next((found for item, place in parts if (found := fault(item, place, depth + 1))), None)
