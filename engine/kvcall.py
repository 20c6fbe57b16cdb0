"""A KV intent as it comes over the wire, checked. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError
from engine.facts import PAGE_SIZE
from engine.fields import MAX_ID_CHARS, Fields
from kvtier import Tier
from kvtier.policy import State

_INTENTS = ("pin", "offload", "prefetch", "release", "drop")
_AUTO = "auto"
_PAUSES = (State.TOOL, State.APPROVAL, State.PAUSED)
_SOURCES = ("", "api")
_LONGEST_S = 10 * 365 * 86_400.0


@dataclass(frozen=True)
class PauseHint:
    """Why a session waits: what the policy goes by. `timeout_s` bounds the pause, if anything does."""

    state: State = State.PAUSED
    tool: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True)
class KvCall:
    """A checked `kv` message. `token_ids` empty means: what the engine knows of the session.

    tier: None for an offload means that the policy decides. ttl_s: a pin ends by itself. step: the step of the session
    that asks, for the log. tokens: a range [start, end) of the session's, None for all. source: who asks, where that is
    not the session itself.
    """

    intent: str
    session: str
    epoch: int
    salt: bytes
    token_ids: tuple[int, ...]
    tier: Tier | None
    wait: bool
    evict: bool
    pause: PauseHint | None = None
    ttl_s: float | None = None
    step: int = 0
    tokens: tuple[int, int] | None = None
    source: str = ""

    def keys_of(self, keys: Sequence[bytes]) -> list[bytes]:
        """Of a chain of pages, those that have a token of the range."""
        if self.tokens is None:
            return list(keys)
        return list(keys[self.tokens[0] // PAGE_SIZE : -(-self.tokens[1] // PAGE_SIZE)])


def parse_kv(message: Mapping[str, Any]) -> KvCall:
    """A KvCall, or RequestError (bad_request) that names the field."""
    fields = Fields(message)
    intent = fields.text("intent")
    if intent not in _INTENTS:
        raise RequestError("bad_request", f"intent is {intent!r}; {', '.join(_INTENTS)} are possible")
    tier = fields.text("tier", Tier.HOST.value)
    if tier not in (*Tier, _AUTO):
        raise RequestError("bad_request", f"tier is {tier!r}; {', '.join((*Tier, _AUTO))} are possible")
    source = fields.optional_text("source", MAX_ID_CHARS) or ""
    if source not in _SOURCES:
        raise RequestError("bad_request", f"source is {source!r}; only 'api' is possible")
    tokens = fields.integers("token_ids") if message.get("token_ids") is not None else []
    if any(token < 0 or token >= 1 << 32 for token in tokens):
        raise RequestError("token_out_of_range", "a token id is outside any vocabulary")
    return KvCall(
        intent,
        fields.text("session"),
        fields.integer("epoch", 0, 0, 1 << 62),
        fields.salt("salt"),
        tuple(tokens),
        None if tier == _AUTO else Tier(tier),
        fields.flag("wait", False),
        fields.flag("evict", False),
        _pause(message.get("pause")),
        fields.seconds("ttl_s", None, _LONGEST_S),
        fields.integer("step", 0, 0, (1 << 31) - 1),
        source=source,
    )


def _pause(message: Any) -> PauseHint | None:
    if message is None:
        return None
    if not isinstance(message, Mapping):
        raise RequestError("bad_request", "pause is not an object; send state, tool and timeout_s")
    fields = Fields(message, "pause.")
    state = fields.text("state", State.TOOL.value)
    if state not in (*_PAUSES,):
        raise RequestError("bad_request", f"pause.state is {state!r}; {', '.join(_PAUSES)} are possible")
    return PauseHint(
        State(state), fields.optional_text("tool", MAX_ID_CHARS) or "", fields.seconds("timeout_s", None, _LONGEST_S)
    )
