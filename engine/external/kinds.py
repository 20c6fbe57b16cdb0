"""Kinds of model servers: what each takes beyond the common API, by its own documentation.

vLLM       docs.vllm.ai, OpenAI-compatible server, extra parameters of the chat API
SGLang     docs.sglang.io, OpenAI APIs, completions, extra parameters
llama.cpp  tools/server/README.md: /completion's parameters, --prefill-assistant
OpenAI     platform.openai.com, chat completions: prompt_cache_key, max_completion_tokens
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from engine.errors import RequestError
from engine.external.transcript import Conversation
from engine.request import GenerateSpec
from engine.tokens.bytewise import plain

_NEVER: Final = ("logit_bias", "logprobs", "speculation", "regex")  # they speak of tokens, or need our sampler


@dataclass(frozen=True)
class Kind:
    """`options`: our name of a sampling option that not every server has -> the server's name.
    `going_on`: what makes it go on after a message that was begun; None: it cannot. `hints`: names under which it takes
    a mark of the session (`session`) or of its tenant (`tenant`), so that it finds a prefix again, or keeps it apart.
    """

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    going_on: Mapping[str, Any] | None = None
    hints: Mapping[str, str] = field(default_factory=dict)
    length: str = "max_tokens"
    always: Mapping[str, Any] = field(default_factory=dict)

    @property
    def refuses(self) -> tuple[str, ...]:
        return (*_NEVER, *(name for name in ("top_k", "min_p", "repetition_penalty") if name not in self.options))


_SAME: Final = {name: name for name in ("top_k", "min_p", "repetition_penalty")}
KINDS: Final[Mapping[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind(
            "vllm",
            _SAME,
            going_on={"continue_final_message": True, "add_generation_prompt": False},
            hints={"cache_salt": "tenant"},
        ),
        Kind("sglang", _SAME, going_on={"continue_final_message": True}),
        Kind(
            "llamacpp",
            {"top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repeat_penalty"},
            going_on={},
            always={"cache_prompt": True},
        ),
        Kind("openai", hints={"prompt_cache_key": "session"}, length="max_completion_tokens"),
        Kind("tenuto"),
        Kind("plain"),
    )
}
_USUAL: Final = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def body_of(
    kind: Kind, model: str, conversation: Conversation, spec: GenerateSpec, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """The request. `asked`: as `engine.tokens.bytewise.ByteChat` has it. Raises RequestError for what this kind of
    server cannot be asked."""
    body: dict[str, Any] = {
        "model": model,
        "messages": conversation.messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        kind.length: spec.max_tokens,
        **kind.always,
        **_sampling(kind, spec),
        **_hints(kind, spec),
    }
    if conversation.tools:
        body |= {"tools": conversation.tools, **asked}
    elif "response_format" in asked:
        body["response_format"] = asked["response_format"]
    if spec.stop:
        body["stop"] = list(spec.stop)
    if conversation.begun:
        if kind.going_on is None or not plain(conversation.begun):
            raise RequestError("bad_request", "the server cannot go on with this message; let it begin anew")
        begun = {"role": "assistant", "content": conversation.begun}
        body |= {"messages": [*conversation.messages, begun], **kind.going_on}
    return body


def _sampling(kind: Kind, spec: GenerateSpec) -> dict[str, Any]:
    sampling = spec.sampling
    if sampling.logit_bias or spec.logprobs is not None:
        raise RequestError("bad_request", "logit_bias and logprobs speak of tokens, which are the server's own here")
    told: dict[str, Any] = {"temperature": sampling.temperature, "seed": sampling.seed % (1 << 31)}
    if sampling.top_p != 1.0:
        told["top_p"] = sampling.top_p
    for name, usual in _USUAL.items():
        value = getattr(sampling, name)
        if value == usual:
            continue
        if name.endswith("_penalty") and name != "repetition_penalty":
            told[name] = value
        elif name in kind.options:
            told[kind.options[name]] = value
        else:
            raise RequestError("bad_request", f"sampling.{name} is not known to a server of the kind {kind.name!r}")
    return told


def _hints(kind: Kind, spec: GenerateSpec) -> dict[str, str]:
    marks = {"session": spec.session.encode(), "tenant": b"tenant\0" + spec.salt}
    return {name: hashlib.sha256(marks[of]).hexdigest()[:32] for name, of in kind.hints.items()}
