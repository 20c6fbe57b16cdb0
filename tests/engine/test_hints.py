"""Hints in the envelope that routers and engines share: what is understood, what is refused, what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import RequestError
from engine.hinted import Hinted
from engine.hints import DEFAULT_TTL_S, LONGEST_TTL_S, MOST_ACTIONS, emit, parse_envelope
from kvtier import Tier
from tests.engine.fakes import Harness
from tests.engine.test_core import PROMPT, turn


def action(kind: str, payload: Any, name: str = "a1", version: str = "1.0") -> dict[str, Any]:
    return {"action_id": name, "action_type": kind, "action_version": version, "payload": payload}


def message(*actions: Any, **fields: Any) -> dict[str, Any]:
    envelope = {"protocol_version": "0.1", "message_id": "m1", "actions": list(actions), **fields}
    return {"type": "kv_hints", "envelope": envelope}


def only(*actions: Any) -> Any:
    (hint,) = parse_envelope(message(*actions)).hints
    return hint


def test_retain_is_a_pin_over_a_range_that_ends_by_itself() -> None:
    directive = {"start": 0, "end": 2048, "priority": 80, "duration": 60}
    call = only(action("kv.retain", {"session_id": "s", "session_generation": 3, "directives": [directive]})).call
    assert (call.intent, call.session, call.epoch, call.tokens, call.ttl_s) == ("pin", "s", 3, (0, 2048), 60.0)


def test_directives_are_pins_of_their_own() -> None:
    spans = [{"start": 0, "end": 32, "priority": 80}, {"start": 32, "end": None, "priority": 0}]
    hints = parse_envelope(message(action("kv.retain", {"scope": "s", "directives": spans}))).hints
    assert [hint.call.intent for hint in hints if hint.call] == ["pin", "release"]
    assert [hint.call.tokens for hint in hints if hint.call] == [(0, 32), (32, 1 << 31)]


def test_a_retain_without_an_end_is_given_one() -> None:
    hint = only(action("kv.retain", {"session_id": "s", "priority": 50}))
    assert hint.call.ttl_s == DEFAULT_TTL_S
    assert "no time to live" in hint.note


def test_a_retain_for_ever_is_clipped() -> None:
    hint = only(action("kv.retain", {"session_id": "s", "ttl_seconds": 1e9}))
    assert hint.call.ttl_s == LONGEST_TTL_S
    assert "at most" in hint.note


@pytest.mark.parametrize(
    ("kind", "payload", "intent", "tier"),
    [
        ("kv.demote", {"session_id": "s", "destination": "nvme"}, "offload", Tier.NVME),
        ("kv.demote", {"session_id": "s"}, "offload", None),
        ("kv.prefetch", {"session_id": "s"}, "prefetch", Tier.HOST),
        ("kv.evict", {"session_id": "s"}, "drop", Tier.HOST),
        ("kv.deref", {"session_id": "s"}, "drop", Tier.HOST),
    ],
)
def test_other_actions_are_our_other_intents(kind: str, payload: Any, intent: str, tier: Tier | None) -> None:
    call = only(action(kind, payload)).call
    assert (call.intent, call.tier) == (intent, tier)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("not an object", "an action is an object"),
        (action("kv.teleport", {"session_id": "s"}), "kv.teleport"),
        (action("kv.retain", {"session_id": "s"}, version="7.1"), "7.1"),
        (action("kv.retain", {}), "payload.scope"),
        (action("kv.retain", {"session_id": "s", "directives": {}}), "payload.directives"),
        (action("kv.retain", {"session_id": "s", "directives": [1]}), "no object"),
        (action("kv.retain", {"session_id": "s", "priority": 101}), "priority is 101"),
        (action("kv.retain", {"session_id": "s", "priority": True}), "priority is True"),
        (action("kv.retain", {"session_id": "s", "start": 16, "end": 16}), "no token"),
        (action("kv.retain", {"session_id": "s", "duration": -1}), "duration"),
        (action("kv.retain", {"session_id": "s", "duration": float("nan")}), "duration"),
        (action("kv.demote", {"session_id": "s", "destination": "moon"}), "moon"),
        (action("kv.demote", "s"), "payload"),
    ],
)
def test_an_action_that_is_none_is_refused_by_name_and_stops_no_other(bad: Any, why: str) -> None:
    good = action("kv.prefetch", {"session_id": "s"}, "a2")
    refused, taken = parse_envelope(message(bad, good)).hints
    assert refused.call is None
    assert why in refused.refusal
    assert (taken.action_id, taken.call is not None) == ("a2", True)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"protocol_version": "9.0"}, "protocol_version"),
        ({"protocol_version": None}, "protocol_version"),
        ({"message_id": ""}, "message_id"),
        ({"actions": "all"}, "actions"),
        ({"actions": [{}] * (MOST_ACTIONS + 1)}, "actions"),
    ],
)
def test_an_envelope_that_is_none_is_refused_whole(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        parse_envelope(message(**fields))


@pytest.mark.parametrize("intent", ["pin", "release", "offload", "prefetch", "drop"])
@pytest.mark.parametrize("tokens", [None, (16, 64)])
def test_what_we_emit_we_understand(intent: str, tokens: tuple[int, int] | None) -> None:
    envelope = emit(intent, "s", message_id="m", epoch=4, tokens=tokens, tier=Tier.NVME, ttl_s=30.0)
    (hint,) = parse_envelope({"envelope": envelope}).hints
    assert hint.call is not None
    assert (hint.call.intent, hint.call.session, hint.call.epoch, hint.call.tokens) == (intent, "s", 4, tokens)
    assert hint.call.ttl_s == (30.0 if intent in ("pin", "release") else None)
    assert hint.call.tier is (Tier.NVME if intent == "offload" else Tier.HOST)
    assert hint.note == ""


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with Harness(tmp_path) as engine:
        yield engine


def send(harness: Harness, hinted: Hinted, *actions: Any, **fields: Any) -> list[dict[str, Any]]:
    envelope = parse_envelope(message(*actions, **fields))
    receipts: list[dict[str, Any]] = harness._ask(lambda reply: hinted.act(envelope, reply))["receipts"]
    return receipts


def test_hints_are_acted_upon_and_answered_one_by_one(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20)
    receipts = send(
        harness,
        Hinted(harness.intents),
        action("kv.retain", {"session_id": "s", "start": 0, "end": 32, "priority": 90, "duration": 60}, "keep"),
        action("kv.share", {"session_id": "s"}, "share"),
        action("kv.retain", {"session_id": "nobody"}, "whose"),
    )
    assert [(one["action_id"], one["status"]) for one in receipts] == [
        ("keep", "accepted"),
        ("share", "rejected"),
        ("whose", "missing"),
    ]
    assert harness.stats()["pinned_pages"] == 2


def test_a_clipped_hint_says_what_it_got(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20)
    (receipt,) = send(harness, Hinted(harness.intents), action("kv.retain", {"session_id": "s"}))
    assert receipt["status"] == "clipped"
    assert "600 s" in receipt["detail"]


def test_a_hint_that_comes_twice_acts_once(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20)
    hinted = Hinted(harness.intents)
    demote = action("kv.demote", {"session_id": "s", "destination": "host"})
    first = send(harness, hinted, demote)
    harness.kv("prefetch", "s")
    assert send(harness, hinted, demote) == first
    assert harness.state("s")["device_pages"] > 0
    (again,) = send(harness, hinted, demote, message_id="m2")
    assert harness.state("s")["device_pages"] == 0, again


def test_an_old_owner_is_refused_and_others_are_heard(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20, epoch=5)
    stale = action("kv.demote", {"session_id": "s", "session_generation": 4}, "old")
    fresh = action("kv.prefetch", {"session_id": "s", "session_generation": 5}, "new")
    old, new = send(harness, Hinted(harness.intents), stale, fresh)
    assert (old["status"], "epoch 5" in old["detail"]) == ("rejected", True)
    assert new["status"] == "accepted"


def test_no_actions_have_no_receipts(harness: Harness) -> None:
    assert send(harness, Hinted(harness.intents)) == []


def test_two_senders_may_use_one_message_id(harness: Harness) -> None:
    hinted = Hinted(harness.intents)
    for name, token in (("a", 5), ("b", 6)):
        turn(harness, name, [token] * 40, 4)
        (receipt,) = send(harness, hinted, action("kv.retain", {"session_id": name, "duration": 60}))
        assert receipt["status"] == "accepted"
        assert harness.state(name)["pinned"]


def test_a_time_to_live_longer_than_any_number_is_cut() -> None:
    for duration in (10**400, float("inf"), 1e308):
        hint = only(action("kv.retain", {"session_id": "s", "duration": duration}))
        assert (hint.call.ttl_s, hint.note) == (LONGEST_TTL_S, "held for 86400 s at most")


def test_a_hint_ends_nobodys_lease(harness: Harness) -> None:
    """An owner that the engine has not heard of yet would shut the present one out."""
    transcript = turn(harness, "s", PROMPT, 20, epoch=5)
    (ahead,) = send(harness, Hinted(harness.intents), action("kv.demote", {"session_id": "s", "session_generation": 6}))
    assert (ahead["status"], "epoch 6" in ahead["detail"]) == ("rejected", True)
    assert harness.generate("s", [*transcript, 1], 2, epoch=5).end["finish_reason"] == "length"
