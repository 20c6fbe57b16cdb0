"""The wake bench in its short form, and its sabotage: a broken promise must turn it red whatever the speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import evidence, wake_slow
from bench.wake import Wanted, measure, rounds_of
from bench.wake_bed import NONE, PINNED, STATES, TIERS, prefix_of, result_of
from bench.wake_figures import figures, misses
from kvtier import Tier, TierConfig
from tests.bench.support import verified
from tests.engine.conftest import MODELS, model_path

CONTEXT, PAGES = 256, 16
Lines = list[dict[str, Any]]


async def measured(sabotage: str | None = None) -> Lines:
    return await measure(Wanted(model_path(MODELS[0]), {CONTEXT: 1}, 1, 2, sabotage))


@pytest.fixture(scope="module")
async def lines() -> Lines:
    return await measured()


def taken(lines: Lines) -> dict[str, dict[str, Any]]:
    return {line["state"]: line for line in evidence.only(lines, "wake")}


@pytest.mark.model
async def test_every_state_is_measured_and_answers_with_the_same_tokens(lines: Lines) -> None:
    assert list(taken(lines)) == list(STATES)
    figure = figures(lines)
    assert figure["tokens_equal"]
    assert (figure["lost_tokens"], figure["clipped"], figure["quarantined"]) == (0, 0, 0)
    assert figure["integrity"] == ["ok"]


@pytest.mark.model
async def test_pages_waited_in_their_place_and_all_came_from_there(lines: Lines) -> None:
    size = CONTEXT * evidence.only(lines, "about")[0]["kv_bytes_per_token"]
    for state in (PINNED, *TIERS):
        line = taken(lines)[state]
        assert line["here"] == PAGES
        assert (line["receipt"]["status"], line["receipt"]["pages"]) == ("accepted", PAGES)
        assert line["receipt"]["bytes"] == (0 if state == PINNED else size)
        assert (line["sources"]["recomputed"], line["sources"]["computed"]) == (0, 64)


@pytest.mark.model
async def test_without_a_tier_the_whole_prefix_is_computed_again(lines: Lines) -> None:
    line = taken(lines)[NONE]
    assert line["sources"] == {"device": 0, "host": 0, "nvme": 0, "shared": 0, "recomputed": CONTEXT, "computed": 64}


@pytest.mark.model
async def test_the_disk_is_read_raw_through_the_tier_and_by_the_engine(lines: Lines) -> None:
    reads = {line["read"]: line["bytes"] for line in evidence.only(lines, "disk")}
    assert reads["path"] == reads["tier"] == CONTEXT * evidence.only(lines, "about")[0]["kv_bytes_per_token"]
    assert reads["tier"] < reads["raw"] < 1.01 * reads["tier"]  # the segment's table is read as well


@pytest.mark.model
async def test_the_figures_are_recomputed_from_the_evidence(lines: Lines, tmp_path: Path) -> None:
    evidence.leave(tmp_path / "wake.jsonl", lines)
    status, figure = verified(tmp_path)
    assert (status, figure) == (1, json.loads(json.dumps(figures(lines))))
    assert "recompute_over_nvme at 2048 was not measured" in misses(figure)


@pytest.mark.model
async def test_a_flipped_bit_is_quarantined_computed_again_and_turns_the_figure_red() -> None:
    figure = figures(await measured("flip"))
    assert figure["quarantined"] > 0
    assert 0 < figure["lost_tokens"] <= CONTEXT
    assert figure["tokens_equal"]
    assert any("computed again" in miss for miss in misses(figure))
    assert any("did not verify" in miss for miss in misses(figure))


@pytest.mark.model
async def test_another_prompts_kv_turns_the_figure_red() -> None:
    figure = figures(await measured("foreign"))
    assert not figure["tokens_equal"]
    assert any("depend on where the KV waited" in miss for miss in misses(figure))


def test_a_slow_disk_is_slow_for_segments_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(wake_slow.time, "sleep", slept.append)
    config = TierConfig(
        page_bytes=4096,
        fingerprint=b"f" * 32,
        host_path=tmp_path / "arena",
        host_bytes=1 << 20,
        nvme_dir=tmp_path / "nvme",
        nvme_bytes=1 << 20,
    )
    key, page = b"k" * 32, bytes(4096)
    with wake_slow.SlowStack.open(config) as stack:
        stack.put([(key, page)], epoch=0, salt_id=b"", tier=Tier.HOST)
        stack.get([key])
        assert slept == []
        stack.move_to_nvme([key], epoch=0, salt_id=b"")
        stack.get([key])
        assert sum(slept) >= 4096 / wake_slow.BYTES_PER_S


def test_a_tool_result_repeats_a_piece_of_the_prefix_and_changes_with_the_round() -> None:
    prefix = prefix_of(CONTEXT, 0)
    results = [result_of(prefix, number) for number in range(3)]
    text = " ".join(map(str, prefix))
    assert all(" ".join(map(str, result)) in text for result in results)
    assert len({tuple(result) for result in results}) == 3


def test_long_contexts_are_measured_less_often() -> None:
    assert rounds_of([256, 2048, 8000], None) == {256: 15, 2048: 15, 8000: 3}
    assert rounds_of([256, 30000], None) == {256: 15, 30000: 3}
    assert rounds_of([256, 8000], 2) == {256: 2, 8000: 2}
