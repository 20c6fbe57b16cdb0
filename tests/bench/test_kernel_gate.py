"""The gate's judgement, and its short form: one kernel, one target, and each sabotage. `make test-kernels` does all."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench import kernel_gate
from bench.kernel_known import KNOWN, Finding, Known, outdated, unexplained
from bench.kernel_table import compiled, findings, table

ROOT = Path(__file__).parent.parent.parent
GOOD = {
    "kind": "compiled",
    "kernel": "merge",
    "sample": "splits",
    "target": "sm_80",
    "triton": "3.9.0",
    "refused": None,
    "failed": None,
    "missing": [],
    "unsaid": [],
    "compiled": [
        {"name": "merge", "registers": 32, "shared_bytes": 1024, "spills": 0, "instructions": ["ld.global.v4"]}
    ],
}
WORST = {"kind": "worst", "kernel": "merge", "sample": "splits", "triton": "3.9.0", "worst": 1e-3, "bound": 1e-2}


def kernel(**changed):
    return {**GOOD, "compiled": [{**GOOD["compiled"][0], **changed}]}


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        (GOOD, []),
        (kernel(spills=3), ["spill"]),
        (kernel(shared_bytes=(163 << 10) + 1), ["smem"]),
        ({**kernel(shared_bytes=200 << 10), "target": "sm_90"}, []),
        ({**kernel(shared_bytes=65 << 10), "target": "gfx942"}, ["smem"]),
        ({**GOOD, "missing": ["mma.sync"]}, ["instruction"]),
        ({**GOOD, "unsaid": ["merge"]}, ["fusion"]),
        ({**GOOD, "refused": "no e4m3", "compiled": []}, ["refused"]),
        ({**GOOD, "failed": "PTXASError", "compiled": []}, ["failed"]),
    ],
)
def test_what_is_wrong_with_a_compiled_kernel_is_found(line, kinds):
    assert [finding.kind for finding in findings(line)] == kinds
    assert len(kernel_gate.misses([line])) == len(kinds)


def test_a_known_exception_passes_where_it_belongs_and_nowhere_else():
    known = Known("merge", "split*", "sm_80", "spill", "for a reason", triton=("3.9",))
    found = Finding("merge", "splits", "sm_80", "spill", "3.9", "spills")
    changes = {"kernel": "linear", "sample": "prefix", "target": "sm_90", "kind": "smem", "triton": "3.6"}
    other = [Finding(**{**vars(found), field: value}) for field, value in changes.items()]
    assert unexplained([found], [known]) == []
    assert unexplained(other, [known]) == other


def test_an_exception_that_no_longer_occurs_is_an_error_where_it_was_tried():
    known = Known("merge", "*", "sm_80", "spill", "for a reason", triton=("3.9",))
    assert outdated([], [known], {("merge", "sm_80")}, "3.9") == [known]
    assert outdated([], [known], {("merge", "sm_80")}, "3.6") == []
    assert outdated([], [known], {("merge", "sm_90")}, "3.9") == []
    assert outdated([Finding("merge", "x", "sm_80", "spill", "3.9", "")], [known], {("merge", "sm_80")}, "3.9") == []


def test_every_known_exception_has_a_reason():
    assert all(len(one.reason.split()) > 4 for one in KNOWN)


@pytest.mark.parametrize("worst", [2e-2, float("nan")])
def test_an_error_beyond_its_bound_is_red(worst):
    assert kernel_gate.misses([GOOD, WORST]) == []
    assert "0.01" in kernel_gate.misses([GOOD, {**WORST, "worst": worst}])[0].replace("1e-02", "0.01")


def test_nothing_compiled_is_red():
    assert kernel_gate.misses([]) == ["no kernel was found"]


def test_the_table_has_a_row_for_each_kernel_with_its_worst_sample():
    lines = [GOOD, {**GOOD, "target": "sm_90"}, {**GOOD, "kernel": "linear", "failed": "PTXASError", "compiled": []}]
    errors = kernel_gate.worst_errors([WORST, {**WORST, "worst": 2e-3}])
    rows = table(lines, errors)
    assert [row.split()[0] for row in rows] == ["kernel", "merge", "linear"]
    assert rows[1].split()[1] == "2/2"
    assert rows[1].endswith("2.0e-03 of 1e-02")
    assert rows[2].split()[1] == "0/2"
    assert compiled(lines, "sm_80") == 1


def gate(*arguments):
    call = [sys.executable, "-m", "bench.kernel_gate", "--target", "sm_90", "--json", *arguments]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_the_gate_is_green_and_every_sabotage_turns_it_red():
    sabotages = {"spill": "spills", "smem": "of shared memory", "instruction": "no cp.async"}
    with ThreadPoolExecutor(2) as pool:
        green = pool.submit(gate, "--kernel", "merge")
        broken = [pool.submit(gate, "--kernel", "linear", "--sabotage", name) for name in sabotages]
    assert green.result()[:2] == (0, {"kernels": 1, "compiled": {"sm_90": 1}, "unexplained": 0})
    for job, sentence in zip(broken, sabotages.values(), strict=True):
        status, figure, said = job.result()
        assert status == 1
        assert figure["unexplained"] > 0
        assert sentence in said


def test_products_are_compiled_as_a_gpu_launches_them():
    """Narrow ones in ranges of K, whose sums a second kernel adds up; wide ones whole."""
    call = [sys.executable, "-m", "bench.kernel_compile", "sm_90", "--kernel", "linear"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {line["sample"]: len(line["compiled"]) for line in lines} == {"one": 2, "many": 1, "wide": 1, "heads": 2}
