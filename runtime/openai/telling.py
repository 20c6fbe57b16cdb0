"""What a session's events tell of a response: its items and the events of its stream.

A function of the record alone: whoever reads the same events, at whatever time and from whichever connection, tells the
same things with the same sequence numbers. So a stream that broke goes on anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.tokens import ArgumentsDelta, Call, CallEnded, CallFormat, CallStarted, MessageParser, TextDelta
from runtime.openai.items import Items, one_item
from runtime.openai.tools import server_of

Told = dict[str, Any]
ENDED = ("completed", "failed", "incomplete", "cancelled")  # statuses of a response that goes on no longer
_ENDS = ("session.idle", "session.waiting", "session.failed", "session.cancelling", "session.cancelled")
_NO_USAGE = {"input": 0, "cached": 0, "output": 0}


def usage_of(counted: Mapping[str, int]) -> dict[str, Any]:
    """As answers show it. Cached are tokens whose KV was there, wherever it lay; nothing is guessed."""
    return {
        "input_tokens": counted["input"],
        "input_tokens_details": {"cached_tokens": counted["cached"]},
        "output_tokens": counted["output"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted["input"] + counted["output"],
    }


@dataclass
class _Open:
    """An item that is being told. `at`: its place among the response's items."""

    at: int
    item: dict[str, Any]


@dataclass
class Telling:
    """Give me the response as it was accepted and then the session's events, and I say what a stream tells of each.

    base: the response object, in progress
    functions: names of tools that run at the caller
    has_tools: whether there is anything to call
    message_id: the message that the turn begins with; None: it begins with the answers to calls
    asks: names of tools whose calls wait for approval, `label__*` for a server's. With any, calls are told once it is
    known that they run, since the same message may hold one that waits
    held: calls of the message before that wait for approval, or for the approval of others, by number: `name`,
    `arguments`, and the `question` that was asked. `held_step` is their message's
    """

    base: dict[str, Any]
    session_id: str
    calls: CallFormat
    functions: Collection[str]
    message_id: str | None
    has_tools: bool = True
    asks: Collection[str] = ()
    held: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    held_step: int = 0
    output: list[dict[str, Any]] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=lambda: dict(_NO_USAGE))
    done: bool = False
    last_position: int = 0
    last_step: int = 0
    status: str = "in_progress"
    _told: list[Told] = field(default_factory=list)
    _sequence: int = 0
    _parser: MessageParser | None = None
    _text: _Open | None = None
    _blank: str = ""
    _logprobs: list[Any] = field(default_factory=list)
    _call: dict[int, _Open] = field(default_factory=dict)  # of the think that speaks
    _inside: dict[int, _Open] = field(default_factory=dict)  # calls of the sandbox's tools that have not ended
    _began: bool = False
    _outcome: str = ""
    _step: int = 0
    _gone: set[str] = field(default_factory=set)  # items that were cut off, and said anew

    def begin(self) -> list[Told]:
        """What is told before anything has happened."""
        queued = self.base.get("background")
        self._tell("response.created", response=self._response("queued" if queued else "in_progress"))
        if queued:
            self._tell("response.queued", response=self._response("queued"))
        self._tell("response.in_progress", response=self._response("in_progress"))
        return self._taken()

    def feed(self, event: Mapping[str, Any]) -> list[Told]:
        """`event`: with `id` (its position), `type`, `step` and `data`."""
        self.last_position = event["id"]
        kind, data = event["type"], event["data"]
        if self.done:
            return []
        if kind == "step.started" and data.get("kind") == "input":
            self._began = self._began or self.message_id is None or data.get("message_id") == self.message_id
        elif kind == "question.answered" and self.message_id is None:
            self._began = True
        elif kind == "step.started" and data.get("kind") == "think":
            self._start_think(event["step"])
        elif kind == "step.retrying" and data.get("dropped"):
            self._begin_anew()
        elif kind == "model.delta":
            self._say(event["step"], data)
        elif kind == "message.completed":
            self._end_think(data.get("outcome", ""))
        elif kind == "step.completed" and "kv" in data:
            self._count(event["step"], data)
        elif kind in ("tool.started", "tool.settled"):
            self._open_held(data)
            if kind == "tool.settled":
                self._settle(data)
        elif kind == "tool.client_required":
            self._hand_over(data)
        elif kind == "tool.approval_required":
            self._ask(data)
        elif kind in _ENDS or kind in ("session.interrupted", "session.paused"):
            self._rest(kind, data)
        return self._taken()

    def response(self) -> dict[str, Any]:
        """The response as it stands."""
        return self._response(self.status)

    @property
    def kept(self) -> Items:
        """Its items as conversations keep them: what a client sends back is the same."""
        made: Items = []
        for index, item in enumerate(self.output):
            if item["id"] in self._gone:
                continue
            for first, *rest in filter(None, [one_item(item, f"output[{index}]")]):
                made += [{**first, "id": item["id"]}, *rest]
        return made

    @property
    def _callable(self) -> Collection[str] | None:
        """What may be called at all: anything, or nothing."""
        return None if self.has_tools and self.base.get("tool_choice") != "none" else ()

    # -- thinks -------------------------------------------------------------------------------------------------------

    def _start_think(self, step: int) -> None:
        if step != self._step:  # another attempt goes on where the last one stopped
            self._step, self._parser = step, MessageParser(self.calls, self._callable)
            self._call, self._logprobs, self._blank = {}, [], ""

    def _say(self, step: int, data: Mapping[str, Any]) -> None:
        if self._parser is None or step != self._step:
            self._start_think(step)
        assert self._parser is not None
        self._logprobs += data.get("logprobs") or []
        for delta in self._parser.push(data["text"]):
            self._delta(delta)

    def _delta(self, delta: TextDelta | CallStarted | ArgumentsDelta | CallEnded) -> None:
        if isinstance(delta, TextDelta):
            self._say_text(delta.text)
        elif isinstance(delta, CallStarted):
            self._blank = ""
            self._end_text("completed")
            if not self._is_held(delta.name):
                self._call[delta.index] = self._begin_call(delta.index, delta.name)
        elif isinstance(delta, ArgumentsDelta):
            if (opened := self._call.get(delta.index)) is None:
                return
            opened.item["arguments"] += delta.text
            self._tell(f"{_events(opened)}_arguments.delta", **_place(opened), delta=delta.text)
        else:
            self._end_call(delta)

    def _say_text(self, text: str) -> None:
        if self._text is None:
            text = self._blank + text
            if not text.strip():  # white space before a call is no message
                self._blank = text
                return
            self._blank = ""
            item: dict[str, Any] = {
                "id": self._id("msg"),
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
            self._text = self._add(item)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._tell("response.content_part.added", **_place(self._text), content_index=0, part=dict(part))
            item["content"] = [part]
        self._text.item["content"][0]["text"] += text
        about = {"content_index": 0, "delta": text, "logprobs": []}
        self._tell("response.output_text.delta", **_place(self._text), **about)

    def _end_text(self, status: str) -> None:
        if self._text is None:
            return
        opened, self._text = self._text, None
        part = opened.item["content"][0]
        part["logprobs"] = [_logprob(one) for one in self._logprobs] if self.base.get("_logprobs") else []
        about = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
        self._tell("response.output_text.done", **_place(opened), **about)
        self._tell("response.content_part.done", **_place(opened), content_index=0, part=dict(part))
        self._close(opened, status)

    def _is_held(self, name: str) -> bool:
        """Whether a call is told only once it is known that it runs."""
        return bool(self.asks) and (name in self.functions or self._asks_for(name))

    def _asks_for(self, name: str) -> bool:
        return bool({name, f"{name.partition('__')[0]}__*", "*"} & set(self.asks))

    def _begin_call(self, index: int, name: str, question: str | None = None) -> _Open:
        if name in self.functions:
            call_id = f"call_{self.session_id.removeprefix('ses_')}_{self._step or self.held_step}_{index}"
            item = {"id": self._id("fc"), "type": "function_call", "status": "in_progress", "call_id": call_id}
            return self._add({**item, "name": name, "arguments": ""})
        label, name = server_of(name)
        item = {"id": self._id("mcp"), "type": "mcp_call", "status": "in_progress", "server_label": label}
        asked = {"approval_request_id": question} if question else {}
        opened = self._add({**item, **asked, "name": name, "arguments": "", "output": None, "error": None})
        self._tell("response.mcp_call.in_progress", **_place(opened))
        return opened

    def _end_call(self, delta: CallEnded) -> None:
        opened = self._call.get(delta.index)
        if opened is not None:
            self._close_call(opened, delta)

    def _close_call(self, opened: _Open, delta: CallEnded) -> None:
        about = {"name": opened.item["name"]} if opened.item["type"] == "function_call" else {}
        arguments = opened.item["arguments"]
        self._tell(f"{_events(opened)}_arguments.done", **_place(opened), arguments=arguments, **about)
        if opened.item["type"] == "mcp_call":
            if delta.call is None:  # no call: nothing that a conversation could keep
                self._tell("response.mcp_call.failed", **_place(opened))
                self._close(opened, "incomplete")
            else:
                self._inside[delta.index] = opened
            return
        self._close(opened, "completed" if delta.call is not None else "incomplete")

    def _end_think(self, outcome: str) -> None:
        self._outcome = outcome
        if self._parser is not None:
            for delta in self._parser.finish():
                self._delta(delta)
        self._parser = None
        self._end_text("incomplete" if outcome in ("incomplete", "interrupted") else "completed")

    def _begin_anew(self) -> None:
        """What was said was cut off, and is said anew: it is no part of the answer, though it was told."""
        cut = [opened for opened in (self._text, *self._call.values()) if opened is not None]
        for opened in cut:
            self._close(opened, "incomplete")
            if opened.item["type"] == "message":
                opened.item["content"] = []
        self._gone.update(opened.item["id"] for opened in cut)
        self._inside.clear()
        self._text, self._parser, self._step = None, None, 0

    def _count(self, step: int, data: Mapping[str, Any]) -> None:
        places = data["kv"]
        cached = sum(places.get(name, 0) for name in ("device", "shared", "host", "nvme", "external"))
        self.counted["cached"] += cached
        self.counted["input"] += cached + places.get("computed", 0) + places.get("recomputed", 0)
        self.counted["output"] += data.get("sampled", 0)
        self.last_step = step

    # -- what comes between thinks ------------------------------------------------------------------------------------

    def _settle(self, data: Mapping[str, Any]) -> None:
        opened = self._inside.pop(data.get("call", -1), None)
        if opened is not None:
            failed = data.get("reason") != "exit" or data.get("code") not in (0, None)
            text = str(data.get("preview", ""))
            error = f"{data.get('reason')} {data.get('code') if data.get('code') is not None else ''}".strip()
            self._end_inside(opened, text, error if failed else None)

    def _open_held(self, data: Mapping[str, Any]) -> None:
        """A call that was held runs now, or will not run."""
        number = data.get("call", -1)
        if self._step or number in self._inside or number not in self.held:
            return
        known = self.held[number]
        if known["name"] not in self.functions:
            self._inside[number] = self._tell_call(number, known["name"], known["arguments"], known.get("question"))

    def _hand_over(self, data: Mapping[str, Any]) -> None:
        """A call that the caller is to run, where it was not told while it was written."""
        if self.asks:
            number, arguments = data["call"], json.dumps(data.get("arguments", {}))
            opened = self._tell_call(number, data["name"], arguments)
            self._close_call(opened, CallEnded(number, Call(data["name"], data.get("arguments", {}), arguments)))

    def _tell_call(self, number: int, name: str, arguments: str, question: str | None = None) -> _Open:
        opened = self._begin_call(number, name, question)
        opened.item["arguments"] = arguments
        self._tell(f"{_events(opened)}_arguments.delta", **_place(opened), delta=arguments)
        if opened.item["type"] == "mcp_call":
            self._tell("response.mcp_call_arguments.done", **_place(opened), arguments=arguments)
        return opened

    def _end_inside(self, opened: _Open, output: str | None, error: str | None) -> None:
        content = [{"type": "text", "text": error}]
        opened.item |= {"output": output}
        opened.item["error"] = {"type": "mcp_tool_execution_error", "content": content} if error else None
        self._tell(f"response.mcp_call.{'failed' if error else 'completed'}", **_place(opened))
        self._close(opened, "failed" if error else "completed")

    def _ask(self, data: Mapping[str, Any]) -> None:
        label, name = server_of(data["name"])
        about = {"name": name, "arguments": json.dumps(data.get("arguments", {})), "server_label": label}
        opened = self._add({"id": data["question_id"], "type": "mcp_approval_request", **about})
        self._tell("response.output_item.done", output_index=opened.at, item=dict(opened.item))

    def _rest(self, kind: str, data: Mapping[str, Any]) -> None:
        if not self._began and kind in ("session.idle", "session.interrupted"):
            return  # it rested before the turn began
        if kind == "session.interrupted" and self.message_id is None and not self._outcome:
            return
        if self._parser is not None or self._text is not None:
            self._end_think(self._outcome)
        for opened in self._inside.values():
            if kind == "session.waiting":  # they run once others are approved, and are told then
                self._close(opened, "incomplete")
            else:
                self._end_inside(opened, None, "it did not end")
        self._inside.clear()
        if kind == "session.failed":
            return self._finish("failed", error={"code": "server_error", "message": str(data.get("message", ""))})
        if kind == "session.waiting" and data.get("waiting_for") == "budget":
            return self._finish("failed", error={"code": "rate_limit_exceeded", "message": "the budget is used up"})
        if kind == "session.waiting" and data.get("waiting_for") == "outcome":
            message = "nobody knows whether a call took effect; say so at /v1/approvals"
            return self._finish("failed", error={"code": "server_error", "message": message})
        if kind in ("session.idle", "session.waiting"):
            if self._outcome == "incomplete":
                return self._finish("incomplete", details={"reason": "max_output_tokens"})
            return self._finish("completed")
        return self._finish("cancelled")

    def _finish(self, status: str, *, error: Any = None, details: Any = None) -> None:
        self.status, self.done = status, True
        self.base |= {"error": error, "incomplete_details": details}
        name = {"cancelled": "incomplete"}.get(status, status)
        self._tell(f"response.{name}", response=self._response(status))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _response(self, status: str) -> dict[str, Any]:
        shown = {name: value for name, value in self.base.items() if not name.startswith("_")}
        usage = usage_of(self.counted) if status in ENDED else None
        return {**shown, "status": status, "output": [dict(item) for item in self.output], "usage": usage}

    def _id(self, kind: str) -> str:
        step = self._step or f"{self.held_step}_held"
        return f"{kind}_{self.session_id.removeprefix('ses_')}_{step}_{len(self.output)}"

    def _add(self, item: dict[str, Any]) -> _Open:
        opened = _Open(len(self.output), item)
        self.output.append(item)
        self._tell("response.output_item.added", output_index=opened.at, item={**item})
        return opened

    def _close(self, opened: _Open, status: str) -> None:
        opened.item["status"] = status
        self._tell("response.output_item.done", output_index=opened.at, item=dict(opened.item))

    def _tell(self, kind: str, **about: Any) -> None:
        self._told.append({"type": kind, "sequence_number": self._sequence, **about})
        self._sequence += 1

    def _taken(self) -> list[Told]:
        told, self._told = self._told, []
        return told


def _place(opened: _Open) -> dict[str, Any]:
    return {"item_id": opened.item["id"], "output_index": opened.at}


def _events(opened: _Open) -> str:
    return "response.function_call" if opened.item["type"] == "function_call" else "response.mcp_call"


def _logprob(one: Mapping[str, Any]) -> dict[str, Any]:
    """As answers show it; `told` with the texts of its tokens."""
    text = one.get("token", "")
    top = [
        {"token": each.get("token", ""), "logprob": each["logprob"], "bytes": list(each.get("token", "").encode())}
        for each in one.get("top", [])
    ]
    return {"token": text, "logprob": one["logprob"], "bytes": list(text.encode()), "top_logprobs": top}
