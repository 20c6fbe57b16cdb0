"""Known secrets, taken out of whatever is kept or shown: as they are, in base64, as JSON and as URLs write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from runtime.tools.kinds import SECRET_LEAST
from sandbox import Mask

HIDDEN = "***"


class Redactor:
    """`values`: of every tool of a session; those shorter than SECRET_LEAST would blot out ordinary text."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        # A header such as "Bearer …" is a secret without its scheme too.
        parts = {part.strip() for text in values for part in (text, text.rpartition(" ")[2])}
        long = {part for part in parts if len(part) >= SECRET_LEAST}
        self._forms = {form for part in long for form in (part, json.dumps(part)[1:-1], quote(part, safe=""))}

    def __bool__(self) -> bool:
        return bool(self._forms)

    def also(self, other: Redactor) -> Redactor:
        both = Redactor()
        both._forms = self._forms | other._forms
        return both

    def stream(self) -> Mask | None:
        """For text that comes in pieces; None: there is nothing to hide."""
        return Mask(self._forms) if self._forms else None

    def of_bytes(self, data: bytes, *, cut_at: int | None = None) -> bytes:
        """`cut_at`: where something was left out, so that only the beginning of a secret may stand before it."""
        mask = self.stream()
        if mask is None:
            return data
        if cut_at is None:
            return mask.whole(data)
        head = mask.read(data[:cut_at])
        begun = mask.held if len(mask.held) < SECRET_LEAST else HIDDEN.encode()
        return head + begun + mask.whole(data[cut_at:])

    def text(self, text: str) -> str:
        return self.of_bytes(text.encode("utf-8", "surrogatepass")).decode("utf-8", "replace") if self else text

    def json(self, value: Any) -> Any:
        """The same value with every text in it redacted, names of members too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(name): self.json(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.json(one) for one in value]
        return value


NOTHING = Redactor()
