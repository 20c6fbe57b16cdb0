"""Chat completions out of what a response tells: its chunks, and the whole of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Told = Mapping[str, Any]
# Chunks can take nothing back, so a caller who saw half of it is told to ask again.
_BEGUN_ANEW = {
    "message": "the server that runs the model was lost in the middle of its answer, which it begins anew; ask again",
    "type": "server_error",
    "code": "answer_begun_anew",
    "param": None,
}
_REASONS = {"completed": "stop", "incomplete": "length", "cancelled": "stop", "failed": "stop"}


def usage(response: Mapping[str, Any]) -> dict[str, Any]:
    """As chat completions show it."""
    given = response["usage"]
    return {
        "prompt_tokens": given["input_tokens"],
        "completion_tokens": given["output_tokens"],
        "total_tokens": given["total_tokens"],
        "prompt_tokens_details": {"cached_tokens": given["input_tokens_details"]["cached_tokens"]},
    }


def finish_reason(response: Mapping[str, Any]) -> str:
    if any(item["type"] == "function_call" and item["status"] == "completed" for item in response["output"]):
        return "tool_calls"
    return _REASONS[response["status"]]


class Chatting:
    """Give me what one choice's response tells, and I say its chunks."""

    def __init__(self, head: Mapping[str, Any], index: int) -> None:
        self._head, self._index = head, index
        self._calls: dict[str, int] = {}  # by item
        self._began = False
        self._cut = self._broken = False

    def chunks(self, told: Sequence[Told]) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        if not self._began:
            self._began = True
            made.append(self._chunk({"role": "assistant", "content": ""}))
        for one in told:
            made += self._of(one)
        return made

    def _of(self, told: Told) -> list[dict[str, Any]]:
        kind = told["type"]
        if self._broken:
            return []
        if kind == "response.output_item.done" and told["item"].get("status") == "incomplete":
            self._cut = True
        elif kind == "response.output_item.added" and self._cut:
            self._broken = True
            return [{"error": dict(_BEGUN_ANEW)}]
        if kind == "response.output_text.delta":
            return [self._chunk({"content": told["delta"]})]
        if kind == "response.output_item.added" and told["item"]["type"] == "function_call":
            item = told["item"]
            at = self._calls.setdefault(item["id"], len(self._calls))
            function = {"name": item["name"], "arguments": ""}
            return [self._chunk({"tool_calls": [_call(at, item["call_id"], function)]})]
        if kind == "response.function_call_arguments.delta" and told["item_id"] in self._calls:
            function = {"arguments": told["delta"]}
            return [self._chunk({"tool_calls": [{"index": self._calls[told["item_id"]], "function": function}]})]
        if kind in ("response.completed", "response.incomplete"):
            return [self._chunk({}, finish_reason(told["response"]))]
        return []

    def _chunk(self, delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": self._index, "delta": dict(delta), "logprobs": None, "finish_reason": reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}


def _call(at: int, call_id: str, function: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": at, "id": call_id, "type": "function", "function": dict(function)}


def completion(head: Mapping[str, Any], responses: Sequence[Mapping[str, Any]], logprobs: bool) -> dict[str, Any]:
    """The whole of it, one choice for each response."""
    counted = [usage(response) for response in responses]
    prompt, cached = counted[0]["prompt_tokens"], counted[0]["prompt_tokens_details"]["cached_tokens"]
    output = sum(one["completion_tokens"] for one in counted)
    return {
        **head,
        "object": "chat.completion",
        "choices": [_choice(index, response, logprobs) for index, response in enumerate(responses)],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


def _choice(index: int, response: Mapping[str, Any], logprobs: bool) -> dict[str, Any]:
    texts = [item["content"][0] for item in response["output"] if item["type"] == "message" and item["content"]]
    calls = [item for item in response["output"] if item["type"] == "function_call" and item["status"] == "completed"]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(part["text"] for part in texts) if texts or not calls else None,
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = [
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            for item in calls
        ]
    told = [one for part in texts for one in part["logprobs"]]
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": told, "refusal": None} if logprobs else None,
        "finish_reason": finish_reason(response),
    }
