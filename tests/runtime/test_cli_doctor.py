"""`tenuto doctor` where nothing answers, and how it tells what it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from runtime import bundle, deaths, up
from runtime.cli import main
from runtime.cli_doctor import lines
from runtime.errors import StartupError
from runtime.settings import Settings
from tests.engine.conftest import share_native
from tests.engine.tiny import write_tiny
from tests.runtime.processes import Events

NOBODY = "http://127.0.0.1:9"
IMPOSSIBLE = "2147483648"


def environment(home: Path) -> dict[str, str]:
    return {"TENUTO_HOME": str(home), "TENUTO_API_URL": NOBODY, "TENUTO_API_KEY": "tk_none"}


def doctor(home: Path, *words: str, **more: str) -> Result:
    return CliRunner(env=environment(home) | more).invoke(main, ["doctor", *words])


def refused(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, which it ends."""
    argv = [sys.executable, "-m", "runtime.cli", "doctor", *words]
    env = {**environment(home), "PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"]}
    return subprocess.run(argv, env=env, text=True, capture_output=True, check=False)


async def test_an_engine_that_cannot_start_is_explained_where_nothing_else_runs(tmp_path: Path):
    """Its pool is more than any machine has: a real process, as `tenuto up` starts it."""
    share_native(tmp_path)
    more = {"TENUTO_MODEL": str(write_tiny(tmp_path / "tiny.gguf")), "TENUTO_KV_TOKENS": IMPOSSIBLE}
    more["TENUTO_ENGINE_BACKEND"] = "cpu"
    settings = Settings.load(environment(tmp_path) | more)
    settings.run_dir.mkdir(parents=True)
    stack = up.Stack(settings, Events())
    try:
        with pytest.raises(StartupError, match="cannot be had"):
            await up.engine(stack)
    finally:
        await stack.close()
    found = doctor(tmp_path, "memory", "--json", **more)
    assert found.exit_code == 1
    (finding,) = json.loads(found.stdout)["findings"]
    assert (finding["name"], finding["severity"]) == ("memory.pool_too_large", "critical")
    assert finding["remedies"][0]["set"] == f"TENUTO_KV_TOKENS={finding['evidence']['fits_tokens']}"
    assert 64 < finding["evidence"]["fits_tokens"] < int(IMPOSSIBLE)
    said = doctor(tmp_path, "memory", **more).stdout
    assert "critical: memory.pool_too_large" in said
    assert "1. TENUTO_KV_TOKENS=" in said


def test_where_nothing_answers_and_nothing_ended_it_is_said_in_a_sentence(tmp_path: Path):
    found = refused(tmp_path, "pool")
    assert found.returncode == 1
    assert found.stdout == ""
    assert found.stderr.startswith("tenuto: ")


def test_a_bundle_of_what_is_here_is_written_for_its_owner_alone(tmp_path: Path):
    settings = Settings.load(environment(tmp_path))
    settings.logs_dir.mkdir()
    settings.admin_key_path.write_text("tk_0123456789abcdefghijABCDEFGHIJ01")
    (settings.logs_dir / "engine.log").write_text("cut\nfailed with tk_0123456789abcdefghijABCDEFGHIJ01\n")
    deaths.note(settings.logs_dir, "engine", served=True, status=-9, how="was ended by SIGKILL", words="none")
    out = tmp_path / "bundle.tar.gz"
    told = json.loads(doctor(tmp_path, "bundle", "--out", str(out), "--json").stdout)
    assert told["missing"]
    assert out.stat().st_mode & 0o777 == 0o600
    files = {name.removeprefix("tenuto-bundle/"): data for name, data in bundle.members(out.read_bytes())}
    assert files["logs/engine.log"] == b"failed with ***\n"
    assert json.loads(files["deaths.json"])[0]["status"] == -9
    assert json.loads(files["findings.json"])[0]["findings"][0]["name"] == "memory.killed_under_load"
    assert not [name for name, data in files.items() if b"0123456789abcdefghij" in data or b"tk_none" in data]


def test_a_bundle_that_cannot_be_written_is_a_sentence(tmp_path: Path):
    found = refused(tmp_path, "bundle", "--out", str(tmp_path / "no" / "such" / "folder"))
    assert found.returncode == 1
    assert "cannot be written: No such file or directory" in found.stderr


def test_options_of_the_whole_are_not_lost_in_front_of_a_part(tmp_path: Path):
    found = doctor(tmp_path, "--json", "memory")
    assert (found.exit_code, "behind memory" in found.stderr) == (2, True)


def test_a_report_is_told_in_lines():
    finding = {
        "name": "pool.full",
        "severity": "warning",
        "cause": "it is full",
        "evidence": {"steps": 40, "pool_used": 0.98765, "spare_bytes": 1_000_000, "said": None},
        "remedies": [{"set": "A=1", "effect": "more", "cost": "none", "gain": 1.0, "unit": "tokens"}],
    }
    told = lines({"node": "n", "part": "pool", "findings": [finding], "notes": ["looked at"], "away": None})
    assert told[2:] == [
        "    it is full",
        "    evidence: steps 40, pool_used 0.9877, spare_bytes 1,000,000, said -",
        "    1. A=1: more (costs: none)",
        "  looked at",
    ]
    fine = {"node": "n", "part": "pool", "findings": [], "notes": [], "away": None}
    assert "nothing is wrong" in lines(fine)[0]
    assert lines({**fine, "away": "it does not answer"})[0].endswith("it does not answer")
