from __future__ import annotations

from pathlib import Path

import pytest

from sandbox import BadSpec, Limits, Result, SandboxSpec, Volume


@pytest.mark.parametrize(
    "wrong",
    [{"memory_bytes": 1}, {"pids": 0}, {"cpu": 0}, {"workspace_bytes": 0}, {"tmp_bytes": -1}, {"output_bytes": 0},
     {"output_bytes": 1 << 30}, {"call_timeout_s": 0}, {"cpu": float("nan")}, {"cpu": float("inf")},
     {"call_timeout_s": float("inf")}, {"pids": 10**9}, {"memory_bytes": 1 << 60}, {"workspace_bytes": 1.5},
     {"pids": True}, {"tmp_bytes": "1G"}],
)  # fmt: skip
def test_a_limit_that_cannot_be_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(BadSpec, match=next(iter(wrong))):
        Limits(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "../x", "a b", "-x", "a/b", "x" * 64, "a\n"])
def test_an_id_that_is_no_plain_name_is_refused(name: str) -> None:
    with pytest.raises(BadSpec, match="sandbox id"):
        SandboxSpec(name, "s", "t", 1)


@pytest.mark.parametrize("target", ["/work", "/mnt", "/mnt/", "/mnt/..", "/mnt/a/b", "/etc", "mnt/a", "/mnt/a,x"])
def test_a_volume_is_mounted_below_mnt_and_nowhere_else(target: str) -> None:
    with pytest.raises(BadSpec, match="volume target"):
        Volume(Path("/srv"), target)


def test_a_volume_s_source_is_absolute_and_its_target_unique() -> None:
    with pytest.raises(BadSpec, match="absolute"):
        Volume(Path("srv"), "/mnt/a")
    with pytest.raises(BadSpec, match="comma"):
        Volume(Path("/srv,readonly"), "/mnt/a")
    with pytest.raises(BadSpec, match="same target"):
        SandboxSpec("a", "s", "t", 1, volumes=(Volume(Path("/a"), "/mnt/a"), Volume(Path("/b"), "/mnt/a")))


def test_the_footprint_counts_all_that_a_sandbox_can_hold_in_memory() -> None:
    limits = Limits()
    assert limits.footprint_bytes > limits.memory_bytes + limits.workspace_bytes + limits.tmp_bytes


def test_only_an_exit_with_zero_is_a_success() -> None:
    assert Result("exit", 0, 0, 0, False, 0.0).ok
    assert not Result("exit", 1, 0, 0, False, 0.0).ok
    assert not Result("timeout", 0, 0, 0, False, 0.0).ok
