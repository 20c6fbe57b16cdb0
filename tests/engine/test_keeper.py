"""The tier policy at work in an engine: what it moves, what it leaves, and what the log says of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.decisions import DecisionLog
from engine.intents import Intents
from engine.keeper import Keeper
from engine.kvcall import KvCall, PauseHint, parse_kv
from engine.moves import Moves
from engine.speeds import Link, Speeds
from kvtier import SharedConfig, Tier, TierConfig
from kvtier.policy import Expected, Move, Place, Policy, Prefill, Reason, State, TierKeep, record, replay
from tests.engine.fakes import FINGERPRINT, PAGE_BYTES, Harness, oracle
from tests.engine.test_core import PROMPT, turn
from tests.engine.tiered import Tiered

SLOW_COMPUTE = Prefill(1.0)  # a second per token: any tier is quicker
BASH = {"state": "tool", "tool": "bash", "timeout_s": 60.0}


def known(prefill: Prefill, bps: float = 1e9) -> Speeds:
    return Speeds(prefill, {tier: Link(bps, bps, 1e-6, 1e-6) for tier in Tier})


def with_policy(harness: Harness, speeds: Speeds, file: Path | None = None) -> Keeper:
    """The harness's intents with measured speeds instead of unknown ones."""
    keeper = Keeper(harness.core, Moves(harness.core), DecisionLog(file), speeds)
    harness.core.timers.clear()
    harness.intents = Intents(harness.core, keeper)
    return keeper


def entries(keeper: Keeper) -> list[dict[str, Any]]:
    return sorted(keeper.decisions.since(0)[1], key=lambda entry: entry["seq"])


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with Harness(tmp_path) as engine:
        yield engine


def test_a_tool_that_starts_has_its_pages_copied_and_none_freed(harness: Harness) -> None:
    keeper = with_policy(harness, known(SLOW_COMPUTE))
    turn(harness, "s", PROMPT, 20)
    receipt = harness.kv("offload", "s", tier="auto", pause=BASH, step=3)
    state = harness.state("s")
    assert (receipt["status"], receipt["tier"]) == ("accepted", "host")
    assert state["host_pages"] == state["device_pages"] == len(state["keys"])
    (entry,) = entries(keeper)
    assert (entry["action"], entry["place"], entry["reason"], entry["step"]) == ("store", "host", "tool_started", 3)
    assert entry["status"] == "done"
    assert entry["predicted_s"] > 0
    assert entry["realised_s"] > 0
    assert entry["instead_s"] == pytest.approx(entry["tokens"])


def test_a_context_that_is_computed_sooner_than_read_is_left_where_it_is(harness: Harness) -> None:
    keeper = with_policy(harness, known(Prefill(1e-12)))
    turn(harness, "s", PROMPT, 20)
    receipt = harness.kv("offload", "s", tier="auto", pause=BASH)
    assert (receipt["status"], receipt["tier"]) == ("rejected", None)
    assert "sooner" in receipt["detail"]
    assert harness.state("s")["host_pages"] == 0
    assert [entry["action"] for entry in entries(keeper)] == ["keep"]


def test_what_was_not_worth_a_copy_is_not_written_when_the_device_gives_it_up(harness: Harness) -> None:
    with_policy(harness, known(Prefill(1e-12)))
    turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="auto", pause=BASH)
    for other in range(8):
        turn(harness, f"o{other}", [other + 1] * 120, 8)
    counters = harness.stats()["counters"]
    assert counters["unwanted"] > 0
    assert harness.state("s")["host_pages"] == 0


def test_an_approval_leaves_the_device_as_soon_as_its_pages_are_below(harness: Harness) -> None:
    with_policy(harness, known(SLOW_COMPUTE))
    transcript = turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="auto", pause={"state": "approval"})
    state = harness.state("s")
    assert (state["device_pages"], state["host_pages"]) == (0, len(state["keys"]))
    harness.kv("prefetch", "s")
    done = harness.generate("s", [*transcript, 5], 5)
    assert done.tokens == oracle([*transcript, 5], 5)


def test_pressure_takes_the_pages_of_whoever_is_expected_last(harness: Harness) -> None:
    keeper = with_policy(harness, known(SLOW_COMPUTE))
    for name, timeout_s in (("soon", 2.0), ("late", 3000.0)):
        turn(harness, name, [len(name) + int(timeout_s) % 50] * 124, 8)
        harness.kv("offload", name, tier="auto", pause={**BASH, "tool": name, "timeout_s": timeout_s})
    turn(harness, "other", [9] * 250, 8)
    assert harness.state("soon")["device_pages"] == len(harness.state("soon")["keys"])
    assert harness.state("late")["device_pages"] < len(harness.state("late")["keys"])
    evicted = [entry["session"] for entry in entries(keeper) if entry["reason"] == "pressure"]
    assert evicted == ["late"]


def test_an_eviction_is_settled_with_what_its_absence_cost(harness: Harness) -> None:
    keeper = with_policy(harness, known(SLOW_COMPUTE))
    transcript = turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="auto", pause=BASH)
    turn(harness, "other", [9] * 480, 8)
    evicted = next(entry for entry in entries(keeper) if entry["action"] == "evict")
    assert (evicted["session"], evicted["status"], evicted["realised_s"]) == ("s", "open", None)
    harness.generate("s", [*transcript, 5], 5, known_tokens=len(transcript) - 1)
    told = entries(keeper)
    evicted = next(entry for entry in told if entry["action"] == "evict" and entry["session"] == "s")
    restore = next(entry for entry in told if entry["action"] == "restore")
    assert restore["place"] == "host"
    assert (evicted["status"], evicted["realised_s"]) == ("done", restore["realised_s"])


def test_what_is_read_back_ahead_is_in_the_log_and_settles_the_absence(harness: Harness) -> None:
    keeper = with_policy(harness, known(SLOW_COMPUTE))
    turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="auto", pause=BASH)
    turn(harness, "other", [9] * 480, 8)
    harness.kv("prefetch", "s", step=4)
    told = entries(keeper)
    read = next(entry for entry in told if entry["action"] == "prefetch")
    assert (read["place"], read["reason"], read["step"], read["status"]) == ("host", "tool_ended", 4, "done")
    assert read["predicted_s"] > 0
    assert read["instead_s"] > 0
    evicted = next(entry for entry in told if entry["action"] == "evict" and entry["session"] == "s")
    assert (evicted["status"], evicted["realised_s"]) == ("done", read["realised_s"])


def test_a_recompute_is_in_the_log_with_what_was_expected_of_it(harness: Harness) -> None:
    keeper = with_policy(harness, known(SLOW_COMPUTE))
    transcript = turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="auto", pause=BASH)
    turn(harness, "other", [9] * 480, 8)
    assert harness.stack is not None
    harness.stack.delete([bytes.fromhex(key) for key in harness.state("s")["keys"]])
    done = harness.generate("s", [*transcript, 5], 5, known_tokens=len(transcript) - 1)
    again = next(entry for entry in entries(keeper) if entry["action"] == "recompute")
    assert again["tokens"] == done.prefill["recomputed"] > 0
    assert again["predicted_s"] > 0
    assert again["realised_s"] > 0


def test_what_a_session_that_ended_lost_was_not_missed(harness: Harness) -> None:
    keeper = with_policy(harness, known(SLOW_COMPUTE))
    turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="auto", pause=BASH)
    turn(harness, "other", [9] * 480, 8)
    harness.kv("drop", "s")
    evicted = next(entry for entry in entries(keeper) if entry["action"] == "evict")
    assert (evicted["status"], evicted["realised_s"]) == ("moot", 0.0)


def test_a_full_host_tier_hands_the_least_worth_on_to_nvme(tmp_path: Path) -> None:
    with Harness(tmp_path, blocks=64, host_pages=2) as harness:
        with_policy(harness, known(SLOW_COMPUTE))
        for name, timeout_s in (("late", 3000.0), ("soon", 2.0)):
            turn(harness, name, [len(name) + int(timeout_s) % 50] * 160, 8)
            harness.kv("offload", name, tier="auto", pause={**BASH, "tool": name, "timeout_s": timeout_s})
        soon, late = harness.state("soon"), harness.state("late")
        assert soon["host_pages"] == len(soon["keys"])
        assert (late["host_pages"], late["nvme_pages"]) == (0, len(late["keys"]))
        assert harness.stats()["integrity"] == "ok"


def test_the_end_of_a_pause_is_learned(harness: Harness) -> None:
    expected = Expected()
    keeper = Keeper(
        harness.core,
        Moves(harness.core),
        DecisionLog(),
        known(SLOW_COMPUTE),
        Policy(TierKeep(expected), pieces=1, reserves=False),
    )
    harness.intents = Intents(harness.core, keeper)
    turn(harness, "s", PROMPT, 20)
    for _ in range(3):
        harness.kv("offload", "s", tier="auto", pause=BASH)
        harness.kv("prefetch", "s")
    harness.kv("pin", "s", pause=BASH)
    harness.kv("release", "s")
    assert expected.ended("bash") == 4


def test_whole_decisions_in_the_file_play_again_to_the_same_moves(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    with Harness(tmp_path / "tiers") as harness:
        with_policy(harness, known(SLOW_COMPUTE), file)
        for name in ("a", "b"):
            turn(harness, name, [1, ord(name) % 60] * 60, 8)
            harness.kv("offload", name, tier="auto", pause=BASH)
            harness.kv("prefetch", name)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["reason"] for line in lines] == ["tool_started", "scheduled"] * 2
    changes = list(replay(lines, Policy(TierKeep(Expected()), pieces=1, reserves=False)))
    assert [change.other for change in changes] == [change.done for change in changes]


def test_a_pin_ends_with_its_epoch_and_a_second_release_is_nothing(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20)
    assert harness.kv("pin", "s", epoch=1)["status"] == "accepted"
    assert harness.stats()["pinned_pages"] > 0
    harness.kv("offload", "s", epoch=2)  # a new owner has taken the session over
    assert harness.stats()["pinned_pages"] == 0
    first, second = (harness.kv("release", "s", epoch=2) for _ in range(2))
    assert (
        (first["status"], first["detail"]) == (second["status"], second["detail"]) == ("accepted", "nothing was pinned")
    )


def test_a_pin_of_a_dead_owner_ends_when_its_session_runs_elsewhere(harness: Harness) -> None:
    transcript = turn(harness, "s", PROMPT, 20)
    harness.kv("pin", "s", epoch=1)
    harness.generate("s", [*transcript, 5], 2, epoch=2)
    assert harness.stats()["pinned_pages"] == 0


def test_a_pin_ends_by_itself(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20)
    harness.kv("pin", "s", ttl_s=1e-3)
    while harness.stats()["pinned_pages"]:
        pass
    assert harness.kv("release", "s")["detail"] == "nothing was pinned"


def test_a_range_of_tokens_can_be_pinned(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20)
    call = KvCall("pin", "s", 0, b"", (), Tier.HOST, True, False, tokens=(0, 33))
    receipt = harness._ask(lambda reply: harness.intents.handle(call, reply))
    assert (receipt["status"], receipt["pages"], receipt["bytes"]) == ("accepted", 3, 3 * PAGE_BYTES)
    assert harness.stats()["pinned_pages"] == 3


def test_a_line_of_the_log_says_all_that_the_decision_depended_on(harness: Harness) -> None:
    keeper = with_policy(harness, known(SLOW_COMPUTE))
    turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="auto", pause=BASH)
    seen = harness.store.sessions.get("s")
    assert seen is not None
    view = keeper._sight.view(Reason.SCHEDULED, seen)
    (change,) = replay([record(view, [])], Policy(TierKeep(Expected()), pieces=1, reserves=False))
    assert change.other == Policy(TierKeep(Expected()), pieces=1, reserves=False).decide(view)


def test_pages_that_were_brought_and_taken_away_unused_are_counted(harness: Harness) -> None:
    transcript = turn(harness, "s", PROMPT, 20)
    brought = []
    for used in (True, False):
        harness.kv("offload", "s", tier="nvme")
        brought.append(harness.kv("prefetch", "s")["pages"])
        if used:
            harness.generate("s", transcript, 1)
        turn(harness, "other", [9] * 480, 8)
    counters = harness.stats()["counters"]
    assert counters["prefetched"] == sum(brought)
    assert counters["prefetched_unused"] == brought[1]


def test_what_a_session_that_ended_did_not_use_was_no_waste_of_room(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="nvme")
    harness.kv("prefetch", "s")
    harness.kv("drop", "s")
    turn(harness, "other", [9] * 480, 8)
    assert harness.stats()["counters"]["prefetched_unused"] == 0


def test_pages_that_one_session_had_no_use_for_are_kept_for_the_next_that_has(harness: Harness) -> None:
    with_policy(harness, known(Prefill(1e-12)))
    turn(harness, "a", PROMPT, 20)
    harness.kv("offload", "a", tier="auto", pause=BASH)
    assert harness.store.unwanted
    turn(harness, "b", PROMPT, 20)
    shared = harness.store.sessions.get("b")
    assert shared is not None
    assert not harness.store.unwanted & set(shared.keys)
    for other in range(8):
        turn(harness, f"o{other}", [other + 1] * 120, 8)
    assert harness.stats()["counters"]["unwanted"] == 0


def test_hundreds_of_moves_of_sessions_that_are_gone_end_one_after_another(tmp_path: Path) -> None:
    sessions = [f"s{number}" for number in range(400)]
    receipts: list[dict[str, Any]] = []
    with Harness(tmp_path, blocks=1000, host_pages=1000) as harness:
        with_policy(harness, known(SLOW_COMPUTE))
        for number, name in enumerate(sessions):
            turn(harness, name, [number % 60 + 1, number // 60 + 1] * 8, 2)
        go = harness.hold()
        for message in ({"intent": "offload", "tier": "auto", "pause": BASH, "wait": True}, {"intent": "drop"}):
            for name in sessions:
                call = parse_kv({**message, "session": name})
                harness.core.post(lambda call=call: harness.intents.handle(call, receipts.append))
        go.set()
        while len(receipts) < 2 * len(sessions):
            harness.stats()
        assert harness.stats()["integrity"] == "ok"


def test_a_copy_is_not_given_up_once_its_session_has_come_back(harness: Harness) -> None:
    keeper = with_policy(harness, known(SLOW_COMPUTE))
    transcript = turn(harness, "a", PROMPT, 20)
    turn(harness, "b", [7] * 60, 8)
    harness.kv("offload", "a", tier="nvme")
    call = KvCall("offload", "b", 0, b"", (), None, True, False)
    go = harness.hold()

    def decided() -> None:
        for move in (Move("store", "b", Place.HOST, PAGE_BYTES, 0.0), Move("evict", "a", Place.NVME, PAGE_BYTES, 0.0)):
            keeper._chores.add(move, "pressure", call, None)
        keeper._chores.go_on()

    harness.core.post(decided)
    back = harness.start("a", [*transcript, 5], 5, known_tokens=len(transcript) - 1)
    go.set()
    assert back.finish().prefill["recomputed"] == 0
    while any(entry["place"] == "host" and entry["status"] == "open" for entry in entries(keeper)):
        harness.stats()
    harness.stats()  # whatever the next move has sent to the tiers has been done
    assert harness.stack is not None
    seen = harness.store.sessions.get("a")
    assert seen is not None
    assert set(harness.stack.lookup(seen.keys[:3])) == {Tier.NVME}


def test_a_copy_that_its_tier_gave_up_meanwhile_is_made_again(harness: Harness) -> None:
    with_policy(harness, known(SLOW_COMPUTE))
    turn(harness, "s", PROMPT, 20)
    again = []
    for _ in range(3):
        again.append(harness.kv("offload", "s", tier="auto", pause=BASH))
        if len(again) == 2:
            assert harness.stack is not None
            harness.stack.free([bytes.fromhex(key) for key in harness.state("s")["keys"]], Tier.HOST)
    assert [receipt["status"] for receipt in again] == ["accepted"] * 3
    assert (again[1]["detail"], again[1]["bytes"]) == ("the copy is there already", 0)
    assert again[2]["bytes"] > 0
    state = harness.state("s")
    assert state["host_pages"] == len(state["keys"])


@pytest.mark.parametrize("tier", [Tier.NVME, Tier.SHARED])
def test_an_offload_to_a_tier_that_is_not_there_is_refused_whatever_other_tier_has_the_pages(
    tmp_path: Path, tier: Tier
) -> None:
    size = 1 << 20
    config = TierConfig(
        PAGE_BYTES,
        FINGERPRINT,
        None,
        0,
        tmp_path / "nvme" if tier is Tier.NVME else None,
        size,
        shared=SharedConfig(tmp_path / "shared", size) if tier is Tier.SHARED else None,
    )
    with Tiered(config) as harness:
        with_policy(harness, known(SLOW_COMPUTE))
        transcript = turn(harness, "s", PROMPT, 20)
        assert harness.kv("offload", "s", tier=tier)["status"] == "accepted"
        refused = harness.kv("offload", "s", tier="host")
        assert (refused["status"], refused["detail"]) == ("rejected", "this engine has no host tier")
        harness.kv("offload", "s", tier="auto", pause=BASH)
        assert harness.generate("s", [*transcript, 5], 5).tokens == oracle([*transcript, 5], 5)


def test_the_release_of_a_range_leaves_the_rest_pinned(harness: Harness) -> None:
    turn(harness, "s", [5] * 200, 20)
    asked(harness, "pin", 0, 64)
    asked(harness, "pin", 96, 160)
    assert asked(harness, "release", 160, 208)["detail"] == "nothing was pinned"
    assert harness.stats()["pinned_pages"] == 8
    assert asked(harness, "release", 48, 112)["pages"] == 2
    assert harness.stats()["pinned_pages"] == 6
    assert harness.kv("release", "s")["pages"] == 6
    assert harness.stats()["pinned_pages"] == 0


def test_a_second_range_is_counted_by_itself(tmp_path: Path) -> None:
    with Harness(tmp_path, blocks=16) as harness:
        turn(harness, "s", [5] * 200, 20)
        asked(harness, "pin", 0, 128)
        turn(harness, "other", [9] * 100, 8)
        receipt = asked(harness, "pin", 128, 224)
        seen = harness.store.sessions.get("s")
        assert seen is not None
        here = sum(harness.store.pool.find(key) is not None for key in seen.keys[8:])
        assert here < 6
        assert (receipt["status"], receipt["pages"]) == ("clipped" if here else "missing", here)


def test_what_comes_back_is_pinned_only_where_a_range_was(harness: Harness) -> None:
    turn(harness, "s", [5] * 200, 20)
    harness.kv("offload", "s", tier="nvme")
    assert asked(harness, "pin", 0, 64)["status"] == "missing"
    harness.kv("prefetch", "s")
    assert harness.stats()["pinned_pages"] == 4


def test_a_copy_counts_what_it_held_when_it_began(harness: Harness) -> None:
    with_policy(harness, known(SLOW_COMPUTE))
    transcript = turn(harness, "s", PROMPT, 20)
    seen = harness.store.sessions.get("s")
    assert seen is not None
    tokens, go_on = len(seen.tokens), threading.Event()
    harness.core.post(lambda: harness.lanes.write(go_on.wait, lambda _: None))
    assert harness.kv("offload", "s", tier="auto", pause=BASH, wait=False)["status"] == "deferred"
    turn(harness, "s", [*transcript, 5], 40)
    go_on.set()
    while seen.copy is None:
        harness.stats()
    assert seen.copy_to == tokens < len(seen.tokens)


def test_an_absence_is_in_the_log_once_however_often_the_device_runs_short(harness: Harness) -> None:
    keeper = with_policy(harness, known(Prefill(1e-12)))
    turn(harness, "s", PROMPT, 20)
    seen = harness.store.sessions.get("s")
    assert seen is not None
    seen.pause = PauseHint(State.TOOL, "late", 3000.0)  # worth least, but dirty: clean pages of others go first
    for other in range(12):
        turn(harness, f"o{other}", [other + 1] * 100, 8)
        harness.kv("offload", f"o{other}", tier="host")
    evicted = [entry["session"] for entry in entries(keeper) if entry["action"] == "evict"]
    assert evicted
    assert len(evicted) == len(set(evicted))


def asked(harness: Harness, intent: str, start: int, end: int) -> dict[str, Any]:
    """An intent over a range of tokens."""
    call = KvCall(intent, "s", 0, b"", (), Tier.HOST, True, False, tokens=(start, end))
    return harness._ask(lambda reply: harness.intents.handle(call, reply))
