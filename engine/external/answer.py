"""What a server streams, as tokens of a transcript: text as it comes, thoughts and calls in frames around them.

    delta.content            bytes
    delta.reasoning_content  <think> ... </think>
    delta.tool_calls         <tool_call> {"name": ..., "arguments": ...} </tool_call>

Calls are written one after the other. One that begins before the arguments of the last are whole waits for its turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError, ServerUnavailable
from engine.external.refusals import of_error
from engine.tokens.bytewise import CALL, CALL_END, END, ID
from engine.tokens.formats import HERMES

MAX_CALLS = 128
_REASONS = {"stop": "stop", "tool_calls": "stop", "function_call": "stop", "eos": "stop", "length": "length"}


@dataclass
class _Call:
    name: str = ""
    arguments: str = ""
    written: int = 0  # characters of the arguments that are told


class Answer:
    """Give me chunks, and I tell the tokens that they add. `begun`: text that a server may say again before it goes
    on."""

    def __init__(self, begun: str = "") -> None:
        self._echo = begun
        self._thinks = False
        self._spoke = False
        self._calls: dict[int, _Call] = {}
        self._at = 0  # calls before this one are told
        self._opened = False
        self.deltas = 0  # chunks that added something: about as many tokens
        self.reason: str | None = None
        self.usage: dict[str, int] | None = None

    def take(self, chunk: Any) -> list[int]:
        """Raises RequestError (bad_answer, or as the server refused), ServerUnavailable."""
        if not isinstance(chunk, Mapping):
            raise _bad(f"an event that is no object: {_shown(chunk)}")
        if chunk.get("error"):
            raise of_error(chunk["error"])
        self._note_usage(chunk.get("usage"))
        choices = chunk.get("choices")
        if choices is None or choices == []:
            return []
        if not isinstance(choices, list) or not isinstance(choices[0], Mapping):
            raise _bad(f"choices that are no list of objects: {_shown(choices)}")
        choice = choices[0]
        if len(choices) > 1 or choice.get("index") not in (0, None):
            raise _bad("another choice than the one that was asked for")
        told = self._delta(choice.get("delta"))
        if told:
            self.deltas += 1
        if choice.get("finish_reason") is not None:
            self.reason = str(choice["finish_reason"])
        return told

    def finish(self) -> tuple[list[int], str]:
        """The tokens that end the message, and why it ended: stop, length, or what the server calls it."""
        if self.reason is None:
            raise ServerUnavailable("the stream ended before its message did")
        reason = _REASONS.get(self.reason, self.reason)
        told = self._end_thoughts() + self._write_calls(last=reason == "stop")
        if reason == "stop":
            told.append(ID[END])
        return told, reason

    # -- inside -------------------------------------------------------------------------------------------------------

    def _delta(self, delta: Any) -> list[int]:
        if delta is None:
            return []
        if not isinstance(delta, Mapping):
            raise _bad(f"a delta that is no object: {_shown(delta)}")
        told: list[int] = []
        thought = _text(delta, "reasoning_content") or _text(delta, "reasoning")
        if thought:
            told += [] if self._thinks else _bytes("<think>\n")
            self._thinks = True
            told += _bytes(thought)
        said = self._unechoed(_text(delta, "content") + _text(delta, "refusal"))
        if said:
            told += self._end_thoughts() + _bytes(said)
        calls = delta.get("tool_calls")
        if calls:
            if not isinstance(calls, list):
                raise _bad(f"tool_calls that are no list: {_shown(calls)}")
            for call in calls:
                self._note_call(call)
            told += self._end_thoughts() + self._write_calls()
        self._spoke = self._spoke or bool(told)
        return told

    def _unechoed(self, said: str) -> str:
        """Without what was there before; a server that says it again does so at once, and in whole."""
        if not self._echo or not said:
            return said
        echo, self._echo = self._echo, ""
        if said.startswith(echo):
            return said[len(echo) :]
        if echo.startswith(said):
            self._echo = echo[len(said) :]
            return ""
        return said

    def _end_thoughts(self) -> list[int]:
        ends, self._thinks = self._thinks, False
        return _bytes("\n</think>\n\n") if ends else []

    def _note_call(self, part: Any) -> None:
        if not isinstance(part, Mapping):
            raise _bad(f"a tool call that is no object: {_shown(part)}")
        at = part.get("index", max(self._calls, default=-1) + (1 if part.get("id") else 0))
        if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < MAX_CALLS:
            raise _bad(f"a tool call with the index {_shown(at)}")
        if at < self._at:
            raise _bad(f"more of tool call {at}, whose arguments were whole already")
        call = self._calls.setdefault(at, _Call())
        function = part.get("function") or {}
        if not isinstance(function, Mapping):
            raise _bad(f"a tool call whose function is no object: {_shown(function)}")
        call.name = call.name or _text(function, "name")
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):
            call.arguments += json.dumps(arguments, ensure_ascii=False)
        elif arguments is not None:
            call.arguments += _text(function, "arguments")

    def _write_calls(self, *, last: bool = False) -> list[int]:
        """What may be told of calls now; with the last, all of them."""
        told: list[int] = []
        for at in sorted(self._calls):
            call = self._calls[at]
            if at < self._at:
                continue
            if not call.name:
                if last:
                    raise _bad(f"tool call {at} without a name")
                break
            if not self._opened:
                told += [ID[CALL], *_bytes(HERMES.lead + HERMES.before_arguments(call.name))]
                self._opened = True
            told += _bytes(call.arguments[call.written :])
            call.written = len(call.arguments)
            if not last and not (any(later > at for later in self._calls) and _whole(call.arguments)):
                break
            told += [] if call.arguments.strip() else _bytes("{}")
            told += [*_bytes(HERMES.after_arguments + "\n"), ID[CALL_END]]
            self._at, self._opened = at + 1, False
        return told

    def _note_usage(self, told: Any) -> None:
        if not isinstance(told, Mapping):
            return
        details = told.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
        counts = {
            "prompt_tokens": told.get("prompt_tokens"),
            "cached_tokens": cached or 0,
            "completion_tokens": told.get("completion_tokens"),
        }
        known = {name: count for name, count in counts.items() if type(count) is int and 0 <= count < 1 << 40}
        if len(known) == len(counts):
            self.usage = known


def _whole(arguments: str) -> bool:
    """Whether nothing can follow."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise _bad(f"{name} that is no text: {_shown(value)}")
    return value or ""


def _bytes(text: str) -> list[int]:
    """A NUL, which no record can hold, and half a surrogate pair become U+FFFD."""
    clean = text.replace("\0", "\ufffd").encode("utf-8", errors="surrogatepass").decode("utf-8", errors="replace")
    return list(clean.encode())


def _bad(what: str) -> RequestError:
    return RequestError("bad_answer", f"the server sent {what}")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
