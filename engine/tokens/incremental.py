"""A message read as it comes: text, and calls whose arguments are told while they are written.

Whatever the pieces, what is told is the same. Time is linear in the text; what may be the beginning of a call is held
back until that is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.tokens.formats import CallFormat
from engine.tokens.values import Call

MAX_CALLS = 128  # of a message; what follows is text
_PLAIN = re.compile(r'[^"\\]*')
_DULL = re.compile(r'[^"{}\[\]:,]*')
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class CallStarted:
    index: int
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """JSON text of the arguments of a call that was started, as it is written."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    """`call` None: it was cut short, or cannot be read."""

    index: int
    call: Call | None


Delta = TextDelta | CallStarted | ArgumentsDelta | CallEnded


class MessageParser:
    """Give me text, and I tell what it means so far. `broken`: a call was begun that is none."""

    def __init__(self, format: CallFormat) -> None:
        self._format = format
        self._state: Callable[[], bool] = self._begin
        self._rest = ""  # what was not understood yet
        self._told: list[Delta] = []
        self._calls = 0
        self._said = False  # whether text was told, white space apart
        self._last = False
        self._body = _Body(format)
        self.broken = False

    def push(self, text: str) -> list[Delta]:
        self._rest += text
        while self._state():
            pass
        told, self._told = self._told, []
        return told

    def finish(self) -> list[Delta]:
        """The message has ended."""
        self._last = True
        told = self.push("")
        if self._state not in (self._begin, self._text, self._after_all, self._is_broken):
            self._break()
            told += self._told
            self._told = []
        return told

    # -- states: each takes what it understands of the rest, and says whether there may be more to do -----------------

    def _begin(self) -> bool:
        """Where a call may begin the message without a marker."""
        if self._format.marker:
            return self._go(self._text)
        body = self._rest.lstrip()
        marks = ("{", *filter(None, (self._format.may_be_marked,)))
        if not self._last and any(mark.startswith(body) for mark in marks):
            return False
        found = next((mark for mark in marks if body.startswith(mark)), None)
        if found is None:
            return self._go(self._only_text)
        self._rest = body.removeprefix(self._format.may_be_marked) if found != "{" else body
        return self._go(self._start_body)

    def _text(self) -> bool:
        marker = self._format.marker
        at = self._rest.find(marker) if self._calls < MAX_CALLS else -1
        if at >= 0:
            self._tell_text(self._rest[:at])
            self._rest = self._rest[at + len(marker) :]
            return self._go(self._lead)
        kept = 0 if self._last or self._calls >= MAX_CALLS else _overlap(self._rest, marker)
        self._tell_text(self._rest[: len(self._rest) - kept])
        self._rest = self._rest[len(self._rest) - kept :]
        return False

    def _only_text(self) -> bool:
        self._tell_text(self._rest)
        self._rest = ""
        return False

    def _lead(self) -> bool:
        self._skip_space()
        if not self._rest:
            return False
        if self._format.lead.strip():
            if not self._rest.startswith(self._format.lead.strip()):
                return self._break()
            self._rest = self._rest[len(self._format.lead.strip()) :]
        return self._go(self._start_body)

    def _start_body(self) -> bool:
        self._skip_space()
        if not self._rest:
            return False
        self._body = _Body(self._format)
        return self._go(self._named if self._format.between else self._object)

    def _named(self) -> bool:
        """A name, what stands between, and then the arguments."""
        name, found, after = self._rest.partition(self._format.between)
        if not found:
            begun = self._rest[: len(self._rest) - _overlap(self._rest, self._format.between)]
            return self._break() if begun and not _NAME.fullmatch(begun) else False
        if not _NAME.fullmatch(name):
            return self._break()
        self._body.name, self._rest = name, after
        self._tell(CallStarted(self._calls, name))
        return self._go(self._object)

    def _object(self) -> bool:
        used = self._body.read(self._rest)
        self._rest = self._rest[used:]
        for delta in self._body.told(self._calls):
            self._tell(delta)
        if self._body.wrong:
            return self._break()
        if not self._body.whole:
            return False
        return self._go(self._after_body)

    def _after_body(self) -> bool:
        """What must follow: a call counts only then."""
        kind, end = self._format, self._format.end.strip()
        trimmed = self._rest.lstrip()
        if kind.separator is not None and trimmed.startswith(kind.separator.strip()):
            self._rest = trimmed[len(kind.separator.strip()) :]
            return self._end_call() and self._go(self._start_body)
        if not trimmed.startswith(end):
            return self._break() if trimmed and not end.startswith(trimmed) else False
        self._rest = trimmed[len(end) :] if end else self._rest
        if not self._end_call():
            return True
        return self._go(self._text if kind.marker and kind.several else self._after_all)

    def _after_all(self) -> bool:
        """A message that may have one call has it."""
        self._tell_text(self._rest)
        self._rest = ""
        return False

    def _is_broken(self) -> bool:
        self._rest = ""
        return False

    # -- inside -------------------------------------------------------------------------------------------------------

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _end_call(self) -> bool:
        call = self._body.call()
        if call is None:
            self._break()
            return False
        self._tell(CallEnded(self._calls, call))
        self._calls += 1
        return True

    def _break(self) -> bool:
        self.broken = True
        self._tell(CallEnded(self._calls, None))
        return self._go(self._is_broken)

    def _skip_space(self) -> None:
        self._rest = self._rest.lstrip()

    def _tell_text(self, text: str) -> None:
        if text:
            self._tell(TextDelta(text))

    def _tell(self, delta: Delta) -> None:
        self._told.append(delta)


@dataclass
class _Body:
    """The object of one call, read character by character, though most of them by the handful."""

    format: CallFormat
    name: str | None = None
    whole: bool = False
    wrong: bool = False
    _text: list[str] = field(default_factory=list)
    _size: int = 0
    _open: list[str] = field(default_factory=list)  # of objects and arrays that are not closed
    _in_string: bool = False
    _escaped: bool = False
    _string: list[str] = field(default_factory=list)
    _key: str | None = None  # at the top, whose value comes
    _is_value: bool = False
    _arguments: list[str] = field(default_factory=list)  # not told yet
    _takes: bool = False  # whether what comes is arguments
    _started: bool = False
    _showed: bool = False

    def __post_init__(self) -> None:
        self._takes = bool(self.format.between)

    def read(self, text: str) -> int:
        """Characters that belong to the object."""
        at = 0
        while at < len(text) and not self.whole and not self.wrong:
            at = self._in(text, at) if self._in_string else self._out(text, at)
        return at

    def _in(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return self._take(text, at, at + 1, self._string)
        end = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
        if end > at:
            at = self._take(text, at, end, self._string)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escaped = True
            return self._take(text, at, at + 1, self._string)
        self._in_string = False
        return self._take(text, at, at + 1, self._string)

    def _out(self, text: str, at: int) -> int:
        end = _DULL.match(text, at).end()  # type: ignore[union-attr]
        if end > at:
            if not self._open and text[at:end].strip():
                self.wrong = True
            return self._take(text, at, end)
        mark = text[at]
        if not self._open and mark != "{":
            self.wrong = True
            return at
        if mark == '"':
            self._in_string, self._string = True, []
        elif mark in "{[":
            self._open.append(mark)
        elif mark in "}]" and self._open.pop() != {"}": "{", "]": "["}[mark]:
            self.wrong = True
        top = len(self._open) == 1 and not self.format.between
        if top and mark in ",":
            self._end_value()
        elif not self._open:
            if not self.format.between:
                self._end_value()
            self.whole = True
        at = self._take(text, at, at + 1, self._string if mark == '"' else None)
        if top and mark == ":" and not self._is_value:
            self._begin_value()
        return at

    def _take(self, text: str, at: int, end: int, string: list[str] | None = None) -> int:
        piece = text[at:end]
        self._text.append(piece)
        if string is not None and len(self._open) == 1:
            string.append(piece)
        if self._takes:
            self._arguments.append(piece)
        return end

    def _begin_value(self) -> None:
        try:
            self._key = json.loads("".join(self._string))
        except ValueError:
            self._key = None
        self._is_value, self._string = True, []
        self._takes = self._key == self.format.arguments_key

    def _end_value(self) -> None:
        if self._key == self.format.name_key and self.name is None:
            try:
                name = json.loads("".join(self._string))
                self.name = name if isinstance(name, str) else None
            except ValueError:
                self.wrong = True
        self._key, self._is_value, self._takes = None, False, False

    def told(self, index: int) -> list[Delta]:
        """What may be told now. Arguments that come before the name wait for it."""
        told: list[Delta] = []
        if self.name is None:
            return told
        if not self._started:
            self._started = True
            if not self.format.between:
                told.append(CallStarted(index, self.name))
        shown = "".join(self._arguments)
        shown = shown if self._showed else shown.lstrip()
        if shown:
            self._showed = True
            told.append(ArgumentsDelta(index, shown))
        self._arguments = []
        return told

    def call(self) -> Call | None:
        """The call of a whole object, or None where it is none."""
        raw = "".join(self._text).strip()
        try:
            value = json.loads(raw, object_pairs_hook=_once)
        except (ValueError, RecursionError):
            return None
        if self.format.between:
            return Call(self.name or "", value, raw) if isinstance(value, dict) else None
        name, arguments = value.get(self.format.name_key), value.get(self.format.arguments_key)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        return Call(name, arguments, raw)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A member that stands twice could be told as one thing and mean another."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a member stands twice")
    return found


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of the text that may be the beginning of the marker."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
