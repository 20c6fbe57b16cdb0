"""The object of one call, read as it comes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from engine.tokens.formats import CallFormat
from engine.tokens.values import Call, exact_json

_PLAIN = re.compile(r'[^"\\]*')
_DULL = re.compile(r'[^"{}\[\]:,]*')
_BESIDE = ("id", "type")  # members that some write before the name


@dataclass
class CallBody:
    """Read character by character, though most of them by the handful.

    name: once it is known; whole: the object has ended; wrong: it is none, or its name is none
    """

    format: CallFormat
    name: str | None = None
    whole: bool = False
    wrong: bool = False
    _text: list[str] = field(default_factory=list)
    _open: list[str] = field(default_factory=list)  # of objects and arrays that are not closed
    _in_string: bool = False
    _escaped: bool = False
    _string: list[str] = field(default_factory=list)
    _key: str | None = None  # at the top, whose value comes
    _is_value: bool = False
    _foreign: bool = False  # whether it has a member that no call has
    _arguments: list[str] = field(default_factory=list)  # not told yet
    _takes: bool = False  # whether what comes is arguments
    _begun: str = ""  # the first character of the arguments
    _showed: bool = False

    def __post_init__(self) -> None:
        self._takes = bool(self.format.between)

    @property
    def raw(self) -> str:
        """All that was read."""
        return "".join(self._text)

    @property
    def is_call(self) -> bool | None:
        """Whether it is meant as a call: it has a name, and its arguments begin as an object. None: not known yet."""
        if self.wrong or self._foreign or self._begun not in ("", "{"):
            return False
        if self._begun and self.name is not None:
            return True
        return False if self.whole else None

    def read(self, text: str) -> int:
        """Characters that belong to the object."""
        at = 0
        while at < len(text) and not self.whole and not self.wrong:
            at = self._in(text, at) if self._in_string else self._out(text, at)
        return at

    def arguments(self) -> str:
        """What was read of the arguments since the last time, without white space before them."""
        shown, self._arguments = "".join(self._arguments), []
        shown = shown if self._showed else shown.lstrip()
        self._showed = self._showed or bool(shown)
        return shown

    def call(self) -> Call | None:
        """The call of a whole object, or None where it is none."""
        raw = self.raw.strip()
        try:
            value = exact_json(raw)
        except ValueError:
            return None
        if self.format.between:
            return Call(self.name or "", value, raw) if isinstance(value, dict) else None
        name, arguments = value.get(self.format.name_key), value.get(self.format.arguments_key)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        return Call(name, arguments, raw)

    # -- inside -------------------------------------------------------------------------------------------------------

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
            if not self._open and (begun := text[at:end].lstrip()):
                self.wrong = True
                end -= len(begun)
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
        if top and mark == ",":
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
            self._begun = self._begun or piece.lstrip()[:1]
        return end

    def _begin_value(self) -> None:
        try:
            self._key = json.loads("".join(self._string))
        except ValueError:
            self._key = None
        self._is_value, self._string = True, []
        self._takes = self._key == self.format.arguments_key
        known = (self.format.name_key, self.format.arguments_key, *_BESIDE)
        self._foreign = self._foreign or self._key not in known

    def _end_value(self) -> None:
        if self._key == self.format.name_key and self.name is None:
            try:
                name = json.loads("".join(self._string))
                self.name = name if isinstance(name, str) else None
            except ValueError:
                self.wrong = True
        self._key, self._is_value, self._takes = None, False, False
