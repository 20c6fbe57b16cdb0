"""`tenuto plan` as people type it: no server, no download, and a sentence for whatever is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from engine.capacity import PlanError, explain
from runtime.cli_plan import plan
from tests.capacity.support import CONFIGS, planned

LLAMA = str(CONFIGS / "llama-3-70b.json")
NOWHERE = {"TENUTO_API_URL": "http://127.0.0.1:1", "TENUTO_API_KEY": "k"}


def asked(*argv: str, given: bytes | None = None) -> Result:
    """What goes well: where it does not, the group would end the process of the tests."""
    return CliRunner(env=NOWHERE).invoke(plan, argv, input=given)


def told(*argv: str) -> dict[str, Any]:
    done = asked(*argv, "--json")
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def test_a_plan_is_one_json_object_or_eighty_columns_of_text() -> None:
    found = told(LLAMA, "--tp", "4", "--context", "8192", "--explain")
    assert (found["users_by_memory"], found["binding"], found["fits"]) == (54, "memory", True)
    assert [one["text"] for one in found["explain"]] == list(
        map(str, explain(planned("llama-3-70b", tp=4, context=8192)))
    )
    text = asked(LLAMA, "--tp", "4", "--explain").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "floor((80,000,000,000 * 0.9 * 4 - 141,107,412,992 - 0) / (4 * 671,088,640))" in text
    assert "\x1b" not in text


def test_times_are_understood_as_they_are_written() -> None:
    plain, short = (told(LLAMA, "--tp", "8", "--slo-tpot", one) for one in ("0.02", "20ms"))
    assert plain["max_batch_for_slo"] == short["max_batch_for_slo"]
    assert asked(LLAMA, "--slo-tpot", "fast").exit_code == 2


def test_a_config_can_be_piped() -> None:
    done = asked("-", "--json", given=Path(LLAMA).read_bytes())
    assert json.loads(done.stdout)["kv_bytes_per_token"] == 327_680


def test_a_directory_and_a_catalogue_name_are_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(Path(LLAMA).read_text())
    assert told(str(tmp_path))["model"] == tmp_path.name
    assert told("smollm2-135m-instruct", "--device", "l4")["kv_bytes_per_token"] == 23_040


def test_devices_are_listed() -> None:
    rows = [json.loads(line) for line in asked("--list-devices", "--json").stdout.splitlines()]
    assert {"h100", "mi300x"} <= {row["id"] for row in rows}
    assert "NVIDIA H100" in asked("--list-devices").stdout


def test_plots_are_put_where_they_are_wanted(tmp_path: Path) -> None:
    asked(LLAMA, "--svg", str(tmp_path / "plots"))
    assert sorted(one.name for one in (tmp_path / "plots").iterdir()) == ["break-even.svg", "roofline.svg", "users.svg"]


def test_traffic_is_judged(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(json.dumps({"input_length": 600, "output_length": 1, "timestamp": 0, "hash_ids": [1]}) + "\n")
    assert told(LLAMA, "--tp", "4", "--trace", str(trace))["trace"]["verdict"].startswith("not worth it")
    assert "Traffic" in asked(LLAMA, "--tp", "4", "--trace", str(trace)).stdout


def test_a_model_that_does_not_fit_is_told_what_would() -> None:
    done = asked(LLAMA, "--tp", "1")
    assert done.exit_code == 0
    assert "does not fit on 1 x H100: its weights alone do not; 2 would hold it" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["meta-llama/Llama-3.1-70B"],
            "curl -sL https://huggingface.co/meta-llama/Llama-3.1-70B/resolve/main/config.json",
        ),
        (["nothing.json"], "there is no file 'nothing.json'"),
        ([str(CONFIGS)], "has no config.json"),
        ([LLAMA, "--tp", "5"], "tp: 5 does not divide num_attention_heads 64; legal are 1, 2, 4"),
        ([LLAMA, "--context", "100000"], "beyond_context"),
        ([LLAMA, "--util", "nan"], "util: nan is not"),
        ([LLAMA, "--users", "-1"], "users: -1 is not"),
        ([LLAMA, "--slo-tpot", "0.01ms"], "slo_tpot_s: 0.01 ms per token cannot be met"),
        ([__file__], "it is not JSON"),
    ],
)
def test_what_is_wrong_is_a_sentence(argv: list[str], said: str) -> None:
    done = CliRunner().invoke(plan, argv)  # by itself: the group ends the process
    assert isinstance(done.exception, PlanError), done.output
    assert said in str(done.exception)


def test_no_model_is_a_wrong_command() -> None:
    assert asked().exit_code == 2


def test_an_endless_pipe_is_read_no_further_than_makes_sense() -> None:
    code = [sys.executable, "-m", "runtime.cli", "plan", "-"]
    with Path("/dev/zero").open("rb") as zeros:
        done = subprocess.run(code, stdin=zeros, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, "more than 1048576 bytes" in done.stderr) == (1, True)
