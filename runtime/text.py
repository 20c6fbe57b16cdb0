"""Text that Postgres can keep: no NUL, no half of a surrogate pair."""

from __future__ import annotations

import json
import re
from typing import Any

# An escaped NUL, not the text `\u0000` with its backslash escaped.
_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def as_jsonb(value: Any) -> str:
    """JSON for a jsonb column. What Postgres refuses becomes U+FFFD: tools print anything."""
    text = json.dumps(value, ensure_ascii=False)
    return _NUL.sub("\\1\ufffd", re.sub("[\ud800-\udfff]", "\ufffd", text))


def fault(value: Any, where: str = "") -> str | None:
    """What is wrong with the strings of a body, or None."""
    if isinstance(value, str):
        if "\0" in value:
            return f"{where}: must not contain the character NUL"
        if re.search("[\ud800-\udfff]", value):
            return f"{where}: must not contain half of a surrogate pair"
    elif isinstance(value, dict):
        pairs = [(key, "a name in " + (where or "the body")) for key in value]
        pairs += [(item, f"{where}.{key}".lstrip(".")) for key, item in value.items()]
        return next((found for item, place in pairs if (found := fault(item, place))), None)
    elif isinstance(value, list):
        return next((found for i, item in enumerate(value) if (found := fault(item, f"{where}.{i}".lstrip(".")))), None)
    return None
