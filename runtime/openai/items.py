"""Conversations as OpenAI's clients write them, as this house keeps them, and as a session takes them.

An item is kept as a message (`role`, `text`), a `function_call`, a `function_call_output`, what was asked and answered
of an approval, or a `reasoning` item, which is passed through and read by nobody. Two conversations are the same one as
far as their chains of digests agree.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import InvalidRequest
from runtime.openai.tools import OURS, called_name

Items = list[dict[str, Any]]
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "refusal")
UNREAD = ("reasoning", "mcp_approval_request", "mcp_approval_response")  # by a model
MAX_ITEMS = 5000
_CALLABLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def input_items(given: Any, param: str = "input") -> Items:
    """Items of a request. Raises InvalidRequest, which names the one that cannot be taken."""
    if given is None:
        return []
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "text": given}] if given else []
    if not isinstance(given, list):
        raise InvalidRequest(f"{param}: give a text or a list of items", param=param)
    if len(given) > MAX_ITEMS:
        raise InvalidRequest(f"{param}: {len(given)} items are more than the {MAX_ITEMS} allowed", param=param)
    found: Items = []
    for index, item in enumerate(given):
        found += one_item(item, f"{param}[{index}]")
    return found


def one_item(item: Any, at: str) -> Items:
    """What one item of a request is kept as. `at`: its place there, for whoever is refused."""
    if not isinstance(item, Mapping):
        raise _bad(at, "give an object")
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise _bad(f"{at}.role", f"{role!r} is none of {', '.join(_ROLES)}")
        return [{"type": "message", "role": role, "text": _text(item.get("content"), f"{at}.content")}]
    if kind in ("function_call", "mcp_call") and item.get("status") == "incomplete":
        return []  # it was cut short, and never ran
    if kind == "function_call":
        return [_call(_word(item, "call_id", at), _word(item, "name", at), _arguments(item, at))]
    if kind == "function_call_output":
        return [_output(_word(item, "call_id", at), _text(item.get("output"), f"{at}.output"))]
    if kind == "mcp_call":  # what a session ran itself, sent back as it was told
        if not _CALLABLE.fullmatch(str(item.get("name"))):
            return []  # no tool, whatever the model made of it
        call_id = _word(item, "id", at)
        name = called_name(str(item.get("server_label") or OURS), _word(item, "name", at))
        called = _call(call_id, name, _arguments(item, at))
        return [called, _output(call_id, _ran(item, at))]
    if kind == "reasoning":
        return [{**item, "id": _word(item, "id", at)}] if "id" in item else [dict(item)]
    if kind == "mcp_approval_request":
        names = ("id", "name", "server_label")
        about = {name: _word(item, name, at) for name in names}
        return [{"type": kind, **about, "arguments": _arguments(item, at)}]
    if kind == "mcp_approval_response":
        return [_approval(item, at)]
    if kind == "mcp_list_tools":
        return []
    raise _bad(f"{at}.type", f"items of type {kind!r} are not taken; use message, function_call, function_call_output")


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def _arguments(item: Mapping[str, Any], at: str) -> str:
    given = item.get("arguments", "{}")
    written = (given if isinstance(given, str) else json.dumps(given)) or "{}"
    try:
        if not isinstance(json.loads(written, parse_constant=_no_number), dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise _bad(f"{at}.arguments", "give the JSON text of an object") from None
    return written


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _output(call_id: str, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def _ran(item: Mapping[str, Any], at: str) -> str:
    """What a call of ours gave, as it was told."""
    output, error = item.get("output"), item.get("error")
    if isinstance(error, Mapping):
        error = _text(error.get("content"), f"{at}.error.content")
    if not all(isinstance(one, str | None) for one in (output, error)):
        raise _bad(f"{at}.output", "give a text")
    return output or error or ""


def _approval(item: Mapping[str, Any], at: str) -> dict[str, Any]:
    approve, reason = item.get("approve"), item.get("reason")
    if not isinstance(approve, bool):
        raise _bad(f"{at}.approve", "say true or false")
    if reason is not None and not (isinstance(reason, str) and len(reason) <= 2000):
        raise _bad(f"{at}.reason", "give a text of at most 2000 characters")
    about = {"approval_request_id": _word(item, "approval_request_id", at), "approve": approve}
    return {"type": "mcp_approval_response", **about, "reason": reason}


def _word(item: Mapping[str, Any], name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= 200:
        raise _bad(f"{at}.{name}", "give a text of 1 to 200 characters")
    return value


def _text(content: Any, at: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(at, "give a text or a list of parts")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXTS:
            raise _bad(f"{at}[{index}].type", f"parts of type {kind!r} are not read by this model; give text")
        value = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(value, str):
            raise _bad(f"{at}[{index}].text", "give a text")
        texts.append(value)
    return "".join(texts)


def _bad(at: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{at}: {message}", param=at, code="invalid_value")


@dataclass(frozen=True)
class Chain:
    """Digests of a conversation: one for its beginning (model, instructions, tools), and one after each item."""

    digests: tuple[str, ...]

    @classmethod
    def of(cls, root: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> Chain:
        digests = [_digest("", root)]
        for item in items:
            digests.append(digests[-1] if item["type"] == "reasoning" else _digest(digests[-1], _said(item)))
        return cls(tuple(digests))

    @property
    def last(self) -> str:
        return self.digests[-1]


def _said(item: Mapping[str, Any]) -> Any:
    """What makes two items the same one: not their ids, nor how their JSON is spaced."""
    if item["type"] == "function_call":
        return ["call", item["name"], json.loads(item["arguments"])]
    if item["type"] == "function_call_output":
        return ["output", item["output"]]
    if item["type"] == "mcp_approval_request":
        return ["asks", item["id"]]
    if item["type"] == "mcp_approval_response":
        return ["approves", item["approval_request_id"], item["approve"]]
    return ["message", "system" if item["role"] == "developer" else item["role"], item["text"]]


def _digest(before: str, value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()


def opening(items: Items) -> tuple[list[str], Items]:
    """What leads a conversation as its instructions, and the rest of it."""
    count = next(
        (n for n, item in enumerate(items) if item["type"] != "message" or item["role"] not in ("system", "developer")),
        len(items),
    )
    return [item["text"] for item in items[:count]], items[count:]


def as_engine(items: Items) -> list[dict[str, Any]]:
    """Items as a session takes them (`runtime.config.Item`). Raises InvalidRequest where a result has no call, or a
    call no result: models were never shown such a conversation."""
    names: dict[str, str] = {}
    open_calls: dict[str, str] = {}
    made: list[dict[str, Any]] = []
    for item in items:
        kind = item["type"]
        if kind in UNREAD:
            continue
        if kind == "function_call":
            names[item["call_id"]] = open_calls[item["call_id"]] = item["name"]
            arguments = json.loads(item["arguments"])
            made.append({"type": "called", "call_id": item["call_id"], "name": item["name"], "arguments": arguments})
        elif kind == "function_call_output":
            if item["call_id"] not in names:
                raise InvalidRequest(
                    f"input: no function call has the call_id {item['call_id']!r}", param="input", code="invalid_value"
                )
            open_calls.pop(item["call_id"], None)
            name = names[item["call_id"]]
            made.append({"type": "result", "call_id": item["call_id"], "name": name, "output": item["output"]})
        else:
            if open_calls and item["role"] != "assistant":
                break
            role = "assistant" if item["role"] == "assistant" else "user"
            made.append({"type": "said", "role": role, "text": item["text"]})
    if open_calls:
        missing = next(iter(open_calls))
        raise InvalidRequest(
            f"input: No tool output found for function call {missing}.", param="input", code="invalid_value"
        )
    return made


def listed(items: Sequence[Mapping[str, Any]], prefix: str) -> list[dict[str, Any]]:
    """Kept items as they are listed. Those that have no id get one from their place."""
    shown = []
    for index, item in enumerate(items):
        own = item.get("id") or f"{prefix}_{index}"
        if item["type"] == "message":
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            part: dict[str, Any] = {"type": kind, "text": item["text"]}
            if kind == "output_text":
                part |= {"annotations": [], "logprobs": item.get("logprobs") or []}
            about = {"type": "message", "status": "completed", "role": item["role"], "content": [part]}
            shown.append({"id": own, **about})
        elif item["type"] == "function_call":
            names = ("call_id", "name", "arguments")
            shown.append(
                {"id": own, "type": "function_call", "status": "completed", **{name: item[name] for name in names}}
            )
        elif item["type"] == "function_call_output":
            about = {"call_id": item["call_id"], "output": item["output"]}
            shown.append({"id": own, "type": "function_call_output", "status": "completed", **about})
        else:
            shown.append({**item, "id": own})
    return shown
