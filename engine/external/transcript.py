"""A transcript of `engine.tokens.bytewise` as the messages that a chat API takes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import RequestError
from engine.tokens import ArgumentsDelta, CallEnded, CallStarted, MessageParser, TextDelta
from engine.tokens.bytewise import CALL, CALL_END, END, ID, ROLES, VOCAB_SIZE
from engine.tokens.formats import HERMES

_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)
NO_RESULT = "[there is no result]"
_ROLE = {ID[f"<|{role}|>"]: role for role in ROLES}
_MARKS = {ID[CALL]: CALL.encode(), ID[CALL_END]: CALL_END.encode()}


@dataclass(frozen=True)
class Conversation:
    """`begun`: what the model has said of the message that it is to write, empty at its beginning."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    begun: str = ""


def read(token_ids: Sequence[int]) -> Conversation:
    """Raises RequestError (bad_request) for what is no transcript that an assistant goes on with."""
    tools: list[dict[str, Any]] = []
    told = _Told()
    begun: str | None = None
    for role, content, ended in _frames(token_ids):
        if begun is not None:
            raise RequestError("bad_request", "token_ids goes on after an assistant message that has not ended")
        if not ended:
            if role != "assistant":
                raise RequestError("bad_request", f"token_ids ends within a message of the role {role!r}")
            begun = content
        elif role == "tools":
            tools = json.loads(content)
        else:
            told.add(role, content)
    if begun is None:
        raise RequestError("bad_request", "token_ids does not end where an assistant speaks")
    return Conversation(told.messages, tools, begun)


class _Told:
    """Messages so far. Calls have ids by their number, and results are theirs in the order in which they come."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._calls = 0
        self._open: list[str] = []  # ids of calls that have no result yet

    def add(self, role: str, content: str) -> None:
        if role == "tool" and self._open:
            self.messages.append({"role": "tool", "tool_call_id": self._open.pop(0), "content": content})
            return
        self._answer_open()
        if role != "assistant":  # a result of no call is what the model was told instead of results
            self.messages.append({"role": "user" if role == "tool" else role, "content": content})
            return
        text, calls = _parsed(content)
        message: dict[str, Any] = {"role": "assistant", "content": _THOUGHTS.sub("", text)}
        if calls:
            message["tool_calls"] = [self._call(name, arguments) for name, arguments in calls]
        self.messages.append(message)

    def _answer_open(self) -> None:
        """Calls without a result, which servers refuse."""
        self.messages += [{"role": "tool", "tool_call_id": one, "content": NO_RESULT} for one in self._open]
        self._open = []

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        self._calls += 1
        self._open.append(f"call{self._calls:05}")  # nine letters and digits, as the strictest templates want
        return {"id": self._open[-1], "type": "function", "function": {"name": name, "arguments": arguments}}


def _parsed(content: str) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls of a message; all of it is text where a call in it cannot be read."""
    parser = MessageParser(HERMES)
    text, names, arguments, whole = "", dict[int, str](), dict[int, str](), list[int]()
    for delta in [*parser.push(content), *parser.finish()]:
        if isinstance(delta, TextDelta):
            text += delta.text
        elif isinstance(delta, CallStarted):
            names[delta.index] = delta.name
        elif isinstance(delta, ArgumentsDelta):
            arguments[delta.index] = arguments.get(delta.index, "") + delta.text
        elif isinstance(delta, CallEnded) and delta.call is not None:
            whole.append(delta.index)
    if parser.broken:
        return content, []
    return text.strip("\n") if whole else text, [(names[at], arguments.get(at, "{}").strip()) for at in whole]


def _frames(token_ids: Sequence[int]) -> Iterator[tuple[str, str, bool]]:
    """Role, content, and whether the frame has ended."""
    role: str | None = None
    content = bytearray()
    for at, token in enumerate(token_ids):
        if 0 <= token < 256:
            if role is None:
                raise RequestError("bad_request", f"token_ids[{at}] stands outside any message")
            content.append(token)
        elif token in _MARKS:
            content += _MARKS[token]
        elif token == ID[END]:
            if role is None:
                raise RequestError("bad_request", f"token_ids[{at}] ends a message that was not begun")
            yield role, content.decode("utf-8", errors="replace"), True
            role, content = None, bytearray()
        elif token in _ROLE:
            if role is not None:  # cut short: what is too long for a summary is
                yield role, content.decode("utf-8", errors="replace"), True
            role, content = _ROLE[token], bytearray()
        else:
            raise RequestError(
                "token_out_of_range", f"token_ids[{at}] is {token}, outside the vocabulary of {VOCAB_SIZE}"
            )
    if role is not None:
        yield role, content.decode("utf-8", errors="replace"), False
