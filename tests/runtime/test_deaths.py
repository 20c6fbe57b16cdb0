"""How a process last ended, told at the start and under load apart."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from engine import doctor as engine_doctor
from runtime import deaths, doctor
from runtime.errors import StartupError
from runtime.settings import Settings
from runtime.supervisor import Child, Supervisor
from tests.runtime.processes import SERVE, Events, python


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.load({}, {"TENUTO_HOME": str(tmp_path), "TENUTO_MODEL": str(tmp_path / "none.gguf")})


def reports(settings: Settings, why: str = "nothing answers") -> list[str]:
    found = doctor.reports(doctor.of_silence(settings, "node-1", why), "memory")
    return [finding["name"] for report in found for finding in report["findings"]]


async def test_a_child_that_refuses_to_start_is_remembered_with_its_words(settings: Settings):
    supervisor = Supervisor(settings.logs_dir, Events())
    refuse = "import json, sys; print(json.dumps({'error': 'no such model'}), file=sys.stderr); sys.exit(2)"
    with pytest.raises(StartupError, match="no such model"):
        await supervisor.start(Child("engine", [sys.executable, "-c", refuse], dict(os.environ)))
    await supervisor.stop()
    death = deaths.last(settings.logs_dir, "engine")
    assert death is not None
    assert (death.served, death.status, death.words) == (False, 2, "no such model")
    assert 0 <= death.age_s < 60
    assert reports(settings) == ["memory.start_failed"]


async def test_a_child_that_is_killed_while_it_serves_is_remembered_as_such(settings: Settings):
    events = Events()
    supervisor = Supervisor(settings.logs_dir, events)
    await supervisor.start(python("engine", SERVE))
    os.kill(supervisor.pids["engine"], signal.SIGKILL)
    await events.wait("started", "engine", count=2)
    await supervisor.stop()
    death = deaths.last(settings.logs_dir, "engine")
    assert death is not None
    assert (death.served, death.status) == (True, -9)
    assert reports(settings) == ["memory.killed_under_load"]


async def test_a_child_that_is_stopped_leaves_no_record(settings: Settings):
    supervisor = Supervisor(settings.logs_dir, Events())
    await supervisor.start(python("engine", SERVE))
    await supervisor.stop()
    assert deaths.last(settings.logs_dir, "engine") is None
    assert reports(settings) == []


ODD = {"name": "engine", "served": True, "status": -9, "how": "", "words": ""}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"name": "engine"}', "null"),
        *(
            json.dumps({**ODD, "at": at})
            for at in ("yesterday", 12, None, "2026-01-01T00:00:00", "9999-01-01T00:00:00Z")
        ),
    ],
)
def test_a_record_that_is_none_is_no_record(settings: Settings, text: str):
    settings.logs_dir.mkdir()
    (settings.logs_dir / "engine.death.json").write_text(text)
    assert deaths.last(settings.logs_dir, "engine") is None


def test_a_node_that_is_not_of_this_home_is_told_by_what_is_known(settings: Settings):
    figures = doctor.of_silence(settings, "elsewhere", "it is down")
    (report,) = engine_doctor.examine(figures, "memory")
    assert (report.notes, report.away) == ((), "the engine does not answer: it is down")
