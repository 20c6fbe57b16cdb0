"""The GPU bench with no GPU: its judgement, and a dry run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import evidence, gpu_figures
from bench.gpu_course import Course

ROOT = Path(__file__).parent.parent.parent
SOURCES = {"computed": 5, "device": 0, "host": 51, "nvme": 0, "shared": 0, "recomputed": 0}
GREEN = [
    {"kind": "about", "gpu": "a GPU", "dry": False},
    {"kind": "copy", "bytes": 10**9, "seconds": [1e-3, 1e-3, 9e-3]},
    {"kind": "link", "way": "in", "bytes": 10**9, "seconds": [0.02]},
    {"kind": "check", "kernel": "merge", "sample": "splits", "worst": 1e-3, "bound": 1e-2},
    {"kind": "speed", "kernel": "merge", "sample": "splits", "bytes": 10**9, "seconds": [1e-3]},
    {"kind": "bits", "what": "decoded", "logits": True, "pages": True},
    {"kind": "moved", "kernel": "copy_pages", "case": "gather", "bytes": 10**9, "seconds": [52e-5]},
    {"kind": "moved", "kernel": "paged_decode", "case": "bf16 16 x 8192", "bytes": 10**9, "seconds": [6e-4]},
    {"kind": "step", "way": "eager", "batch": 8, "context": 64, "seconds": [2e-3], "host_seconds": [1e-3]},
    {"kind": "step", "way": "graph", "batch": 8, "context": 64, "seconds": [1e-3], "host_seconds": [5e-5]},
    {
        "kind": "logits", "model": "m", "row": 0, "worst": 0.01, "spread": 1.0, "token": 3, "token_cpu": 3,
        "lead_cpu": 1.0,
    },
    {"kind": "recompute", "tokens": 2048, "seconds": [0.2]},
    {"kind": "restore", "tier": "pinned", "tokens": 2048, "bytes": 9, "seconds": [0.01], "equal": True},
    {
        "kind": "session", "tier": "host", "undisturbed": [[1], [2]], "killed": [[1], [2]], "sources": SOURCES,
        "first_token_s": 0.1,
    },
]  # fmt: skip


def changed(kind, **fields):
    return [{**line, **fields} if line["kind"] == kind else line for line in GREEN]


def test_the_figures_of_a_good_run():
    figure = gpu_figures.figures(GREEN)
    assert gpu_figures.is_green(figure)
    assert gpu_figures.misses(GREEN) == []
    assert figure["copy_gb_s"] == 2000
    assert figure["of_copy"] == {
        "merge splits": 0.5, "copy_pages gather": 0.962, "paged_decode bf16 16 x 8192": 0.833
    }  # fmt: skip
    assert figure["steps_ms"] == {"8": {"eager": 2.0, "graph": 1.0}}
    assert figure["host_us"] == {"8": {"eager": 1000.0, "graph": 50.0}}
    assert figure["restore_s"] == {"2048": {"recompute": 0.2, "pinned": 0.01, "equal": True}}
    assert any("merge splits" in text for text in gpu_figures.report(GREEN))


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (changed("check", worst=2e-2), "merge (splits): an error of 2.00e-02"),
        (changed("check", worst=float("nan")), "merge (splits): an error of nan"),
        (changed("logits", worst=0.5), "logits are not those of the CPU"),
        (changed("logits", token=4), "logits are not those of the CPU"),
        (changed("restore", equal=False), "2048 tokens give other logits"),
        (changed("session", killed=[[1], [3]]), "did not go on as one that was not"),
        (changed("session", sources={**SOURCES, "host": 0}), "did not go on as one that was not"),
        (changed("bits", pages=False), "a token decoded has other bits"),
        (changed("moved", seconds=[57e-5]), "copy_pages gather moves bytes at 0.877"),
        (changed("moved", seconds=[64e-5]), "paged_decode bf16 16 x 8192 moves bytes at 0.781"),
        (changed("step", host_seconds=[5e-5]), "a replayed step of 8 takes 50.0 us of the host, an eager one 50.0"),
        ([line for line in GREEN if line["kind"] != "session"], "the run left no session"),
        ([*GREEN, {"kind": "failed", "what": "decode", "error": "x"}], "decode failed: x"),
        ([*GREEN, {"kind": "skipped", "what": "restore 4096", "reason": "late"}], "restore 4096 was left out"),
    ],
)
def test_what_is_wrong_turns_a_run_red_in_a_sentence(lines, sentence):
    assert [miss for miss in gpu_figures.misses(lines) if sentence in miss]
    assert not gpu_figures.is_green(gpu_figures.figures(lines))


def test_a_token_may_differ_where_the_cpu_is_as_good_as_undecided():
    assert gpu_figures.misses(changed("logits", token=4, lead_cpu=0.015)) == []


def test_unsealed_evidence_is_red():
    assert not gpu_figures.is_green(gpu_figures.figures(GREEN, sealed=False))
    assert gpu_figures.misses(GREEN, sealed=False) == ["the evidence is not what was measured"]


def test_a_part_that_fails_or_comes_too_late_leaves_a_line_and_the_rest_goes_on():
    course = Course(dry=True, budget_s=100.0)
    course.part("sums", 0.0, lambda: [1][2])
    course.part("late", 1000.0, lambda: course.say("never"))
    course.part("fine", 0.0, lambda: course.say("done"))
    assert [(line["kind"], line.get("what")) for line in course.lines] == [
        ("failed", "sums"),
        ("skipped", "late"),
        ("done", None),
    ]


def dry(*arguments):
    call = [sys.executable, "-m", "bench.gpu", "--dry", "--json", "--kernel", "merge", "--target", "sm_90", *arguments]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_dry_run_ends_with_the_gates_counts_and_its_evidence_gives_the_same_figures(tmp_path):
    parts = [part for name in ("kernels", "bits", "restore") for part in ("--part", name)]
    status, figure, said = dry("--evidence", str(tmp_path), *parts)
    assert (status, figure) == (0, {"kernels": 1, "compiled": {"sm_90": 1}, "unexplained": 0}), said
    figures = gpu_figures.figures(*evidence.read(tmp_path / "gpu.jsonl"))
    assert figures["sealed"]
    assert figures["checks"] == 2
    assert figures["bits"] == {"chunks": True, "decoded": True, "beside others": True}
    assert all(one["equal"] for one in figures["restore_s"].values())


@pytest.mark.parametrize(
    ("sabotage", "sentence"), [("wrong-kernel", "merge (splits): an error of"), ("alter", "not what was measured")]
)
def test_a_sabotage_turns_a_dry_run_red(sabotage, sentence):
    status, figure, said = dry("--part", "kernels", "--sabotage", sabotage)
    assert status == 1
    assert figure["unexplained"] > 0
    assert sentence in said


@pytest.mark.soak
def test_a_whole_dry_run_is_green():
    call = [sys.executable, "-m", "bench.gpu", "--dry", "--json"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    figure = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert figure["unexplained"] == 0
    assert set(figure["compiled"].values()) == {figure["kernels"]}


def test_without_a_gpu_it_says_so_before_anything_is_measured():
    done = subprocess.run([sys.executable, "-m", "bench.gpu"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--dry runs without a GPU" in done.stderr
