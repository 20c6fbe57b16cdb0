"""What a chat template writes around contents, learnt by rendering it with markers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import TemplateError
from engine.tokens.render import render

_MARK = re.compile(r"qz(\d)zq")
_PROBE: dict[str, Any] = {
    "type": "function",
    "function": {"name": "qzprobezq", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def _mark(index: int) -> str:
    return f"qz{index}zq"


@dataclass(frozen=True)
class Scaffold:
    """Texts around contents. `user`: before and after; `tools`: before the first result, between two, after the last.

    `assistant_close` is what follows the eos token.
    """

    user: tuple[str, str]
    tools: tuple[str, str, str]
    assistant_open: str
    assistant_close: str
    native_tools: bool

    def opening(self, template: str, has_system: bool, functions: Sequence[dict[str, Any]]) -> tuple[str, ...]:
        """Text parts of a transcript's start: one part, or two with the system message between them."""
        messages = _messages(("system", _mark(0))) if has_system else []
        messages += _messages(("user", _mark(1)))
        text = render(template, [_job(messages, tools=list(functions))])[0]
        tail = self.user[0] + _mark(1) + self.user[1]
        if not text.endswith(tail):
            raise TemplateError("the chat template writes a first user message unlike later ones; it cannot be used")
        parts = _MARK.split(text[: -len(tail)])[::2]
        if len(parts) != 1 + has_system:
            raise TemplateError("the chat template drops or repeats the system message; it cannot be used")
        return tuple(parts)


def learn(template: str, eos: str) -> Scaffold:
    """Render conversations that grow by one message each and take the differences.

    Raises TemplateError when a longer conversation does not begin with the shorter one: then a transcript could not be
    appended to, and its tokens could not be kept.
    """
    asked = _messages(("system", "s"), ("user", _mark(1)))
    answered = asked + _messages(("assistant", _mark(2)))
    again = answered + _messages(("user", _mark(3)))
    plain, opened, whole, more, tooled = render(
        template,
        [_job(asked), _job(asked, opens=True), _job(answered), _job(again), _job(asked, tools=[_PROBE])],
    )
    user = _parts(_added(whole, more), 1)
    assistant_open = _added(plain, opened)
    assistant = _added(plain, whole)
    before = assistant_open + _mark(2)
    if not assistant.startswith(before + eos) or not user[0]:
        raise TemplateError("the chat template writes past assistant messages unlike new ones; it cannot be used")
    native = "qzprobezq" in tooled
    return Scaffold(
        user=(user[0], user[1]),
        tools=_learn_tools(template, asked) if native else ("", "", ""),
        assistant_open=assistant_open,
        assistant_close=assistant[len(before + eos) :],
        native_tools=native,
    )


def _learn_tools(template: str, asked: list[dict[str, Any]]) -> tuple[str, str, str]:
    call = {"id": "c0", "type": "function", "function": {"name": "qzprobezq", "arguments": {}}}
    called = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    results = [{"role": "tool", "name": "qzprobezq", "tool_call_id": "c0", "content": _mark(i)} for i in range(3)]
    jobs = [_job(called + results[:count], tools=[_PROBE]) for count in range(4)]
    base, *grown = render(template, jobs)
    one, two, three = (_parts(_added(base, text), count) for count, text in enumerate(grown, start=1))
    if (one[0], one[-1]) != (two[0], two[-1]) or three != [two[0], two[1], two[1], two[2]]:
        raise TemplateError(
            "the chat template writes tool results in a way that depends on their number; it cannot be used"
        )
    return two[0], two[1], two[2]


def _messages(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


def _job(
    messages: list[dict[str, Any]], opens: bool = False, tools: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    return {
        "messages": messages,
        "add_generation_prompt": opens,
        "tools": tools or None,
        "bos_token": "",
        "eos_token": "",
    }


def _added(shorter: str, longer: str) -> str:
    if not longer.startswith(shorter) or longer == shorter:
        raise TemplateError("the chat template rewrites earlier messages when one is added; it cannot be used")
    return longer[len(shorter) :]


def _parts(text: str, contents: int) -> list[str]:
    parts = _MARK.split(text)[::2]
    if len(parts) != contents + 1:
        raise TemplateError("the chat template drops or repeats a message's content; it cannot be used")
    return parts
