"""How a session's model answers: what its tokens are drawn by, and what form its answers have."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from engine.tokens import MAX_PATTERN_CHARS, Form
from runtime.tools.kinds import Frozen

MAX_BIASES, MAX_STOPS, MAX_STOP_CHARS, MAX_LOGPROBS = 300, 8, 100, 20

Token = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,6})$")]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class Sampling(Frozen):
    """How tokens are drawn, in this order: penalties, bias, temperature, top_k, top_p, min_p. temperature 0 is greedy.

    `logit_bias`: by token id, what is added to its logit; -100 keeps a token out. `stop`: texts that end an answer, and
    are not shown. `logprobs`: with each token how likely the model had it, and that many alternatives. `speculation`:
    auto changes no token; ratio keeps the distribution, but the same seed gives other tokens the next time.
    """

    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=1_000_000)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, ge=0.1, le=10.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    logit_bias: dict[Token, Bias] = Field(default_factory=dict, max_length=MAX_BIASES)
    stop: list[Stop] = Field(default_factory=list, max_length=MAX_STOPS)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    speculation: Literal["auto", "off", "ratio"] = "auto"


class ResponseFormat(Frozen):
    """The form of every answer: `json_object`, `json_schema` with a `json_schema`, or `regex` with a `pattern`. An
    answer that was cut off is `incomplete`; every other one has this form. Calls of tools are as their schemas say."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"type": "json_object"},
                {"type": "json_schema", "json_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}},
                {"type": "regex", "pattern": "yes|no"},
            ]
        },
    )

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: dict[str, Any] | None = None
    pattern: str | None = Field(default=None, min_length=1, max_length=MAX_PATTERN_CHARS)

    @model_validator(mode="after")
    def _says_what_it_needs(self) -> Self:
        needed = {"json_schema": "json_schema", "regex": "pattern"}.get(self.type)
        for name in ("json_schema", "pattern"):
            given = getattr(self, name) is not None
            if given != (name == needed):
                raise ValueError(f"a format of type {self.type} {'has no' if given else 'needs a'} {name}")
        return self

    @property
    def form(self) -> Form | None:
        """As grammars take it; None: any text."""
        if self.type == "text":
            return None
        if self.pattern is not None:
            return Form.regex(self.pattern)
        return Form.json({"type": "object"} if self.json_schema is None else self.json_schema)
