"""A KV intent as it comes over the wire, checked. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError
from engine.request import Fields
from kvtier import Tier

_INTENTS = ("pin", "offload", "prefetch", "release", "drop")


@dataclass(frozen=True)
class KvCall:
    """A checked `kv` message. `token_ids` empty means: what the engine knows of the session."""

    intent: str
    session: str
    epoch: int
    salt: bytes
    token_ids: tuple[int, ...]
    tier: Tier
    wait: bool
    evict: bool


def parse_kv(message: Mapping[str, Any]) -> KvCall:
    """A KvCall, or RequestError (bad_request) that names the field."""
    fields = Fields(message)
    intent = fields.text("intent")
    if intent not in _INTENTS:
        raise RequestError("bad_request", f"intent is {intent!r}; {', '.join(_INTENTS)} are possible")
    tier = fields.text("tier", Tier.HOST.value)
    if tier not in (*Tier,):
        raise RequestError("bad_request", f"tier is {tier!r}; {', '.join(Tier)} are possible")
    tokens = fields.integers("token_ids") if message.get("token_ids") is not None else []
    if any(token < 0 or token >= 1 << 32 for token in tokens):
        raise RequestError("token_out_of_range", "a token id is outside any vocabulary")
    return KvCall(
        intent,
        fields.text("session"),
        fields.integer("epoch", 0, 0, 1 << 62),
        fields.salt("salt"),
        tuple(tokens),
        Tier(tier),
        fields.flag("wait", False),
        fields.flag("evict", False),
    )
