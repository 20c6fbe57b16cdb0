"""The keys of a config.json, each checked when it is read; what is not there and has a usual value is noted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from engine.errors import PlanError

Config = Mapping[str, Any]
# The most of each that any model could have: whatever is larger is a mistake, and would only make large numbers.
LIMITS: Final = {
    "layers": 1024,
    "heads": 4096,
    "size": 1 << 18,
    "ffn": 1 << 22,
    "context": 1 << 28,
    "vocab": 1 << 24,
    "experts": 1 << 16,
    "small": 1024,
}


@dataclass
class Keys:
    """Reads one config. `assumed` collects in words what was not there."""

    config: Config
    assumed: list[str] = field(default_factory=list)

    def has(self, key: str) -> bool:
        return self.config.get(key) is not None

    def integer(self, key: str, kind: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number from `least` to the limit of its kind. Raises PlanError."""
        value, most = self.config.get(key), LIMITS[kind]
        if value is None and default is not None:
            self.assumed.append(f"{key} {default}")
            return default
        if value is None:
            raise PlanError(key, f"the config does not have it; a whole number from {least} to {most} is needed")
        if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise PlanError(key, f"{_short(value)} is not a whole number from {least} to {most}")
        return value

    def real(self, key: str, default: float) -> float:
        value = self.config.get(key)
        if value is None:
            self.assumed.append(f"{key} {default:g}")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6 or math.isnan(value):
            raise PlanError(key, f"{_short(value)} is not a number above 0 and below 1e6")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """What a config leaves out is as its family has it: that is said by the format, and not guessed."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise PlanError(key, f"{_short(value)} is neither true nor false")
        return value

    def names(self, key: str, count: int, known: tuple[str, ...]) -> list[str] | None:
        """One of the known names for each layer; None where the key is not there. Raises PlanError."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            size = f"has {len(value)} entries" if isinstance(value, list) else "is no list"
            raise PlanError(key, f"{size}; one of {', '.join(known)} for each of {count} layers is needed")
        for one in value:
            if one not in known:
                raise PlanError(key, f"{_short(one)} is none of {', '.join(known)}")
        return list(value)

    def indices(self, key: str, count: int) -> list[int] | None:
        """Numbers of layers; None where the key is not there. Raises PlanError."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(one) is int and 0 <= one < count for one in value):
            raise PlanError(key, f"{_short(value)} is no list of layers from 0 to {count - 1}")
        return value


def divides(key: str, value: int, by_key: str, by: int) -> None:
    """Raises PlanError where `by` does not divide."""
    if value % by:
        raise PlanError(key, f"{value} cannot be divided by {by_key} {by}")


def _short(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 256:
        return "a number of more than 256 bits"
    text = repr(value) if isinstance(value, str | int | float | bool) or value is None else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "…"
