"""Where the memory went: at the start and under load, predicted and measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.doctor import Death, Figures, Finding, Measured, Predicted, examine
from engine.memory_use import bill, machine_memory
from engine.modelfile import open_model
from engine.precision import Precision
from tests.doctor.stage import Stage, owed
from tests.engine.conftest import Loaded
from tests.engine.process import engine, refusal

OWED = Predicted(10**9, 2 * 10**8, 10**9, 12_288, 16_384, 32_768)
THERE = Measured(8 * 10**9, 4 * 10**9, 10**9, 15 * 10**8, 10**8)
KILLED = Death("2026-01-01T00:00:00Z", True, -9, "was ended by SIGKILL", age_s=60)
IMPOSSIBLE = 2**31  # tokens


def findings(what: Figures) -> dict[str, Finding]:
    (report,) = examine(what, "memory")
    return {finding.name: finding for finding in report.findings}


def not_started(words: str, status: int = 2) -> Figures:
    death = Death("2026-01-01T00:00:00Z", False, status, words)
    return Figures("n", answers=False, predicted=OWED, measured=THERE, death=death)


def test_a_healthy_engine_has_no_finding_and_is_told_where_its_memory_went():
    stage = Stage(64)
    stage.crowd(2, 20, 20)
    stage.run()
    report = stage.report("memory")
    assert not report.findings
    said = "\n".join(report.notes)
    for word in ("weights: 1.0 MB by arithmetic, 1.0 MB loaded", "KV pool:", "host arena:", "workspaces", "machine:"):
        assert word in said


async def test_a_pool_that_is_impossible_is_found_at_the_start_with_what_fits(tiny: Loaded, tmp_path: Path):
    """A real process, which refuses to start, and what its last words come to."""
    status, said = await refusal(tiny.path, tmp_path, kv_tokens=IMPOSSIBLE, backend="cpu")
    machine, available = machine_memory()
    with open_model(tiny.path) as model:
        asked = bill(model.facts(), Precision(), IMPOSSIBLE, 256 << 20, on_device=False)
    death = Death("2026-01-01T00:00:00Z", False, status, said[-1]["error"])
    predicted = Predicted(
        asked.weights_bytes, asked.kv_bytes, asked.arena_bytes, asked.kv_bytes_per_token, IMPOSSIBLE, asked.context
    )
    figures = Figures("n", answers=False, predicted=predicted, measured=Measured(machine, available), death=death)
    (finding,) = findings(figures).values()
    assert finding.name == "memory.pool_too_large"
    assert "cannot be had" in finding.evidence["said"]
    fits = finding.evidence["fits_tokens"]
    assert 0 < fits * asked.kv_bytes_per_token < machine
    assert [remedy.set.split("=")[0] for remedy in finding.remedies] == [
        "TENUTO_KV_TOKENS",
        "tenuto tenants limit TENANT --sandboxes N",
        "context_policy: drop_tool_output, in agents",
        "TENUTO_KV_DTYPE",
    ]
    assert finding.remedies[0].set == f"TENUTO_KV_TOKENS={fits}"


async def test_a_start_that_fails_for_another_reason_is_not_blamed_on_memory(tiny: Loaded, tmp_path: Path):
    status, said = await refusal(tiny.path, tmp_path, backend="cpu", dtype="w8a8")
    (finding,) = findings(not_started(said[-1]["error"], status)).values()
    assert finding.name == "memory.start_failed"
    assert "TENUTO_ENGINE_DTYPE" in finding.cause


def test_weights_that_are_more_than_the_machine_never_fit():
    what = replace(not_started("was ended by SIGKILL", -9), predicted=replace(OWED, weights_bytes=10**11))
    (finding,) = findings(what).values()
    assert finding.name == "memory.never_fits"
    assert finding.remedies[0].set == "TENUTO_MODEL"


def test_an_engine_that_is_killed_while_it_loads_wants_a_smaller_pool():
    (finding,) = findings(not_started("was ended by SIGKILL", -9)).values()
    assert finding.name == "memory.pool_too_large"


def test_a_start_of_which_nothing_else_is_known_is_told_in_its_last_words():
    death = Death("2026-01-01T00:00:00Z", False, 1, "no such file")
    (finding,) = findings(Figures("n", answers=False, death=death)).values()
    assert (finding.name, finding.evidence["said"]) == ("memory.start_failed", "no such file")


def test_an_engine_that_was_killed_while_it_served_failed_under_load():
    stage = Stage(64)
    (finding,) = stage.findings("memory", death=KILLED).values()
    assert finding.name == "memory.killed_under_load"
    assert len(finding.remedies) == 4


@pytest.mark.parametrize("death", [replace(KILLED, status=1), replace(KILLED, age_s=100_000)])
def test_an_end_that_was_no_kill_or_is_long_past_is_no_finding(death: Death):
    assert not Stage(64).findings("memory", death=death)


def test_promises_beyond_what_could_be_had_are_told_before_they_are_called_in():
    stage = Stage(64)
    huge = owed()
    what = stage.figures(bill=replace(huge, arena_bytes=1 << 50))
    (finding,) = findings(what).values()
    assert finding.name == "memory.overpromised"
    assert finding.evidence["promised_bytes"] > finding.evidence["available_bytes"]


def test_workspaces_in_memory_are_promises_too():
    what = Figures("n", predicted=OWED, measured=replace(THERE, workspaces=10**10, sandboxes=40))
    (finding,) = findings(what).values()
    assert finding.name == "memory.overpromised"
    assert finding.remedies[1].gain == 10**10 / 40


def test_what_a_process_holds_beyond_its_bill_is_unaccounted():
    what = Figures("n", predicted=OWED, measured=replace(THERE, resident=6 * 10**9, available=2 * 10**9))
    (finding,) = findings(what).values()
    assert finding.name == "memory.unaccounted"
    assert finding.evidence["unaccounted_bytes"] == 6 * 10**9 - 10**8 - 12 * 10**8


def test_a_node_whose_engine_is_away_says_so_and_no_more():
    reports = examine(Figures("n", answers=False, why_not="it is starting"))
    assert [report.part for report in reports] == ["memory", "pool", "tail", "precision", "speculation"]
    assert not [report for report in reports if report.findings]
    assert {report.away for report in reports} == {"the engine does not answer: it is starting"}


async def test_an_engine_says_what_it_owes_what_it_takes_and_what_its_time_went_into(tiny: Loaded, tmp_path: Path):
    from engine import EngineClient
    from engine.doctor import figures
    from tests.engine.process import hear

    async with engine(tiny.path, tmp_path, kv_tokens=4096, backend="cpu") as process:
        async with await EngineClient.connect(process.socket) as client:
            for number in range(3):
                await hear(client, f"s{number}", list(range(10, 60)), 30)
            what = figures("n", client.card.as_message(), await client.stats(), await client.spans())
    assert what.predicted is not None
    assert what.measured is not None
    assert what.measured.weights == pytest.approx(what.predicted.weights_bytes, rel=0.05)
    assert what.predicted.kv_bytes == 4096 * 256
    assert what.measured.resident > what.predicted.kv_bytes
    assert {step.graph for step in what.steps} == {"none", "missed", "replayed"}
    assert sum(step.graph == "missed" for step in what.steps) == 1  # batches of one, recorded once
    assert not findings(what)
