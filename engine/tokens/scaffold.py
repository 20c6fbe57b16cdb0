"""What a chat template writes around contents, learnt by rendering it with markers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import TemplateError
from engine.tokens.formats import CALL_ID, FORMATS, HERMES, CallFormat
from engine.tokens.render import render

_MARK = re.compile(r"qz(\d)zq")
_PROBE: dict[str, Any] = {
    "type": "function",
    "function": {"name": "qzprobezq", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_SYSTEM = "qzsystemzq"
_PROBED = {"q": "qz9zq"}  # arguments of a past call


def _mark(index: int) -> str:
    return f"qz{index}zq"


@dataclass(frozen=True)
class Template:
    """A chat template, and the texts of the tokens that begin a transcript and end a message."""

    source: str
    bos: str
    eos: str

    def written(self, *jobs: dict[str, Any]) -> list[str]:
        return render(self.source, [{**job, "bos_token": self.bos, "eos_token": self.eos} for job in jobs])


@dataclass(frozen=True)
class Scaffold:
    """Texts around contents. `user`: before and after; `tools`: before the first result, between two, after the last.

    `assistant_close` is what follows the eos token. Without `has_system` the template has no place for a system
    message; then it is a user message of its own, before the first one. `calls`: how the template writes calls, None
    where it knows no tools, or writes them in a way that we do not know; `quotes_results`: results stand in JSON texts.
    """

    user: tuple[str, str]
    tools: tuple[str, str, str]
    assistant_open: str
    assistant_close: str
    has_system: bool
    calls: CallFormat | None = None
    quotes_results: bool = False

    @property
    def native_tools(self) -> bool:
        return self.calls is not None

    def result(self, content: str) -> str:
        """A tool's result as it stands between the texts of `tools`."""
        return json.dumps(content, ensure_ascii=False)[1:-1] if self.quotes_results else content

    def opening(self, template: Template, has_system: bool, functions: Sequence[dict[str, Any]]) -> tuple[str, ...]:
        """Text parts of a transcript's start: one part, or two with the system message between them."""
        if has_system and not self.has_system:
            (start,) = self.opening(template, False, functions)
            return start + self.user[0], self.user[1]
        messages = _messages(("system", _mark(0))) if has_system else []
        messages += _messages(("user", _mark(1)))
        text = template.written(_job(messages, tools=list(functions)))[0]
        tail = self.user[0] + _mark(1) + self.user[1]
        if not text.endswith(tail):
            raise TemplateError("the chat template writes a first user message unlike later ones; it cannot be used")
        parts = _MARK.split(text[: -len(tail)])[::2]
        if len(parts) != 1 + has_system:
            raise TemplateError("the chat template drops or repeats the system message; it cannot be used")
        return tuple(parts)


def learn(template: Template, calls: CallFormat | None = None) -> Scaffold:
    """Render conversations that grow by a message and take the differences.

    An assistant message is learnt where another one follows it: some templates write the last one in another way, with
    the model's thoughts before it. What the model said stays in the transcript as it was said.

    `calls`: how calls are written, whatever the template makes of one.

    Raises TemplateError when a longer conversation does not begin with the shorter one: then a transcript could not be
    appended to, and its tokens could not be kept.
    """
    try:
        return _learn(template, calls, has_system=True)
    except TemplateError as refusal:
        if "system" not in template.source and "raise_exception" not in template.source:
            raise
        try:
            return _learn(template, calls, has_system=False)
        except TemplateError:
            raise refusal from None


def _learn(template: Template, given: CallFormat | None, *, has_system: bool) -> Scaffold:
    asked = _messages(*[("system", _SYSTEM)] * has_system, ("user", _mark(1)))
    answered = asked + _messages(("assistant", _mark(2)))
    again = answered + _messages(("user", _mark(3)))
    plain, opened, whole, more, tooled = template.written(
        _job(asked), _job(asked, opens=True), _job(answered), _job(again), _job(asked, tools=[_PROBE])
    )
    assistant_open = _added(plain, opened, maybe_nothing=True)
    _, ending, close = whole.partition(_mark(2) + template.eos)
    grown = _added(plain, more)
    lead, said, rest = grown.partition(_mark(2))
    begins = said and lead.rstrip() == assistant_open.rstrip()  # some write a space that the model says itself
    if not ending or not begins or not rest.startswith(template.eos + close):
        raise TemplateError("the chat template writes past assistant messages unlike new ones; it cannot be used")
    user = _parts(rest[len(template.eos + close) :], 1)
    if not user[0]:
        raise TemplateError("the chat template writes nothing before a user message; it cannot be used")
    tells_before = tooled.endswith(user[0] + _mark(1) + user[1])  # else a first user message is unlike later ones
    calls = _learn_calls(template, asked, tooled, given) if tells_before else None
    if given is not None and calls is None:
        raise TemplateError("the chat template knows no tools: a format of calls cannot be chosen for it; use auto")
    tools, quotes = _learn_tools(template, asked, close) if calls else (("", "", ""), False)
    return Scaffold(
        user=(user[0], user[1]),
        tools=tools,
        assistant_open=assistant_open,
        assistant_close=close,
        has_system=has_system and _SYSTEM in plain,  # some leave it out without a word
        calls=calls,
        quotes_results=quotes,
    )


def _learn_calls(
    template: Template, asked: list[dict[str, Any]], tooled: str, given: CallFormat | None
) -> CallFormat | None:
    """The format that is given, or in which the template writes a past call; None where it is none that we know."""
    if "qzprobezq" not in tooled:
        return None
    if given is not None:
        return given
    if HERMES.marker in tooled:
        return HERMES
    try:
        (written,) = template.written(_job([*asked, _called()], tools=[_PROBE]))
    except TemplateError:
        return None
    return next((format for format in FORMATS if format.written([("qzprobezq", _PROBED)]) in written), None)


def _called() -> dict[str, Any]:
    call = {"id": CALL_ID, "type": "function", "function": {"name": "qzprobezq", "arguments": _PROBED}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _learn_tools(template: Template, asked: list[dict[str, Any]], close: str) -> tuple[tuple[str, str, str], bool]:
    """What stands around results, and whether they are quoted."""
    called = [*asked, _called()]
    given = [_mark(0), _mark(1), _mark(2)]
    jobs = [_job(called + [_result(text) for text in given[:count]], tools=[_PROBE]) for count in range(1, 4)]
    jobs.append(_job([*called, _result(f"{_mark(0)}\n{_mark(1)}")], tools=[_PROBE]))
    *texts, lines = template.written(*jobs)
    one, two, three = (_results(text, template.eos + close, n) for n, text in enumerate(texts, start=1))
    if (one[0], one[-1]) != (two[0], two[-1]) or three != [two[0], two[1], two[1], two[2]]:
        raise TemplateError(
            "the chat template writes tool results in a way that depends on their number; it cannot be used"
        )
    return (two[0], two[1], two[2]), f"{_mark(0)}\\n{_mark(1)}" in lines


def _result(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "qzprobezq", "tool_call_id": CALL_ID, "content": content}


def _results(text: str, end: str, count: int) -> list[str]:
    """What is written around so many tool results, from the end of the message that asked for them."""
    at = text.rfind(end, 0, text.find(_mark(0)))
    if at < 0:
        raise TemplateError("the chat template does not end a message that calls tools; it cannot be used")
    return _parts(text[at + len(end) :], count)


def _messages(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


def _job(
    messages: list[dict[str, Any]], opens: bool = False, tools: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    return {
        "messages": messages,
        "add_generation_prompt": opens,
        "tools": tools or None,
        "tools_in_user_message": False,  # of Llama 3: a user message is written in one way
    }


def _added(shorter: str, longer: str, maybe_nothing: bool = False) -> str:
    if not longer.startswith(shorter) or (longer == shorter and not maybe_nothing):
        raise TemplateError("the chat template rewrites earlier messages when one is added; it cannot be used")
    return longer[len(shorter) :]


def _parts(text: str, contents: int) -> list[str]:
    parts = _MARK.split(text)[::2]
    if len(parts) != contents + 1:
        raise TemplateError("the chat template drops or repeats a message's content; it cannot be used")
    return parts
