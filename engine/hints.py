"""KV hints as other engines and routers speak them, to and from our intents.

The shape that vLLM, SGLang and Dynamo share (vLLM RFC 53421, SGLang RFC 36224): an envelope of actions, each with a
type and a version of its own, over a session or a range of its tokens, bounded by a time to live.

    {"protocol_version": "0.1", "message_id": "m1", "actions": [
        {"action_id": "a1", "action_type": "kv.retain", "action_version": "1.0",
         "payload": {"session_id": "s", "directives": [{"start": 0, "end": 2048, "priority": 80, "duration": 60}]}}]}

kv.retain is our pin (priority 0: release), kv.demote our offload, kv.prefetch our prefetch; kv.evict and kv.deref are
our drop. Hints are advice: what we do not know is answered as rejected, by action, and stops none of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError
from engine.fields import Fields
from engine.kvcall import KvCall
from kvtier import Tier

PROTOCOL_MAJORS = ("0", "1")
ACTION_MAJORS = ("0", "1")
MOST_ACTIONS = 64
MOST_DIRECTIVES = 64
DEFAULT_TTL_S = 600.0
LONGEST_TTL_S = 86_400.0
FULL_PRIORITY = 100
_EVER = 1 << 31
_ACTIONS = {
    "kv.retain": "pin",
    "kv.demote": "offload",
    "kv.prefetch": "prefetch",
    "kv.evict": "drop",
    "kv.deref": "drop",
}
_TYPES = {
    "pin": "kv.retain",
    "release": "kv.retain",
    "offload": "kv.demote",
    "prefetch": "kv.prefetch",
    "drop": "kv.evict",
}


@dataclass(frozen=True)
class Hint:
    """One action: an intent of ours, or why it is none. `note`: what of it was not taken as it was said."""

    action_id: str
    call: KvCall | None
    refusal: str = ""
    note: str = ""


@dataclass(frozen=True)
class Envelope:
    message_id: str
    hints: tuple[Hint, ...]


def parse_envelope(message: Mapping[str, Any]) -> Envelope:
    """The hints of a `kv_hints` message. Raises RequestError (bad_request) where the envelope itself is none."""
    salt = Fields(message).salt("salt")
    outer = Fields(Fields(message).mapping("envelope"), "envelope.")
    version = outer.text("protocol_version")
    if version.partition(".")[0] not in PROTOCOL_MAJORS:
        raise RequestError("bad_request", f"envelope.protocol_version is {version!r}; 0.x and 1.x are understood")
    message_id = outer.text("message_id")
    actions = Fields(message).mapping("envelope").get("actions")
    if not isinstance(actions, list) or len(actions) > MOST_ACTIONS:
        raise RequestError("bad_request", f"envelope.actions is not a list of at most {MOST_ACTIONS} actions")
    hints = [hint for index, action in enumerate(actions) for hint in _hints(index, action, salt)]
    return Envelope(message_id, tuple(hints))


def _hints(index: int, action: Any, salt: bytes) -> list[Hint]:
    """An action's hints: one, or one for each of its directives."""
    name = str(index)
    try:
        if not isinstance(action, Mapping):
            raise RequestError("bad_request", "an action is an object")
        fields = Fields(action)
        name = fields.text("action_id")
        kind, version = fields.text("action_type"), fields.text("action_version")
        if kind not in _ACTIONS:
            return [Hint(name, None, f"action_type {kind!r} is not known here; {', '.join(_ACTIONS)} are")]
        if version.partition(".")[0] not in ACTION_MAJORS:
            return [Hint(name, None, f"action_version {version!r} of {kind} is not known here; 0.x and 1.x are")]
        return _of_payload(name, _ACTIONS[kind], fields.mapping("payload"), salt)
    except RequestError as error:
        return [Hint(name, None, str(error))]


def _of_payload(name: str, intent: str, payload: Mapping[str, Any], salt: bytes) -> list[Hint]:
    fields = Fields(payload, "payload.")
    session = fields.text("session_id" if payload.get("session_id") is not None else "scope")
    epoch = fields.integer("session_generation", 0, 0, 1 << 62)
    tier: Tier | None = Tier.HOST
    if intent == "offload":
        where = fields.text("destination", "auto")
        if where not in (*Tier, "auto"):
            raise RequestError("bad_request", f"payload.destination is {where!r}; auto, {', '.join(Tier)} are possible")
        tier = None if where == "auto" else Tier(where)
    spans = _directives(payload) if intent == "pin" else [fields]
    hints = []
    for span in spans:
        start, end = span.integer("start", 0, 0, _EVER), span.integer("end", _EVER, 0, _EVER)
        if end <= start:
            raise RequestError("bad_request", f"the range {start} to {end} has no token")
        ttl_s, note, kind = None, "", intent
        if intent == "pin":
            kind = "release" if span.integer("priority", FULL_PRIORITY, 0, FULL_PRIORITY) == 0 else "pin"
            ttl_s, note = _ttl(span, fields)
        tokens = None if (start, end) == (0, _EVER) else (start, end)
        call = KvCall(kind, session, epoch, salt, (), tier, True, kind == "offload", None, ttl_s, 0, tokens)
        hints.append(Hint(name, call, note=note))
    return hints


def _directives(payload: Mapping[str, Any]) -> list[Fields]:
    listed = payload.get("directives", [payload])
    if not isinstance(listed, list) or not 1 <= len(listed) <= MOST_DIRECTIVES:
        raise RequestError("bad_request", f"payload.directives is not a list of 1 to {MOST_DIRECTIVES} objects")
    if not all(isinstance(one, Mapping) for one in listed):
        raise RequestError("bad_request", "payload.directives has something that is no object")
    return [Fields(one, "payload.directives.") for one in listed]


def _ttl(span: Fields, payload: Fields) -> tuple[float, str]:
    for fields, name in ((span, "duration"), (span, "ttl_seconds"), (payload, "duration"), (payload, "ttl_seconds")):
        given = fields.seconds(name, None, float("inf"))
        if given is not None:
            return (given, "") if given <= LONGEST_TTL_S else (LONGEST_TTL_S, f"held for {LONGEST_TTL_S:.0f} s at most")
    return DEFAULT_TTL_S, f"no time to live was given: held for {DEFAULT_TTL_S:.0f} s"


def emit(
    intent: str,
    session: str,
    *,
    message_id: str,
    epoch: int = 0,
    tokens: tuple[int, int] | None = None,
    tier: Tier | None = None,
    ttl_s: float = DEFAULT_TTL_S,
) -> dict[str, Any]:
    """One of our intents as an envelope for another engine. tokens: a range [start, end), None for all."""
    payload: dict[str, Any] = {"session_id": session, "session_generation": epoch}
    span = {} if tokens is None else {"start": tokens[0], "end": tokens[1]}
    if intent in ("pin", "release"):
        priority = FULL_PRIORITY if intent == "pin" else 0
        start: dict[str, int | None] = {**span} if span else {"start": 0, "end": None}
        payload |= {"scope": session, "directives": [{**start, "priority": priority, "duration": ttl_s}]}
    else:
        payload |= span
    if intent == "offload":
        payload["destination"] = tier.value if tier is not None else "auto"
    action = {
        "action_id": f"{message_id}/0",
        "action_type": _TYPES[intent],
        "action_version": "1.0",
        "payload": payload,
    }
    return {"protocol_version": "0.1", "message_id": message_id, "actions": [action]}
