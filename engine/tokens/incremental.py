"""A message read as it comes: text, and calls whose arguments are told while they are written.

Whatever the pieces, what is told is the same. Time is linear in the text; what may be the beginning of a call is held
back until that is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from engine.tokens.callbody import CallBody
from engine.tokens.formats import CallFormat
from engine.tokens.values import Call

MAX_CALLS = 128  # of a message; what follows is text, and a list of more is none
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
    """Give me text, and I tell what it means so far. `broken`: a call was begun that is none.

    tools: names that calls may have. Where calls have no marker, an object of another name is text, as is one that has
    other members than a call's; None: any name, and an empty one: no calls without a marker.
    """

    def __init__(self, format: CallFormat, tools: Collection[str] | None = None) -> None:
        self._format = format
        self._tools = tools
        self._state: Callable[[], bool] = self._begin
        self._rest = ""  # what was not understood yet
        self._told: list[Delta] = []
        self._calls = 0
        self._last = False
        self._before: list[str] = []  # white space before what may be a call without a marker
        self._started = False  # whether the call was told
        self._body = CallBody(format)
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
        if self._state in (self._text, self._only_text, self._after_all, self._is_broken):
            return told
        if self._format.marker or self._started:
            self._break()
        else:
            self._go(self._is_text)
        return told + self.push("")

    # -- states: each takes what it understands of the rest, and says whether there may be more to do -----------------

    def _begin(self) -> bool:
        """Where a call may begin the message without a marker."""
        if self._format.marker:
            return self._go(self._text)
        if self._tools is not None and not self._tools:
            return self._go(self._only_text)
        self._skip_space()
        body = self._rest
        mark = self._format.may_be_marked
        if not self._last and (not body or (mark and mark.startswith(body) and body != mark)):
            return False
        if mark and body.startswith(mark):
            self._rest = body[len(mark) :]
            return self._go(self._start_body)
        if body.startswith("{"):
            return self._go(self._start_body)
        return self._go(self._is_text)

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

    def _is_text(self) -> bool:
        """What was held back is no call."""
        self._rest = "".join(self._before) + self._body.raw + self._rest
        return self._go(self._only_text)

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
        if self._calls == MAX_CALLS:
            return self._break()
        self._body, self._started = CallBody(self._format), False
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
        return self._go(self._object)

    def _object(self) -> bool:
        self._rest = self._rest[self._body.read(self._rest) :]
        if not self._format.marker and not self._started:
            is_call = self._may_be_call()
            if not is_call:
                return is_call is not None and self._go(self._is_text)
        self._tell_call()
        if self._body.wrong:
            return self._break()
        if not self._body.whole:
            return False
        return self._go(self._after_body)

    def _may_be_call(self) -> bool | None:
        """Whether an object without a marker is a call; None: not known yet."""
        named = self._body.name is None or self._tools is None or self._body.name in self._tools
        return self._body.is_call if named else False

    def _tell_call(self) -> None:
        """What may be told of it now. Arguments that come before the name wait for it."""
        if self._body.name is None:
            return
        if not self._started:
            self._started = True
            self._tell(CallStarted(self._calls, self._body.name))
        if shown := self._body.arguments():
            self._tell(ArgumentsDelta(self._calls, shown))

    def _after_body(self) -> bool:
        """What must follow: a call counts only then."""
        kind, end = self._format, self._format.end.strip()
        trimmed = self._rest.lstrip()
        if kind.separator is not None and trimmed.startswith(kind.separator.strip()):
            self._rest = trimmed[len(kind.separator.strip()) :]
            return self._end_call() and self._go(self._start_body)
        if not trimmed.startswith(end):
            self._rest = trimmed
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
        after = self._rest.lstrip()
        if not self._format.marker and after != self._rest:
            self._before.append(self._rest[: len(self._rest) - len(after)])
        self._rest = after

    def _tell_text(self, text: str) -> None:
        if text:
            self._tell(TextDelta(text))

    def _tell(self, delta: Delta) -> None:
        self._told.append(delta)


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of the text that may be the beginning of the marker."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
