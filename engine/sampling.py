"""How a generation draws its tokens. No torch, no numpy: clients speak in these values.

They are applied in this order: repetition, then presence and frequency penalty, bias, grammar, temperature, top_k,
top_p, min_p, and the draw with the noise of (seed, position). All of it is a function of the logits and of the tokens
so far, so a resumed generation equals an uninterrupted one.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

from engine.errors import RequestError
from engine.fields import Fields

MAX_BIASES = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20


class Speculation(enum.StrEnum):
    """Whether drafts are verified. `auto`: where it pays, by shared noise, which changes no token. `ratio`: by the
    ratio rule: the same distribution, but other tokens than without drafts, and not the same ones twice."""

    AUTO = "auto"
    OFF = "off"
    RATIO = "ratio"


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep every token.

    min_p: tokens less likely than this share of the likeliest one are left out
    repetition_penalty: of tokens in the transcript, a positive logit is divided by it and another multiplied with it
    presence_penalty, frequency_penalty: taken once, and for each time, from the logit of a token that was generated
    logit_bias: pairs of a token and what is added to its logit
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    _: KW_ONLY
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def penalises(self) -> bool:
        """Whether a draw depends on the tokens before it other than through the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed at all before they are drawn from."""
        return self.penalises or bool(self.logit_bias)

    def as_message(self) -> dict[str, Any]:
        """What `parse_sampling` reads."""
        told = {name: getattr(self, name) for name in _NAMES}
        return {**told, "logit_bias": {str(token): bias for token, bias in self.logit_bias}}


@dataclass(frozen=True)
class Logprob:
    """Natural logarithms; `top`: the likeliest tokens, best first, lower ids first among equals."""

    logprob: float
    top: tuple[tuple[int, float], ...]

    def as_message(self) -> list[Any]:
        return [self.logprob, [[token, value] for token, value in self.top]]

    @classmethod
    def from_message(cls, message: list[Any]) -> Logprob:
        return cls(message[0], tuple((token, value) for token, value in message[1]))


GREEDY = Sampling()
_NAMES = tuple(option.name for option in fields(Sampling))


def parse_sampling(message: Mapping[str, Any]) -> Sampling:
    """Raises RequestError (bad_request) that names the field, one that there is none of too."""
    if unknown := sorted(set(message) - set(_NAMES)):
        raise RequestError("bad_request", f"sampling.{unknown[0][:80]} is no option; there are {', '.join(_NAMES)}")
    read = Fields(message, "sampling.")
    return Sampling(
        repetition_penalty=read.real("repetition_penalty", 1.0, 0.01, 100.0),
        presence_penalty=read.real("presence_penalty", 0.0, -100.0, 100.0),
        frequency_penalty=read.real("frequency_penalty", 0.0, -100.0, 100.0),
        logit_bias=_biases(read.mapping("logit_bias")),
        temperature=read.real("temperature", 0.0, 0.0, 100.0),
        top_k=read.integer("top_k", 0, 0, 1 << 30),
        top_p=read.real("top_p", 1.0, 0.0, 1.0),
        min_p=read.real("min_p", 0.0, 0.0, 1.0),
        seed=read.integer("seed", 0, 0, (1 << 64) - 1),
    )


def _biases(given: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """In the order of tokens. Whether they are in the vocabulary is seen when the request is admitted."""
    if len(given) > MAX_BIASES:
        raise RequestError("bad_request", f"sampling.logit_bias has {len(given)} tokens; {MAX_BIASES} are allowed")
    biases = dict[int, float]()
    for name, value in given.items():
        if not (name.isascii() and name.isdecimal() and len(name) <= 9):
            raise RequestError("bad_request", f"sampling.logit_bias has {name[:80]!r} for a token; an id is needed")
        biases[int(name)] = Fields({name: value}, "sampling.logit_bias.").real(name, 0.0, -100.0, 100.0)
    return tuple(sorted(biases.items()))
