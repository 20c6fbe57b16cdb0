from __future__ import annotations

import pytest

from bench.engine_figures import best, figures, is_green, misses, p95
from tests.bench.support import INFO, RATES, engine_lines, peer_line


def test_a_ratio_is_of_the_fastest_of_each_and_taken_round_by_round():
    figure = figures(engine_lines())
    assert figure["decode_128"] == round(400 / 125, 3)
    assert figure["decode_128_bf16"] == round(120 / 100, 3)
    assert figure["ceiling_fraction_bf16"] == round(120 * 100e6 / 13e9, 3)
    assert is_green(figure)


def test_the_fastest_is_sought_among_those_that_ran_in_every_round():
    lines = engine_lines()
    slow_machine = {"kind": "timing", "round": 0, "engine": "llama.cpp/q4_0", "column": "batch8"}
    lines.append({**slow_machine, "seconds": 0.01, "tokens": 100, "rows": [], "foreign_cores": 0.0})
    assert best(lines, "llama.cpp", "batch8") == "llama.cpp/q8_0"


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"ours/bf16": 90.0}, {"decode_128_bf16", "ceiling_fraction_bf16"}),
        ({"ours/w4a8": 180.0}, {"prefill_512", "prefill_2048", "decode_128", "batch8"}),
        ({"ours/w4a8": 200.0}, {"batch8"}),
    ],
)
def test_a_slower_mode_misses_exactly_the_bars_that_it_no_longer_reaches(changed, missed):
    figure = figures(engine_lines({**RATES, **changed}))
    assert {text.split()[0] for text in misses(figure)} == missed


@pytest.mark.parametrize(
    "peer",
    [
        peer_line("llama.cpp/bf16", info=INFO.replace("AVX512 = 1 | ", "")),
        peer_line("llama.cpp/bf16", info=INFO.replace("AVX512_BF16 = 1", "AVX512_BF16 = 0")),
        peer_line("llama.cpp/bf16", flash="disabled"),
        peer_line("llama.cpp/bf16", flash="unknown"),
    ],
)
def test_ratios_to_a_hobbled_peer_are_refused(peer):
    figure = figures([*engine_lines(), peer])
    assert figure["refused"]
    assert figure["prefill_512"] is None
    assert figure["decode_128_bf16"] is None
    assert not is_green(figure)


def test_an_instruction_set_that_the_machine_lacks_is_not_asked_of_the_peer():
    old = {**peer_line("llama.cpp/bf16", info="CPU : AVX2 = 1 |"), "cpu_flags": "fpu avx2"}
    lines = [line for line in engine_lines() if line["kind"] != "engine"]
    assert is_green(figures([*lines, old]))


def test_ratios_from_a_busy_machine_are_refused_but_for_the_short_form():
    lines = [{**line, "foreign_cores": 1.2} if line["kind"] == "timing" else line for line in engine_lines()]
    assert figures(lines)["prefill_512"] is None
    lines[0]["quick"] = True
    assert figures(lines)["refused"] == []


def test_one_unequal_row_of_one_timed_batch_is_found():
    lines = engine_lines()
    found = next(line for line in lines if line["kind"] == "timing" and line["column"] == "batch8")
    found["rows"] = ["aa", "bc"]
    assert figures(lines)["bitwise"] is False


def test_a_mode_whose_rows_were_not_compared_does_not_pass_as_equal():
    lines = [x for x in engine_lines() if not (x["kind"] == "alone" and x["engine"] == "ours/w4a8")]
    assert figures(lines)["bitwise"] is False


def test_the_worst_mode_decides_on_the_gaps_between_tokens():
    lines = engine_lines()
    worse = [{**line, "dtype": "w4a8"} for line in lines if line["kind"] == "gaps"]
    for line in worse:
        if line["window"] == "beside":
            line["gaps_ms"] = [gap * 2 for gap in line["gaps_ms"]]
    assert figures(lines)["itl_p95_ratio"] == 1.5
    assert figures([*lines, *worse])["itl_p95_ratio"] == 3.0


def test_what_was_not_measured_is_a_miss():
    lines = [line for line in engine_lines() if line["kind"] not in ("gaps", "bandwidth")]
    assert {text.split()[0] for text in misses(figures(lines))} == {"ceiling_fraction_bf16", "itl_p95_ratio"}


def test_p95_is_the_nearest_rank():
    assert p95([*range(1, 101)]) == 95
    assert p95([3.0]) == 3.0
