"""Cron expressions of five fields, and time zones: what is wrong with one is said before anything is made of it."""

from __future__ import annotations

import re
import zoneinfo
from typing import Final

_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS: Final = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of the month", 1, 31, ()),
    ("month", 1, 12, _MONTHS),
    ("day of the week", 0, 7, _DAYS),
)
_NAMED: Final = frozenset({"@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly"})


def check_cron(text: str) -> str:
    """The expression. Raises ValueError, which names the field."""
    if text in _NAMED:
        return text
    fields = text.split()
    if len(fields) != len(_FIELDS):
        names = ", ".join(name for name, *_ in _FIELDS)
        raise ValueError(f"{text[:100]!r} has {len(fields)} fields; give five ({names}), or @hourly, @daily, @weekly …")
    for field, (name, least, most, words) in zip(fields, _FIELDS, strict=True):
        for part in field.split(","):
            _check(part.lower(), name, least, most, words)
    return " ".join(fields)


def _check(part: str, name: str, least: int, most: int, words: tuple[str, ...]) -> None:
    found = re.fullmatch(r"(\*|[0-9a-z]{1,3}(?:-[0-9a-z]{1,3})?)(?:/([0-9]{1,3}))?", part)
    if not found:
        raise ValueError(f"the {name} {part[:50]!r} cannot be read; use *, numbers, 1-5, */10, and lists of them")
    ends = [] if found[1] == "*" else [_number(end, name, least, most, words) for end in found[1].split("-")]
    if len(ends) == 2 and ends[0] > ends[1]:
        raise ValueError(f"the {name} {part!r} ends before it begins")
    if found[2] is not None and not 1 <= int(found[2]) <= most:
        raise ValueError(f"the step of the {name} {part!r} must be from 1 to {most}")


def _number(text: str, name: str, least: int, most: int, words: tuple[str, ...]) -> int:
    if text in words:
        return least + words.index(text)
    if not text.isdigit() or not least <= int(text) <= most:
        raise ValueError(f"the {name} {text!r} is not from {least} to {most}")
    return int(text)


def check_time_zone(name: str) -> str:
    """The zone's name. Raises ValueError."""
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{name!r} is no time zone that is known here; give one as Europe/Berlin, or UTC") from None
    return name
