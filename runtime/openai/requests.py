"""Bodies of `/v1/responses` and `/v1/conversations`. What is not served is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from runtime.config import Body
from runtime.errors import InvalidRequest
from runtime.openai.tools import OURS, called_name

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
Input = str | list[dict[str, Any]] | None
Choice = str | dict[str, Any] | None
AGENT_MODEL = "agent:"  # before the name of one of ours, in place of a model's


class Drawing(Body):
    """What both faces say of how tokens are drawn."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    parallel_tool_calls: bool | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)

    def turn(
        self, logprobs: int | None, form: dict[str, Any] | None, most_tokens: int | None, **sampling: Any
    ) -> dict[str, Any]:
        """As `TurnOptions` has it, without what is not said."""
        said = {
            "response_format": form,
            "max_think_tokens": most_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "seed": None if self.seed is None else self.seed % 2**63,
        }
        given = {name: value for name, value in said.items() if value is not None}
        return {"sampling": self._drawn(logprobs, **sampling), **given}

    def _drawn(self, logprobs: int | None, **more: Any) -> dict[str, Any]:
        """As a session's `sampling`; without a word, as OpenAI's models do: temperature 1."""
        made: dict[str, Any] = {"temperature": 1.0 if self.temperature is None else self.temperature, **more}
        for name in ("top_p", "presence_penalty", "frequency_penalty"):
            if (value := getattr(self, name)) is not None:
                made[name] = value
        if logprobs is not None:
            made["logprobs"] = logprobs
        return made


class ResponseIn(Drawing):
    """The body of POST /v1/responses."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"input": "Say hello.", "max_output_tokens": 16, "temperature": 0}]}
    )

    model: str | None = Field(default=None, max_length=200)
    input: Input = Field(default=None)
    instructions: str | None = Field(default=None, max_length=200_000)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=64)
    tool_choice: Choice = None
    text: dict[str, Any] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=32768)
    max_tool_calls: int | None = Field(default=None, ge=0, le=1000)
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    previous_response_id: str | None = Field(default=None, max_length=200)
    conversation: str | dict[str, Any] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = Field(default=None, max_length=32)
    service_tier: str | None = Field(default=None, max_length=64)
    safety_identifier: str | None = Field(default=None, max_length=512)
    user: str | None = Field(default=None, max_length=512)
    prompt_cache_key: str | None = Field(default=None, max_length=512)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    @model_validator(mode="after")
    def _go_together(self) -> ResponseIn:
        if self.previous_response_id is not None and self.conversation is not None:
            raise ValueError("previous_response_id: goes on from a response or in a conversation, not both")
        if self.background and self.store is False:
            raise ValueError("background: a response that nobody waits for must be stored")
        return self

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation
        if isinstance(given, dict):
            given = given.get("id")
            if not isinstance(given, str):
                raise InvalidRequest("conversation.id: name the conversation", param="conversation.id")
        return given

    @property
    def form(self) -> dict[str, Any] | None:
        """As a session's `response_format`."""
        given = self.text or {}
        if unknown := next((name for name in given if name not in ("format", "verbosity")), None):
            raise InvalidRequest(f"text.{unknown}: there is no such field", param=f"text.{unknown}")
        return form_of(given.get("format"), "text.format")


def form_of(given: Any, at: str) -> dict[str, Any] | None:
    """A format of an answer as a session takes it. Raises InvalidRequest."""
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind != "json_schema":
        raise InvalidRequest(f"{at}.type: {kind!r} is none of text, json_object, json_schema", param=f"{at}.type")
    about = given.get("json_schema", given)
    schema = about.get("schema") if isinstance(about, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{at}.schema: give a JSON schema", param=f"{at}.schema")
    return {"type": "json_schema", "json_schema": schema}


def choice_of(given: Choice) -> str:
    """As a session's `tool_choice`. Raises InvalidRequest."""
    if given is None or isinstance(given, str):
        if given not in (None, "auto", "none", "required"):
            raise InvalidRequest(f"tool_choice: {given!r} is none of auto, none, required", param="tool_choice")
        return given or "auto"
    about = given.get("function", given)
    name = about.get("name") if isinstance(about, dict) else None
    if given.get("type") not in ("function", "mcp") or not isinstance(name, str) or not 1 <= len(name) <= 200:
        raise InvalidRequest("tool_choice: name a function, or use auto, none or required", param="tool_choice")
    return called_name(str(given.get("server_label") or OURS), name) if given["type"] == "mcp" else name


class ConversationIn(Body):
    """The body of POST /v1/conversations."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"metadata": {"topic": "tides"}}]})

    items: list[dict[str, Any]] | None = Field(default=None, max_length=20)
    metadata: Metadata | None = None


class MetadataIn(Body):
    """The body of POST /v1/conversations/{id}."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"metadata": {"topic": "ferries"}}]})

    metadata: Metadata


class ItemsIn(Body):
    """The body of POST /v1/conversations/{id}/items."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"items": [{"type": "message", "role": "user", "content": "Hello."}]}]}
    )

    items: list[dict[str, Any]] = Field(min_length=1, max_length=20)
