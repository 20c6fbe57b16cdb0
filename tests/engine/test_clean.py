"""What the pool believes of pages that lie below: that belief is checked before the last copy is given up."""

from __future__ import annotations

from pathlib import Path

from engine.kvcall import KvCall
from engine.scheduler import Budget
from kvtier import Tier, TierConfig, TierStack
from tests.engine.fakes import FINGERPRINT, PAGE_BYTES, VOCAB, FakeBackend, Harness
from tests.engine.stepped import Stepped
from tests.engine.test_core import turn
from tests.engine.tiered import Tiered

PROMPT = [(5 * i + 3) % 50 + 3 for i in range(45)]


def test_a_staged_page_that_was_read_back_and_could_not_be_written_is_dirty(tmp_path: Path) -> None:
    room = PAGE_BYTES + 4096
    with TierStack.open(TierConfig(PAGE_BYTES, FINGERPRINT, tmp_path / "a", 64 * room, None, 0)) as stack:
        engine = Stepped(FakeBackend(6), 6, stack, page_bytes=PAGE_BYTES, vocab=VOCAB, context=96, budget=Budget())
        first = engine.submit("s", PROMPT, 3, 1)
        engine.settle()
        engine.submit("other", [9] * 70, 2, 2)  # pushes the pages of s out: they are snapshotted and wait to be written
        while engine.core.scheduler.requests():
            engine.turn()
            if engine.lanes.reads:
                engine.lanes.land_read(0)
        assert engine.store.copies is not None
        assert engine.store.copies.staged
        engine.submit("s", [*first.prompt, *first.tokens, 5], 2, 3, known=47)
        engine.turn()
        engine.lanes.land_read(0)
        while engine.lanes.writes:  # and now the tier refuses
            _, then = engine.lanes.writes.pop(0)
            then(None)
        engine.settle()
        (record,) = [one for one in engine.store.sessions.all() if one.name == "s"]
        for key in record.keys:
            assert stack.lookup([key])[0] is not None or not engine.store.pool.is_clean(key)


def test_a_clean_page_whose_tier_gave_it_up_is_written_again_when_the_device_gives_it_up(tmp_path: Path) -> None:
    config = TierConfig(PAGE_BYTES, FINGERPRINT, tmp_path / "a", 4096 + 20 * 384, None, 0)  # 15 slots
    with Tiered(config, blocks=64) as harness:
        turn(harness, "a", [5] * 200, 4)
        harness.kv("offload", "a", tier="host")
        for name, token in (("b", 7), ("c", 8)):
            turn(harness, name, [token] * 200, 4)
            harness.kv("offload", name, tier="host")
        turn(harness, "d", [9] * 900, 4)  # takes the blocks of a
        counters = harness.stats()["counters"]
        assert harness.state("a")["device_pages"] + harness.state("a")["host_pages"] > 0 or counters["lost"] > 0


def test_without_host_memory_what_the_device_gives_up_goes_to_nvme(tmp_path: Path) -> None:
    config = TierConfig(PAGE_BYTES, FINGERPRINT, None, 0, tmp_path / "n", 1 << 20)
    with Tiered(config, blocks=16) as harness:
        turn(harness, "s", PROMPT, 4)
        turn(harness, "other", [9] * 230, 4)
        state = harness.state("s")
        assert state["device_pages"] + state["nvme_pages"] == len(state["keys"])


def test_a_pinned_range_stays_that_range_when_its_session_goes_on(tmp_path: Path) -> None:
    with Harness(tmp_path) as harness:
        transcript = turn(harness, "s", [5] * 200, 20)
        call = KvCall("pin", "s", 0, b"", (), Tier.HOST, True, False, tokens=(0, 64))
        harness._ask(lambda reply: harness.intents.handle(call, reply))
        turn(harness, "s", [*transcript, 5], 4)
        assert harness.stats()["pinned_pages"] == 4
