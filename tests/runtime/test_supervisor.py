from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

import runtime.supervisor as module
from runtime.errors import StartupError
from runtime.supervisor import Child, Supervisor
from tests.runtime.processes import PATIENCE_S, READY, SERVE, Events, is_gone, python, until_gone


@pytest.fixture
async def events() -> Events:
    return Events()


@pytest.fixture
async def supervisor(tmp_path: Path, events: Events) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "logs", events)
    yield supervisor
    await supervisor.stop()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backoffs that a test can sit through."""
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(module, "LAST_BACKOFF_S", 0.01)
    monkeypatch.setattr(module, "STOP_PATIENCE_S", 0.2)


async def test_a_child_that_is_killed_comes_back(supervisor: Supervisor, events: Events) -> None:
    await supervisor.start(python("one", SERVE))
    first = supervisor.pids["one"]
    os.kill(first, signal.SIGKILL)
    assert "SIGKILL" in (await events.wait("died", "one"))["message"]
    second = (await events.wait("started", "one", count=2))["pid"]
    assert second != first
    assert supervisor.pids == {"one": second}


async def test_start_returns_once_the_child_says_so(supervisor: Supervisor, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = f"import pathlib, time; print('hello'); pathlib.Path({str(mark)!r}).touch(); {READY} time.sleep(600)"
    await supervisor.start(python("one", code))
    assert mark.exists()


async def test_start_returns_once_the_probe_succeeds(supervisor: Supervisor) -> None:
    asked = asyncio.Event()

    async def ready() -> None:
        asked.set()

    await supervisor.start(python("one", "import time; time.sleep(600)", ready=ready))
    assert asked.is_set()


async def test_what_must_come_first_comes_before_every_start(supervisor: Supervisor, events: Events) -> None:
    order: list[str] = []

    async def before() -> None:
        order.append("before")

    await supervisor.start(python("one", SERVE, before=before))
    os.kill(supervisor.pids["one"], signal.SIGKILL)
    await events.wait("started", "one", count=2)
    assert order == ["before", "before"]


@pytest.mark.usefixtures("hasty")
async def test_backoff_doubles_and_a_hopeless_child_is_given_up_in_a_sentence(
    supervisor: Supervisor, events: Events, tmp_path: Path
) -> None:
    with pytest.raises(StartupError) as caught:
        await supervisor.start(python("one", "import sys; print('no such model', file=sys.stderr); sys.exit(3)"))
    sentence = str(caught.value)
    assert "one ended with status 3, 8 times in a row before it was ready" in sentence
    assert "no such model" in sentence
    assert str(tmp_path / "logs" / "one.log") in sentence
    waits = [round(event["restart_in_s"] * 1000) for event in events.of("died", "one")]
    assert waits == [1, 2, 4, 8, 10, 10, 10]


@pytest.mark.usefixtures("hasty")
async def test_an_error_that_a_child_words_itself_is_its_last_words(supervisor: Supervisor) -> None:
    code = 'import sys; print(\'{"error": "the file is torn"}\\nmore\', file=sys.stderr); sys.exit(1)'
    with pytest.raises(StartupError, match="its last words: the file is torn"):
        await supervisor.start(python("one", code, describe=lambda facts: "failing"))


REFUSES = 'import sys; print(\'{"error": "the file is torn"}\', file=sys.stderr); sys.exit(2)'


async def test_a_child_that_refuses_is_started_once_and_its_sentence_is_the_error(
    supervisor: Supervisor, events: Events
) -> None:
    with pytest.raises(StartupError, match=r"^the file is torn$"):
        await supervisor.start(python("one", REFUSES, describe=lambda facts: "failing"))
    assert events.of("died") == []


@pytest.mark.usefixtures("hasty")
async def test_a_child_that_served_and_refuses_when_started_again_is_tried_again(
    supervisor: Supervisor, events: Events, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    code = f"import os, sys, time\nif os.path.exists({str(full)!r}):\n {REFUSES}\n{READY} time.sleep(600)"
    await supervisor.start(python("one", code, describe=lambda facts: "failing"))
    full.touch()
    os.kill(supervisor.pids["one"], signal.SIGKILL)
    await events.wait("died", "one", count=3)
    full.unlink()
    await events.wait("started", "one", count=2)


@pytest.mark.usefixtures("hasty")
async def test_last_words_are_not_those_of_an_earlier_life(supervisor: Supervisor, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "one.log").write_text('{"error": "of yesterday"}\n')
    with pytest.raises(StartupError, match="its last words: none"):
        await supervisor.start(python("one", "import sys; sys.exit(2)"))


@pytest.mark.usefixtures("hasty")
async def test_deaths_after_it_served_do_not_count_towards_giving_up(supervisor: Supervisor, events: Events) -> None:
    await supervisor.start(python("one", f"{READY} import sys; sys.stdin.read(); import time; time.sleep(0.02)"))
    await events.wait("died", "one", count=module.GIVE_UP_AFTER + 2)


@pytest.mark.usefixtures("hasty")
async def test_a_child_that_never_gets_ready_is_ended_and_started_again(supervisor: Supervisor, events: Events) -> None:
    slow = asyncio.create_task(supervisor.start(python("one", "import time; time.sleep(600)", ready_within_s=0.05)))
    assert "was not ready within" in (await events.wait("died", "one"))["message"]
    await supervisor.stop()
    slow.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await slow


@pytest.mark.usefixtures("hasty")
async def test_a_program_that_is_not_there_is_a_sentence(supervisor: Supervisor) -> None:
    with pytest.raises(StartupError, match=r"could not be started: .*No such file"):
        await supervisor.start(Child("one", ["/no/such/program"], {}))


@pytest.mark.usefixtures("hasty")
async def test_one_that_is_given_up_later_is_told_to_whoever_waits(
    supervisor: Supervisor, events: Events, tmp_path: Path
) -> None:
    flag = tmp_path / "broken"
    code = f"import os, sys, time; os.path.exists({str(flag)!r}) and sys.exit(1); {READY} time.sleep(600)"
    await supervisor.start(python("one", code))
    flag.touch()
    os.kill(supervisor.pids["one"], signal.SIGKILL)
    with pytest.raises(StartupError, match="one ended with status 1"):
        await asyncio.wait_for(supervisor.failed(), PATIENCE_S)


async def test_progress_on_standard_error_is_passed_on_and_all_is_logged(
    supervisor: Supervisor, events: Events, tmp_path: Path
) -> None:
    code = f"import sys, time; print('{{\"done\": 3}}\\nplain', file=sys.stderr, flush=True); {READY} time.sleep(600)"
    await supervisor.start(python("one", code, describe=lambda facts: f"{facts['done']} of 9"))
    assert (await events.wait("progress", "one")) == {"done": 3, "message": "3 of 9", "name": "one"}
    await supervisor.stop()
    log = (tmp_path / "logs" / "one.log").read_text()
    assert {"plain", '{"done": 3}', '{"ready": true}'} <= set(log.splitlines())


async def test_a_log_that_has_grown_makes_room_at_the_next_start(supervisor: Supervisor, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "one.log").write_bytes(b"x" * (module.LOG_BYTES + 1))
    await supervisor.start(python("one", SERVE))
    assert (logs / "one.log").stat().st_size < 1000
    assert (logs / "one.log.1").stat().st_size > module.LOG_BYTES
    assert (logs / "one.log").stat().st_mode & 0o077 == 0


async def test_children_stop_in_reverse_order_and_none_is_left(supervisor: Supervisor, events: Events) -> None:
    for name in ("one", "two", "three"):
        await supervisor.start(python(name, SERVE))
    pids = list(supervisor.pids.values())
    await supervisor.stop()
    assert [event["name"] for event in events.of("stopping")] == ["three", "two", "one"]
    assert all(map(is_gone, pids))
    assert supervisor.pids == {}
    await supervisor.stop()


@pytest.mark.usefixtures("hasty")
async def test_a_child_that_will_not_stop_is_ended_with_all_that_it_started(
    supervisor: Supervisor, events: Events, tmp_path: Path
) -> None:
    mark = tmp_path / "grandchild"
    code = (
        "import signal, subprocess, sys, time, pathlib; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path({str(mark)!r}).write_text(str(p.pid)); {READY} time.sleep(600)"
    )
    await supervisor.start(python("one", code))
    pid = supervisor.pids["one"]
    await supervisor.stop()
    await until_gone(pid, int(mark.read_text()))


async def test_a_child_is_not_started_again_while_the_rest_stops(supervisor: Supervisor, events: Events) -> None:
    await supervisor.start(python("one", SERVE))
    os.kill(supervisor.pids["one"], signal.SIGKILL)
    await events.wait("died", "one")
    await supervisor.stop()
    assert supervisor.pids == {}
    assert len(events.of("started", "one")) == 1


async def test_the_stop_signal_is_the_childs_own(supervisor: Supervisor, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = (
        "import signal, sys, time, pathlib;"
        f"signal.signal(signal.SIGINT, lambda *_: (pathlib.Path({str(mark)!r}).touch(), sys.exit(0)));"
        f"{READY} time.sleep(600)"
    )
    await supervisor.start(python("one", code, stop_signal=signal.SIGINT))
    await supervisor.stop()
    assert mark.exists()


async def test_files_that_a_child_makes_are_private(supervisor: Supervisor, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    await supervisor.start(python("one", f"import pathlib, time; pathlib.Path({str(mark)!r}).touch(); {SERVE}"))
    assert mark.stat().st_mode & 0o077 == 0


async def test_a_task_that_runs_once_tells_its_failure(supervisor: Supervisor, tmp_path: Path) -> None:
    await supervisor.run_once(python("good", "print('done')"))
    with pytest.raises(StartupError, match="bad ended with status 2: it broke"):
        await supervisor.run_once(python("bad", "import sys; print('it broke'); sys.exit(2)"))
    with pytest.raises(StartupError, match=r"^the file is torn$"):
        await supervisor.run_once(python("bad", REFUSES))


OWNER = """
import asyncio, sys
from pathlib import Path
from runtime.supervisor import Supervisor
from tests.runtime.processes import SERVE, python
async def main():
    supervisor = Supervisor(Path(sys.argv[1]), lambda kind, **data: None)
    for name in ("one", "two"):
        await supervisor.start(python(name, SERVE))
    print(*supervisor.pids.values(), flush=True)
    await supervisor.failed()
asyncio.run(main())
"""


async def test_a_supervisor_that_is_killed_leaves_no_child(tmp_path: Path) -> None:
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, str(tmp_path)), cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    pids = [int(word) for word in (await owner.stdout.readline()).split()]
    assert len(pids) == 2
    assert all(psutil.Process(pid).ppid() == owner.pid for pid in pids)
    owner.kill()
    assert await owner.wait() == -signal.SIGKILL
    await until_gone(*pids)
