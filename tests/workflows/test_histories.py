"""What real sessions did replays with the workflow code as it is now."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer

from tests.workflows.record import HISTORIES, SCENES
from workflows.session import SessionWorkflow


def test_every_scene_was_recorded():
    assert {path.name.removesuffix(".json.gz") for path in HISTORIES.iterdir()} == set(SCENES)


@pytest.mark.parametrize("path", sorted(HISTORIES.glob("*.json.gz")), ids=lambda path: path.name.partition(".")[0])
async def test_a_recorded_session_replays(path: Path):
    name = path.name.partition(".")[0]
    history = WorkflowHistory.from_json(f"session/{name}", gzip.decompress(path.read_bytes()).decode())
    await Replayer(workflows=[SessionWorkflow]).replay_workflow(history)
