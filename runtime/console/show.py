"""Pages: templates, and how figures are written for a person."""

from __future__ import annotations

import datetime
import hashlib
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup, escape

BASE: Final = "/console"
HERE: Final = Path(__file__).parent
_UNITS: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True)
class Page:
    """What a view shows: a template, and what stands in it."""

    template: str
    facts: dict[str, Any] = field(default_factory=dict)
    status: int = 200


def environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "ago": ago,
        "size": size,
        "took": took,
        "short": short,
        "count": count,
        "plain": plain,
        "written": written,
    }
    made.globals |= {"base": BASE, "asset": asset, "now": now}
    return made


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@cache
def asset(name: str) -> str:
    """The address of a static file; it names what is in it."""
    digest = hashlib.sha256((HERE / "static" / name).read_bytes()).hexdigest()[:12]
    return f"{BASE}/static/{name}?{digest}"


def moment(value: str | datetime.datetime) -> datetime.datetime:
    return value if isinstance(value, datetime.datetime) else datetime.datetime.fromisoformat(value)


def ago(value: str | datetime.datetime | None) -> Markup:
    """How long ago, with the exact time where one points at it."""
    if value is None:
        return Markup("&ndash;")
    at = moment(value)
    exact = at.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    text = _since((now() - at).total_seconds())
    return Markup('<time datetime="{}" title="{}">{}</time>').format(at.isoformat(), exact, text)


def _since(seconds: float) -> str:
    ahead, seconds = seconds < -1, abs(seconds)
    if seconds < 1:
        return "now"
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if seconds >= length:
            return f"in {seconds // length:.0f} {unit}" if ahead else f"{seconds // length:.0f} {unit} ago"
    return "now"


def size(value: float | None) -> str:
    if value is None:
        return "–"
    for unit, name in _UNITS:
        if value >= unit:
            return f"{value / unit:.1f} {name}"
    return f"{value:.0f} B"


def took(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def short(name: str | None) -> Markup:
    """An id whose middle is left out; whole where one points at it."""
    text = str(name or "–")
    if len(text) <= 16:
        return Markup(escape(text))
    return Markup('<span title="{}">{}…{}</span>').format(text, text[:8], text[-4:])


def written(value: Any, indent: int | None = None) -> str:
    """JSON for a person to read: letters as they are; the unseen, and what turns text about, as codes."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    hidden = {mark for mark in text if mark != "\n" and not mark.isprintable()}
    return text.translate({ord(mark): json.dumps(mark)[1:-1] for mark in hidden})


def plain(state: str | None) -> str:
    return str(state or "–").replace("_", " ")
