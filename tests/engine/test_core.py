"""The compute thread with a backend whose pages can be read: a wrong page would give a wrong token."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from engine.facts import PAGE_SIZE
from kvtier import Tier
from tests.engine.fakes import PAGE_BYTES, VOCAB, Harness, oracle

PROMPT = [(7 * i + 3) % 60 for i in range(45)]


def turn(engine: Harness, session: str, tokens: list[int], count: int, **fields: object) -> list[int]:
    """Generate and check against the oracle; returns the grown transcript."""
    done = engine.generate(session, tokens, count, **fields)
    assert done.end["type"] == "done", done.end
    assert done.tokens == oracle(tokens, count)
    return tokens + done.tokens


def test_a_generation_gives_the_models_tokens_and_ends_by_length(harness: Harness) -> None:
    done = harness.generate("s", PROMPT, 20)
    assert done.tokens == oracle(PROMPT, 20)
    assert done.end["finish_reason"] == "length"
    assert done.prefill["computed"] == len(PROMPT)


def test_a_second_turn_computes_only_the_new_message(harness: Harness) -> None:
    transcript = turn(harness, "s", PROMPT, 20)
    grown = [*transcript, 1, 2, 3]
    done = harness.generate("s", grown, 5, known_tokens=len(transcript) - 1)
    assert done.tokens == oracle(grown, 5)
    assert done.prefill["device"] == len(transcript) - 1  # the newest token was sampled, never run
    assert (done.prefill["recomputed"], done.prefill["computed"]) == (0, 4)


def test_the_same_prompt_twice_runs_only_its_last_token(harness: Harness) -> None:
    prompt = PROMPT[:32]
    turn(harness, "a", prompt, 3)
    again = harness.generate("b", prompt, 3)
    assert again.tokens == oracle(prompt, 3)
    assert again.prefill["device"] == 32


def test_two_tenants_share_no_page(harness: Harness) -> None:
    turn(harness, "a", PROMPT, 5, salt="aa")
    assert harness.generate("b", PROMPT, 5, salt="bb").prefill["device"] == 0
    assert harness.generate("c", PROMPT, 5, salt="aa").prefill["device"] > 0


def test_a_session_that_comes_back_after_others_used_its_blocks_goes_on_the_same(harness: Harness) -> None:
    transcript = turn(harness, "s", PROMPT, 20)
    assert harness.kv("offload", "s")["status"] == "accepted"
    for other in range(8):
        turn(harness, f"o{other}", [other + 1] * 120, 8)
    done = harness.generate("s", [*transcript, 5], 30, known_tokens=len(transcript) - 1)
    assert done.tokens == oracle([*transcript, 5], 30)
    assert done.prefill["host"] > 0
    assert done.prefill["recomputed"] == 0


def test_offload_to_nvme_frees_device_and_host_and_comes_back_whole(harness: Harness) -> None:
    transcript = turn(harness, "s", PROMPT, 20)
    receipt = harness.kv("offload", "s", tier="nvme")
    pages = -(-(len(transcript) - 1) // PAGE_SIZE)
    assert (receipt["status"], receipt["pages"]) == ("accepted", pages)
    state = harness.state("s")
    assert (state["device_pages"], state["host_pages"], state["nvme_pages"]) == (0, 0, pages)
    done = harness.generate("s", [*transcript, 9], 10, known_tokens=len(transcript) - 1)
    assert done.tokens == oracle([*transcript, 9], 10)
    assert (done.prefill["nvme"], done.prefill["recomputed"]) == (len(transcript) - 1, 0)


def test_prefetch_brings_pages_back_before_the_prompt_comes(harness: Harness) -> None:
    transcript = turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="nvme")
    receipt = harness.kv("prefetch", "s")
    assert receipt["status"] == "accepted"
    assert receipt["bytes"] == receipt["pages"] * PAGE_BYTES
    done = harness.generate("s", [*transcript, 9], 10)
    assert done.tokens == oracle([*transcript, 9], 10)
    assert done.prefill["device"] == len(transcript) - 1


def test_a_flipped_bit_in_a_tier_is_recomputed_and_counted(tmp_path: Path) -> None:
    with Harness(tmp_path, host_pages=0) as engine:
        transcript = turn(engine, "s", PROMPT, 20)
        engine.kv("offload", "s", tier="nvme")
        segment = max((p for p in (tmp_path / "nvme").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        damaged = bytearray(segment.read_bytes())
        damaged[-PAGE_BYTES // 2] ^= 1
        segment.write_bytes(damaged)
        done = engine.generate("s", [*transcript, 9], 10, known_tokens=len(transcript) - 1)
        assert done.tokens == oracle([*transcript, 9], 10)
        assert done.prefill["recomputed"] > 0
        assert engine.stats()["quarantined"] >= 1


def test_a_restarted_engine_restores_from_what_its_predecessor_left(tmp_path: Path) -> None:
    with Harness(tmp_path) as engine:
        transcript = turn(engine, "s", PROMPT, 20)
        engine.kv("offload", "s")
    with Harness(tmp_path) as engine:
        done = engine.generate("s", [*transcript, 9], 10, known_tokens=len(transcript) - 1)
        assert done.tokens == oracle([*transcript, 9], 10)
        assert (done.prefill["host"], done.prefill["recomputed"]) == (len(transcript) - 1, 0)


def test_drop_after_a_restart_deletes_what_the_tokens_name(tmp_path: Path) -> None:
    with Harness(tmp_path) as engine:
        transcript = turn(engine, "s", PROMPT, 20)
        engine.kv("offload", "s")
    with Harness(tmp_path) as engine:
        assert engine.kv("drop", "s", token_ids=transcript)["status"] == "accepted"
        assert engine.stack is not None
        assert not engine.stack.keys(Tier.HOST) | engine.stack.keys(Tier.NVME)


def test_drop_leaves_no_page_of_the_session_in_any_tier(harness: Harness) -> None:
    transcript = turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s")
    turn(harness, "s", [*transcript, 1], 20)
    harness.kv("offload", "s", tier="nvme")
    turn(harness, "s", [*PROMPT[:20], 2], 9)  # a branch: the former one is not this session's chain any more
    assert harness.kv("drop", "s")["status"] == "accepted"
    assert harness.kv("drop", "s")["status"] == "missing"
    assert harness.stack is not None
    assert not harness.stack.keys(Tier.HOST) | harness.stack.keys(Tier.NVME)
    assert harness.stats()["pool"]["free"] == harness.store.pool.total


def test_drop_spares_pages_that_a_fork_holds(harness: Harness) -> None:
    transcript = turn(harness, "parent", PROMPT, 20)
    harness.kv("offload", "parent")
    turn(harness, "fork", [*transcript, 4], 5)
    harness.kv("drop", "parent")
    done = harness.generate("fork", [*transcript, 4], 5)
    assert done.tokens == oracle([*transcript, 4], 5)
    assert done.prefill["device"] == len(transcript) - 1


def test_drop_spares_pages_that_a_fork_still_runs_on(harness: Harness) -> None:
    transcript = turn(harness, "parent", PROMPT, 20)
    fork = harness.start("fork", [*transcript, 4], 40)
    while not fork.tokens:
        fork.next()
    harness.kv("drop", "parent")
    grown = [*transcript, 4, *fork.finish().tokens]
    assert harness.generate("fork", [*grown, 6], 2).prefill["device"] == len(grown) - 1
    harness.kv("drop", "fork")
    assert harness.stats()["pool"]["free"] == harness.store.pool.total


def test_a_superseded_partial_page_is_deleted_from_the_tiers(harness: Harness) -> None:
    transcript = turn(harness, "s", PROMPT, 2)
    harness.kv("offload", "s")
    assert harness.stack is not None
    before = harness.stack.keys(Tier.HOST)
    turn(harness, "s", [*transcript, 1], 30)
    harness.kv("offload", "s")
    state = harness.state("s")
    assert {key.hex() for key in harness.stack.keys(Tier.HOST)} == set(state["keys"])
    assert not before <= harness.stack.keys(Tier.HOST)


def test_a_fork_writes_into_a_copy_of_the_shared_partial_page(harness: Harness) -> None:
    transcript = turn(harness, "s", PROMPT, 2)
    go = harness.hold()
    left = harness.start("left", [*transcript, 11], 20)
    right = harness.start("right", [*transcript, 22], 20)
    go.set()
    assert left.finish().tokens == oracle([*transcript, 11], 20)
    assert right.finish().tokens == oracle([*transcript, 22], 20)
    assert harness.stats()["integrity"] == "ok"


def test_requests_together_give_what_each_gives_alone(harness: Harness) -> None:
    prompts = [[i + 1, *PROMPT[: 10 + 7 * i]] for i in range(6)]
    go = harness.hold()
    running = [harness.start(f"s{i}", prompt, 12) for i, prompt in enumerate(prompts)]
    go.set()
    for prompt, generation in zip(prompts, running, strict=True):
        assert generation.finish().tokens == oracle(prompt, 12)
    assert max(harness.backend.steps) > 1


def test_more_requests_than_the_pool_holds_all_end(harness: Harness) -> None:
    running = [harness.start(f"s{i}", [i + 1] * 200, 60) for i in range(9)]
    for index, generation in enumerate(running):
        assert generation.finish().tokens == oracle([index + 1] * 200, 60)
    assert harness.stats()["integrity"] == "ok"


def test_dirty_pages_that_are_evicted_go_to_the_host_tier(harness: Harness) -> None:
    transcript = turn(harness, "s", PROMPT, 20)
    for other in range(8):
        turn(harness, f"o{other}", [other + 1] * 120, 8)
    done = harness.generate("s", [*transcript, 5], 5, known_tokens=len(transcript) - 1)
    assert done.tokens == oracle([*transcript, 5], 5)
    assert (done.prefill["host"] > 0, done.prefill["recomputed"]) == (True, 0)


def test_cancel_ends_the_generation_and_keeps_its_pages_whole(harness: Harness) -> None:
    running = harness.start("s", PROMPT, 400, cancel_after=7)
    assert running.finish().end["finish_reason"] == "cancelled"
    transcript = PROMPT + running.tokens
    assert running.tokens == oracle(PROMPT, len(running.tokens))
    done = harness.generate("s", [*transcript, 3], 9)
    assert done.tokens == oracle([*transcript, 3], 9)
    assert harness.stats()["integrity"] == "ok"


def test_cancel_while_a_restore_is_in_flight_gives_pages_back_once(harness: Harness) -> None:
    transcript = turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="nvme")
    hold = threading.Event()
    harness.lanes.read(hold.wait, lambda _: None)
    harness.lanes.read(hold.wait, lambda _: None)  # both readers are busy: the restore waits
    running = harness.start("s", transcript, 20)
    harness.cancel(running)
    assert running.finish().end["finish_reason"] == "cancelled"
    hold.set()
    stats = harness.stats()
    assert (stats["integrity"], stats["pool"]["held"]) == ("ok", 0)
    turn(harness, "s", transcript, 5)


def test_a_tier_that_never_delivers_is_given_up_and_recomputed(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.restores.RESTORE_DEADLINE_S", 0.0)
    transcript = turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="nvme")
    hold = threading.Event()
    harness.lanes.read(hold.wait, lambda _: None)
    harness.lanes.read(hold.wait, lambda _: None)
    done = harness.generate("s", [*transcript, 5], 5, known_tokens=len(transcript) - 1)
    hold.set()
    assert done.tokens == oracle([*transcript, 5], 5)
    assert done.prefill["recomputed"] == len(transcript) - 1
    assert harness.stats()["counters"]["restore_timeouts"] == 1


def test_a_failing_tier_write_leaves_the_engine_alive_and_the_page_dirty(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    transcript = turn(harness, "s", PROMPT, 20)

    def broken(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(harness.stack, "put", broken)
    assert harness.kv("offload", "s")["status"] == "missing"
    monkeypatch.undo()
    assert harness.kv("offload", "s")["status"] == "accepted"
    assert harness.stats()["io_failures"] == 1
    turn(harness, "s", [*transcript, 1], 5)


def test_pages_that_a_tier_lost_are_copied_again(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s")
    assert harness.stack is not None
    lost = [bytes.fromhex(key) for key in harness.state("s")["keys"][:2]]
    harness.stack.delete(lost)
    receipt = harness.kv("offload", "s")
    assert (receipt["status"], receipt["bytes"]) == ("accepted", 2 * PAGE_BYTES)


def test_an_older_epoch_is_refused_and_a_newer_one_takes_over(harness: Harness) -> None:
    go = harness.hold()
    running = harness.start("s", PROMPT, 400, epoch=2)
    late = harness.start("s", PROMPT, 5, epoch=1)
    newer = harness.start("s", PROMPT, 5, epoch=3)
    go.set()
    assert late.finish().end["code"] == "stale_epoch"
    assert running.finish().end["finish_reason"] == "cancelled"
    assert newer.finish().tokens == oracle(PROMPT, 5)
    assert harness.kv("pin", "s", epoch=2)["code"] == "stale_epoch"


def test_a_second_request_of_the_same_name_is_refused(harness: Harness) -> None:
    go = harness.hold()
    running = harness.start("s", PROMPT, 9)
    twin = harness.start("t", PROMPT, 5, request_id=running.request_id)
    go.set()
    assert twin.finish().end["code"] == "duplicate_request"
    assert running.finish().tokens == oracle(PROMPT, 9)


def test_pinned_pages_stay_until_they_are_released(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20)
    receipt = harness.kv("pin", "s")
    assert receipt["status"] == "accepted"
    for other in range(8):
        turn(harness, f"o{other}", [other + 1] * 120, 8)
    assert harness.state("s")["device_pages"] == receipt["pages"]
    assert harness.kv("release", "s")["pages"] == receipt["pages"]
    again = harness.kv("release", "s")
    assert (again["status"], again["pages"]) == ("accepted", 0)


def test_pins_give_way_when_otherwise_nothing_could_ever_run(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 100)
    harness.kv("pin", "s")
    long = [5] * 380
    assert harness.generate("big", long, 100).tokens == oracle(long, 100)
    assert harness.stats()["counters"]["pins_broken"] > 0


def test_intents_on_an_unknown_session_say_missing(harness: Harness) -> None:
    for intent in ("pin", "offload", "prefetch", "release", "drop"):
        receipt = harness.kv(intent, "nobody")
        assert receipt["status"] == "missing"
        assert receipt["detail"]


def test_an_intent_looks_for_no_page_beyond_the_context(harness: Harness) -> None:
    harness.kv("offload", "long", token_ids=[5] * 100_000)
    assert len(harness.state("long")["keys"]) == 4096 // 16


def test_a_prompt_that_is_too_long_is_refused_before_its_tokens_are_looked_at(harness: Harness) -> None:
    assert harness.generate("s", [VOCAB] * 5000, 1).end["code"] == "context_length_exceeded"


def test_delete_keys_deletes_exactly_these(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s")
    keys = [bytes.fromhex(key) for key in harness.state("s")["keys"]]
    receipt = harness.delete_keys(keys[:2])
    assert (receipt["status"], receipt["pages"]) == ("accepted", 2)
    assert harness.stack is not None
    assert harness.stack.keys(Tier.HOST) == set(keys[2:])


def test_kv_source_none_computes_everything_and_gives_the_same(harness: Harness) -> None:
    transcript = turn(harness, "s", PROMPT, 20)
    done = harness.generate("s", [*transcript, 1], 20, kv_source="none", known_tokens=len(transcript))
    assert done.tokens == oracle([*transcript, 1], 20)
    assert done.prefill["device"] == done.prefill["host"] == 0
    assert done.prefill["recomputed"] == len(transcript)


def test_an_engine_without_tiers_says_so(tmp_path: Path) -> None:
    with Harness(None) as engine:
        turn(engine, "s", PROMPT, 20)
        assert engine.kv("offload", "s")["status"] == "rejected"
        assert engine.kv("drop", "s")["status"] == "accepted"
        assert engine.stats()["integrity"] == "ok"


@pytest.mark.parametrize("tier", [None, "host", "nvme"])
@pytest.mark.parametrize("more", [1, 15, 16, 40])
def test_a_partial_last_page_is_used_again_however_much_the_transcript_has_grown(
    harness: Harness, tier: str | None, more: int
) -> None:
    """Where the old transcript ended within a page, the new one has a whole page with another key."""
    transcript = turn(harness, "s", PROMPT, 10)
    known = len(transcript) - 1  # the newest token has no KV yet
    assert known % PAGE_SIZE, "the transcript must end within a page"
    if tier is not None:
        harness.kv("offload", "s", tier=tier, evict=True)
        assert harness.state("s")["device_pages"] == 0
    longer = [*transcript, *range(1, more + 1)]
    done = harness.generate("s", longer, 20, known_tokens=known)
    assert done.tokens == oracle(longer, 20)
    assert done.prefill["recomputed"] == 0
    assert done.prefill[tier or "device"] == known


def test_offloaded_pages_stay_on_the_device_unless_they_are_to_be_evicted(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20)
    pages = harness.kv("offload", "s")["pages"]
    assert harness.state("s")["device_pages"] == harness.state("s")["host_pages"] == pages
    harness.kv("offload", "s", evict=True)
    assert harness.state("s")["device_pages"] == 0
    assert harness.kv("prefetch", "s")["pages"] == pages
    assert harness.state("s")["device_pages"] == pages


def test_a_pool_too_small_for_one_sequence_refuses_it_by_field_and_says_what_to_raise(harness: Harness) -> None:
    done = harness.generate("s", [1] * 600, 5)
    assert done.end["code"] == "pool_too_small"
    assert "token_ids has 600 tokens" in done.end["message"]
    assert "--kv-tokens" in done.end["message"]
    assert harness.stats()["pool"]["free"] == harness.store.pool.total


def test_logits_that_are_no_numbers_end_their_request_and_leave_no_page_of_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = harness.backend.forward
    nan = np.full(60, np.nan, np.float32)
    monkeypatch.setattr(harness.backend, "forward", lambda tiles: [row if row is None else nan for row in whole(tiles)])
    done = harness.generate("s", PROMPT, 5, sampling={"temperature": 1.0})
    assert (done.end["type"], done.end["code"]) == ("error", "engine_fault")
    monkeypatch.undo()
    stats = harness.stats()
    assert (stats["integrity"], stats["pool"]["free"]) == ("ok", harness.store.pool.total)
    turn(harness, "s", PROMPT, 5)
