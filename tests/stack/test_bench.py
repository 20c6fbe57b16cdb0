"""The resume bench in its short form, and its sabotage: a broken promise must turn it red."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import resume

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.stack,
    pytest.mark.sandbox,
    pytest.mark.model,
]


@pytest.mark.parametrize(
    ("sabotage", "red"), [("noise", "equal"), pytest.param("repeat", "steps_repeated", marks=pytest.mark.soak)]
)
async def test_sabotage_turns_the_figure_red(stack, client, sabotage, red, tmp_path):
    sample = await resume.one_seed(stack, client, 300, 0.8, sabotage)
    figure = resume.figures([sample], [])
    assert not resume.is_green(figure)
    assert figure[red] != {"equal": 1, "steps_repeated": 0}[red]
    resume.leave_evidence(tmp_path, [sample], [])
    assert verified(tmp_path) == (1, figure)


def verified(directory: Path) -> tuple[int, dict]:
    """Exit status and figures of `bench.verify`."""
    command = [sys.executable, "-m", "bench.verify", str(directory)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.returncode, json.loads(answer.stdout)
