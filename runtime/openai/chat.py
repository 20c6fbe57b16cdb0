"""The body of `/v1/chat/completions`, and what it says in the other face's words."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from runtime.errors import InvalidRequest
from runtime.openai.items import Items, one_item
from runtime.openai.requests import Choice, Drawing, Metadata

Stop = Annotated[str, Field(min_length=1, max_length=100)]
_GONE = ("functions", "function_call")


class ChatIn(Drawing):
    """The body of POST /v1/chat/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"messages": [{"role": "user", "content": "Say hello."}], "max_completion_tokens": 16, "temperature": 0}
            ]
        }
    )

    model: str | None = Field(default=None, max_length=200)
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=5000)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=64)
    tool_choice: Choice = None
    response_format: dict[str, Any] | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=32768)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=32768)
    n: int | None = Field(default=None, ge=1, le=8)
    stop: Stop | Annotated[list[Stop], Field(max_length=8)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    user: str | None = Field(default=None, max_length=512)
    service_tier: str | None = Field(default=None, max_length=64)
    reasoning_effort: str | None = Field(default=None, max_length=64)
    safety_identifier: str | None = Field(default=None, max_length=512)
    prompt_cache_key: str | None = Field(default=None, max_length=512)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _says_what_took_their_place(cls, value: Any) -> Any:
        if isinstance(value, dict) and (gone := next((name for name in _GONE if name in value), None)):
            raise ValueError(f"{gone}: is of an older interface; use tools and tool_choice")
        return value

    @model_validator(mode="after")
    def _go_together(self) -> ChatIn:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs to be true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def with_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    def items(self) -> Items:
        """Its messages. Raises InvalidRequest."""
        found: Items = []
        for index, message in enumerate(self.messages):
            found += _items(message, f"messages[{index}]")
        return found


def _items(message: dict[str, Any], at: str) -> Items:
    role = message.get("role")
    if role == "tool":
        given = {"type": "function_call_output", "call_id": message.get("tool_call_id")}
        return one_item({**given, "output": message.get("content")}, at)
    if role == "function":
        raise InvalidRequest(f"{at}.role: function is of an older interface; use tool", param=f"{at}.role")
    made: Items = []
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise InvalidRequest(f"{at}.tool_calls: give a list", param=f"{at}.tool_calls")
    if message.get("content") or not calls:
        made += one_item({"type": "message", "role": role, "content": message.get("content")}, at)
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidRequest(f"{at}.tool_calls: give functions", param=f"{at}.tool_calls")
        about = {"name": function.get("name"), "arguments": function.get("arguments") or json.dumps({})}
        made += one_item({"type": "function_call", "call_id": call.get("id"), **about}, at)
    return made
