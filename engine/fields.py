"""Typed fields of protocol messages; every mistake is named."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from engine.errors import RequestError

MAX_ID_CHARS = 200
Kind = TypeVar("Kind", bound=StrEnum)


class Fields:
    """Reads typed fields of a message; every mistake is named."""

    def __init__(self, message: Mapping[str, Any], prefix: str = "") -> None:
        self._message = message
        self._prefix = prefix

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._bad(name, value, f"a whole number from {low} to {high}")
        return value

    def real(self, name: str, default: float, low: float, high: float) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self._bad(name, value, f"a number from {low} to {high}")
        return float(value)

    def seconds(self, name: str, default: float | None, high: float) -> float | None:
        """A positive number, or the default where none is given."""
        value = self._get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
            raise self._bad(name, value, f"null or a number of seconds above 0, up to {high:.0f}")
        return float(min(value, sys.float_info.max))  # a whole number may be longer than any float

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARS:
            raise self._bad(name, value, f"a text of 1 to {MAX_ID_CHARS} characters")
        return value

    def optional_text(self, name: str, longest: int) -> str | None:
        value = self._message.get(name)
        if value is not None and (not isinstance(value, str) or not 1 <= len(value) <= longest):
            raise self._bad(name, value, f"null or a text of 1 to {longest} characters")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        return None if self._message.get(name) is None else self.integer(name, low, low, high)

    def texts(self, name: str) -> Sequence[str]:
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._bad(name, value, "a list of texts")
        return value

    def one_of(self, name: str, kind: type[Kind], default: Kind) -> Kind:
        value = self._get(name, default.value)
        if value not in set(kind):
            raise self._bad(name, value, " or ".join(repr(str(one)) for one in kind))
        return kind(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._bad(name, value, "true or false")
        return value

    def integers(self, name: str) -> Sequence[int]:
        value = self._get(name, None)
        if not isinstance(value, list) or not all(type(item) is int and -1 << 62 < item < 1 << 62 for item in value):
            raise self._bad(name, value, "a list of token ids")
        return value

    def keys(self, name: str) -> list[bytes]:
        value = self._get(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._bad(name, value, "a list of 64-digit hex keys")
        try:
            keys = [bytes.fromhex(item) for item in value]
        except ValueError as error:
            raise self._bad(name, value, "a list of 64-digit hex keys") from error
        if any(len(key) != 32 for key in keys):
            raise self._bad(name, value, "a list of 64-digit hex keys")
        return keys

    def salt(self, name: str) -> bytes:
        value = self._get(name, "")
        try:
            salt = bytes.fromhex(value)
        except (TypeError, ValueError) as error:
            raise self._bad(name, value, "hex digits") from error
        if len(salt) > 64:
            raise self._bad(name, value, "at most 64 bytes in hex")
        return salt

    def salts(self, name: str) -> list[bytes]:
        value = self._get(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._bad(name, value, "a list of hex digits")
        return [Fields({name: item}, self._prefix).salt(name) for item in value]

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self._message.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._bad(name, value, "an object")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self._message.get(name)
        return default if value is None else value

    def _bad(self, name: str, value: Any, wanted: str) -> RequestError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return RequestError("bad_request", f"{self._prefix}{name} is {shown}; {wanted} is needed")
