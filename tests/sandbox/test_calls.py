"""The contract of calls, over every driver."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from sandbox import Chunk, Driver, KeyConflict, Limits, Running, Sandbox, SandboxUsageError, StaleEpoch
from tests.sandbox.conftest import LIMITS, Make, bash, python, run

# A tree that a careless kill misses: a new session, a double fork, a process that ignores every polite signal.
ESCAPES = """
import os, signal, subprocess, sys, time
subprocess.Popen(["setsid", "sleep", "1000"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(1000)
    os._exit(0)
print("ready", flush=True)
"""


async def test_output_comes_as_it_is_written_and_each_stream_under_its_name(sandbox: Sandbox) -> None:
    call = await sandbox.start("k", ["bash", "-c", "echo one; read line; echo two >&2; echo three"], stdin=b"go\n")
    chunks = [chunk async for chunk in call]
    assert b"".join(chunk.data for chunk in chunks if chunk.stream == "out") == b"one\nthree\n"
    assert b"".join(chunk.data for chunk in chunks if chunk.stream == "err") == b"two\n"
    result = await call.result()
    assert (result.reason, result.code, result.ok) == ("exit", 0, True)
    assert (result.stdout_bytes, result.stderr_bytes, result.truncated) == (10, 4, False)
    assert result.output == b"".join(chunk.data for chunk in chunks)


async def test_a_chunk_arrives_while_the_call_still_runs(sandbox: Sandbox) -> None:
    call = await sandbox.start("k", ["bash", "-c", "echo early; exec sleep 1000"])
    async for chunk in call:
        assert chunk == Chunk("out", b"early\n")
        break
    assert isinstance(await sandbox.lookup("k"), Running)
    await call.kill()
    assert (await call.result()).reason == "signal"


async def test_the_exit_code_and_the_signal_are_told_apart(sandbox: Sandbox) -> None:
    assert (await bash(sandbox, "exit 7")).code == 7
    killed = await bash(sandbox, "kill -SEGV $$")
    assert (killed.reason, killed.code) == ("signal", 11)


async def test_a_program_that_is_not_there_exits_with_127_and_says_its_name(sandbox: Sandbox) -> None:
    result = await run(sandbox, "no-such-program")
    assert (result.reason, result.code) == ("exit", 127)
    assert b"no-such-program: not found" in result.output


async def test_a_tool_has_exactly_the_environment_it_was_given(sandbox: Sandbox) -> None:
    result = await run(sandbox, "env", env={"GREETING": "hello"})
    names = {line.split(b"=")[0] for line in result.output.splitlines()}
    assert b"GREETING=hello" in result.output.splitlines()
    assert names == {b"GREETING", b"PATH", b"HOME", b"TMPDIR", b"LANG", b"PYTHONDONTWRITEBYTECODE", b"PYTHONUNBUFFERED"}


async def test_a_call_starts_in_the_folder_that_was_asked_for(sandbox: Sandbox) -> None:
    await bash(sandbox, "mkdir -p a/b && touch a/b/here")
    assert (await run(sandbox, "ls", cwd="/work/a/b")).output == b"here\n"
    missing = await run(sandbox, "ls", cwd="/work/none")
    assert missing.code == 126
    assert b"none" in missing.output


async def test_standard_input_of_many_pipes_full_arrives_whole(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 12_000
    result = await run(sandbox, "sha256sum", stdin=data)
    assert result.output.split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_a_tool_that_does_not_read_its_input_still_ends(sandbox: Sandbox) -> None:
    assert (await run(sandbox, "true", stdin=b"x" * 1_000_000)).ok


async def test_binary_output_and_invalid_text_come_back_byte_for_byte(sandbox: Sandbox) -> None:
    code = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 3 + b'\\xff\\xfe\\x00')"
    assert (await python(sandbox, code)).output == bytes(range(256)) * 3 + b"\xff\xfe\x00"


async def test_a_hundred_megabytes_are_cut_at_the_source_with_a_marker_and_the_end_kept(sandbox: Sandbox) -> None:
    result = await bash(sandbox, "head -c 100000000 /dev/zero; echo the end", output_bytes=64 << 10)
    assert result.ok
    assert result.stdout_bytes == 100_000_008
    assert result.truncated
    assert len(result.output) <= (64 << 10) + 100
    assert b"bytes left out" in result.output
    assert result.output.endswith(b"the end\n")
    left_out = int(result.output.split(b"[... ")[1].split()[0])
    marker = b"\n[... %d bytes left out ...]\n" % left_out
    assert left_out + len(result.output) - len(marker) == result.stdout_bytes


async def test_output_without_end_is_stopped_by_the_timeout_and_capped(sandbox: Sandbox) -> None:
    result = await run(sandbox, "yes", timeout_s=0.5)
    assert result.reason == "timeout"
    assert result.truncated
    assert len(result.output) <= LIMITS.output_bytes + 100


async def test_a_timeout_kills_the_whole_tree_new_sessions_and_double_forks_included(sandbox: Sandbox) -> None:
    call = await sandbox.start("k", ["python3", "-c", ESCAPES + "time.sleep(1000)"], timeout_s=1)
    assert (await call.result()).reason == "timeout"
    assert await sandbox.killall() == []


async def test_killing_a_call_kills_its_tree_and_no_other_call(sandbox: Sandbox) -> None:
    other = await sandbox.start("other", ["bash", "-c", "echo up; read line; echo done"], stdin=b"")
    doomed = await sandbox.start("doomed", ["python3", "-c", ESCAPES + "time.sleep(1000)"])
    bystander = await sandbox.start("bystander", ["sleep", "1000"])
    async for _ in doomed:
        break
    await sandbox.kill("doomed")
    assert (await doomed.result()).reason == "signal"
    assert (await other.result()).ok
    assert len(await sandbox.killall()) == 1
    assert (await bystander.result()).reason == "signal"


async def test_what_a_call_was_to_leave_running_lives_on_and_dies_with_the_call_s_key(
    sandbox: Sandbox,
) -> None:
    result = await python(sandbox, ESCAPES, key="k", keep_background=True)
    assert result.ok
    assert result.output == b"ready\n"
    assert result.background in (2, 3)  # the one in between of a double fork may not be gone yet
    await sandbox.kill("k")
    assert await sandbox.killall() == []


async def test_what_a_call_leaves_in_the_background_unasked_is_over_when_the_call_is(sandbox: Sandbox) -> None:
    await sandbox.start("other", ["sleep", "1000"])
    result = await python(sandbox, ESCAPES)
    assert result.ok
    assert result.output == b"ready\n"
    assert result.background in (2, 3)  # the one in between of a double fork may not be gone yet
    assert [name.split()[1] for name in await sandbox.killall()] == ["sleep"]
    assert (await bash(sandbox, "true")).background == 0


async def test_a_background_process_that_holds_the_output_does_not_hold_the_call(sandbox: Sandbox) -> None:
    noise = "(while sleep 0.01; do echo noise; done) & echo done"
    result = await bash(sandbox, noise, keep_background=True)
    assert result.ok
    assert result.output.startswith(b"done\n")
    assert len(await sandbox.killall()) >= 1


async def test_a_key_never_runs_twice(sandbox: Sandbox) -> None:
    for _ in range(3):
        result = await bash(sandbox, "echo x >>log; cat log", key="once")
        assert result.output == b"x\n"
    assert await sandbox.get("log") == b"x\n"


async def test_two_starts_of_one_key_at_the_same_time_follow_one_run(sandbox: Sandbox) -> None:
    calls = await asyncio.gather(
        *(sandbox.start("once", ["bash", "-c", "echo x >>log; echo said; sleep 0.2; cat log"]) for _ in range(5))
    )
    assert {(await call.result()).output for call in calls} == {b"said\nx\n"}


async def test_a_key_with_another_command_is_refused(sandbox: Sandbox) -> None:
    await bash(sandbox, "true", key="k")
    with pytest.raises(KeyConflict, match="another command"):
        await bash(sandbox, "false", key="k")
    with pytest.raises(KeyConflict):
        await bash(sandbox, "true", key="k", stdin=b"other input")


async def test_the_journal_knows_what_ran_what_runs_and_what_never_started(sandbox: Sandbox) -> None:
    done = await bash(sandbox, "echo out; exit 3", key="done")
    call = await sandbox.start("now", ["bash", "-c", "echo begun; exec sleep 1000"])
    async for _ in call:
        break
    assert await sandbox.lookup("done") == done
    running = await sandbox.lookup("now")
    assert isinstance(running, Running)
    assert running.output == b"begun\n"
    assert running.argv[0] == "bash"
    assert await sandbox.lookup("never") is None
    await call.kill()


async def test_a_second_connection_follows_a_running_call_from_its_first_byte(driver: Driver, make: Make) -> None:
    handle, first = await make()
    argv = ["bash", "-c", "echo one; while [ ! -e go ]; do sleep 0.01; done; echo two"]
    call = await first.start("k", argv)
    async for _ in call:
        break
    await first.close()
    second = await driver.attach(handle)
    again = await second.start("k", argv)
    await second.put("go", b"")
    assert (await again.result()).output == b"one\ntwo\n"
    await second.close()


async def test_closing_the_connection_ends_the_waiting_for_a_call_but_not_the_call(driver: Driver, make: Make) -> None:
    handle, first = await make()
    argv = ["bash", "-c", "echo begun; while [ ! -e go ]; do sleep 0.01; done; echo done"]
    call = await first.start("k", argv)
    async for _ in call:
        break
    await first.close()
    with pytest.raises(SandboxUsageError, match="attach again"):
        await call.result()
    second = await driver.attach(handle)
    assert isinstance(await second.lookup("k"), Running)
    await second.put("go", b"")
    assert (await (await second.start("k", argv)).result()).output == b"begun\ndone\n"
    await second.close()


async def test_a_call_goes_on_after_its_connection_broke_and_nothing_is_repeated_or_lost(make: Make) -> None:
    _, sandbox = await make()
    call = await sandbox.start("k", ["bash", "-c", "echo one; while [ ! -e go ]; do sleep 0.01; done; echo two"])
    chunks = []
    async for chunk in call:
        chunks.append(chunk.data)
        if chunk.data == b"one\n":
            link = sandbox._channel.link
            assert link is not None
            link.writer.transport.abort()
            await sandbox.put("go", b"")
    assert b"".join(chunks) == b"one\ntwo\n"
    assert (await call.result()).ok


async def test_an_operation_of_a_lower_epoch_is_refused_and_a_higher_one_takes_over(driver: Driver, make: Make) -> None:
    handle, old = await make(epoch=3)
    new = await driver.attach(handle, epoch=4)
    with pytest.raises(StaleEpoch, match="epoch 3 is over"):
        await old.start("k", ["true"])
    for operation in (old.killall(), old.put("f", b""), old.get("f"), old.list(), old.lookup("k"), old.kill("k")):
        with pytest.raises(StaleEpoch):
            await operation
    with pytest.raises(StaleEpoch):
        await driver.attach(handle)
    assert (await run(new, "true")).ok
    await new.close()


async def test_concurrent_calls_do_not_mix_their_output(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(bash(sandbox, f"for i in 1 2 3; do echo {n}; done") for n in range(8)))
    assert [result.output for result in results] == [f"{n}\n{n}\n{n}\n".encode() for n in range(8)]


async def test_a_tool_that_fills_memory_is_stopped_with_the_reason_and_the_agent_lives(sandbox: Sandbox) -> None:
    result = await python(sandbox, "held = []\nwhile len(held) < 60: held.append(bytearray(10_000_000))")
    assert result.reason == "oom"
    assert (await bash(sandbox, "echo alive")).output == b"alive\n"


async def test_memory_held_by_a_child_counts_too(sandbox: Sandbox) -> None:
    code = "held = []\nwhile len(held) < 60: held.append(bytearray(10_000_000))"
    result = await bash(sandbox, f"python3 -c '{code}' & wait $!; exit $?")
    assert result.reason == "oom"


async def test_a_shepherd_killed_by_its_tool_leaves_no_strays(sandbox: Sandbox) -> None:
    code = """
import os, subprocess, signal, time
subprocess.Popen(["setsid", "sleep", "1000"])
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(1000)
"""
    result = await python(sandbox, code)
    assert result.reason == "signal"
    assert await sandbox.killall() == []
    assert (await bash(sandbox, "echo alive")).output == b"alive\n"


async def test_a_shepherd_stopped_by_its_tool_cannot_hold_the_call_beyond_its_end(sandbox: Sandbox) -> None:
    code = "import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(1000)"
    assert (await python(sandbox, code, timeout_s=0.5)).reason == "timeout"
    call = await sandbox.start("k", ["python3", "-c", "print('up', flush=True)\n" + code])
    async for _ in call:
        break
    await sandbox.killall()
    assert (await call.result()).reason == "signal"


async def test_no_kill_comes_between_the_start_of_a_call_and_its_tool(sandbox: Sandbox) -> None:
    for n in range(20):
        call = await sandbox.start(f"k{n}", ["sleep", "1000"])
        assert len(await sandbox.killall()) == 1
        assert (await call.result()).reason == "signal"


async def test_an_empty_command_and_a_nul_are_refused_before_anything_starts(sandbox: Sandbox) -> None:
    for argv in ([], [""], ["a\0b"]):
        with pytest.raises(SandboxUsageError):
            await sandbox.start("k", argv)
    assert await sandbox.lookup("k") is None


async def test_a_sandbox_that_dies_during_a_call_ends_it_as_lost(driver: Driver, make: Make) -> None:
    handle, sandbox = await make()
    call = await sandbox.start("k", ["bash", "-c", "echo begun; exec sleep 1000"])
    async for _ in call:
        break
    await driver.release(handle)
    result = await call.result()
    assert (result.reason, result.code, result.output) == ("lost", None, b"begun\n")


async def test_limits_of_a_call_override_those_of_the_sandbox(make: Make) -> None:
    _, sandbox = await make(limits=Limits(call_timeout_s=0.3, output_bytes=100))
    assert (await run(sandbox, "sleep", "1000")).reason == "timeout"
    assert (await bash(sandbox, "head -c 1000 /dev/zero")).truncated
    assert not (await bash(sandbox, "head -c 1000 /dev/zero", timeout_s=30, output_bytes=2000)).truncated


LEAK = """
import base64, os, sys, time
value = os.environ["TOKEN"]
for out in (sys.stdout, sys.stderr):
    for piece in (value[:3], value[3:7], value[7:], "|", base64.b64encode(b"x" + value.encode()).decode(), "\\n"):
        out.write(piece)
        out.flush()
        time.sleep(0.01)
"""


async def test_a_secret_of_a_call_is_in_its_environment_and_in_nothing_that_it_says(
    driver: Driver, make: Make, tmp_path: Path
) -> None:
    handle, sandbox = await make()
    secret = "hunter22-and-more"
    argv = ["python3", "-c", LEAK + "\nassert len(value) == 17", secret]
    call = await sandbox.start("k", argv, secrets={"TOKEN": secret})
    chunks = [chunk async for chunk in call]
    result = await call.result()
    assert result.ok, result
    for stream in ("out", "err"):
        said = b"".join(chunk.data for chunk in chunks if chunk.stream == stream)
        assert said.startswith(b"***|")
        assert said.count(b"***") == 2
    running = await sandbox.start("running", ["python3", "-c", "input()", secret], secrets={"TOKEN": secret})
    found = await sandbox.lookup("running")
    assert isinstance(found, Running)
    assert found.argv[-1] == "***"
    for text in (result.output, repr(found).encode(), repr(await sandbox.lookup("k")).encode()):
        assert secret.encode() not in text
        assert b"nter22-and" not in text
    assert (await running.result()).code == 1
    names = (await run(sandbox, "env")).output
    assert b"TOKEN" not in names
    kept = [path for path in Path(handle.socket).parent.rglob("*") if path.is_file()]
    assert not any(secret.encode() in path.read_bytes() for path in kept)
    with pytest.raises(KeyConflict):
        await sandbox.start("k", argv, secrets={"TOKEN": "another-value"})
    assert await (await sandbox.start("k", argv, secrets={"TOKEN": secret})).result() == result


async def test_a_secret_is_masked_where_the_output_is_cut_and_counted_as_it_is_shown(sandbox: Sandbox) -> None:
    code = "import os\nfor n in range(20000): print(os.environ['TOKEN'], end='')"
    result = await python(sandbox, code, secrets={"TOKEN": "0123456789"}, output_bytes=4096)
    assert result.stdout_bytes == 60_000
    assert set(result.output.replace(b"\n[... %d bytes left out ...]\n" % (60_000 - 4096), b"")) == {ord("*")}


async def test_a_secret_too_short_to_be_masked_is_refused(sandbox: Sandbox) -> None:
    for value in ("abc", " a ", ""):
        with pytest.raises(SandboxUsageError, match="'TOKEN' is shorter than 4"):
            await run(sandbox, "true", key="k", secrets={"TOKEN": value})
    assert await sandbox.lookup("k") is None


BAD = {
    "a folder": (["./folder"], 126, "Permission denied"),
    "a file that is not executable": (["./plain"], 126, "Permission denied"),
    "a script whose interpreter is missing": (["./script"], 127, "not found"),
    "a script that says no interpreter": (["./bare"], 126, "Exec format error"),
    "a name that is too long": (["x" * 300], 126, "File name too long"),
    "a word of 200,000 bytes": (["echo", "x" * 200_000], 126, "Argument list too long"),
}


async def test_a_bad_command_says_why_and_its_key_is_used(sandbox: Sandbox) -> None:
    made = "mkdir folder; touch plain; printf '#!/no/such\\n' > script; printf 'echo x\\n' > bare; chmod +x script bare"
    await bash(sandbox, made)
    for what, (argv, code, says) in BAD.items():
        result = await run(sandbox, *argv, key=what)
        assert (result.reason, result.code) == ("exit", code), what
        assert says in result.output.decode(), what
        assert await sandbox.lookup(what) == result
        with pytest.raises(KeyConflict):
            await run(sandbox, "true", key=what)
    assert (await bash(sandbox, "echo alive")).output == b"alive\n"


async def test_a_folder_to_start_in_that_is_none_says_so(sandbox: Sandbox) -> None:
    await sandbox.put("file", b"")
    for cwd, says in (("/work/file", b"such"), ("/work/none", b"no such directory"), ("/work/" + "d" * 300, b"such")):
        result = await run(sandbox, "true", cwd=cwd)
        assert result.code == 126, cwd
        assert result.output.strip(), cwd
        assert says in result.output or b"Not a directory" in result.output or b"too long" in result.output


async def test_an_environment_that_is_too_large_is_told_or_refused_and_a_wrong_one_refused(sandbox: Sandbox) -> None:
    result = await run(sandbox, "true", env={"X": "x" * 200_000})
    assert (result.code, b"Argument list too long" in result.output) == (126, True)
    for env, says in (({"X": "x" * 2_000_000}, "put it in a file"), ({"A=B": "1"}, "="), ({"A": "a\0b"}, "NUL")):
        with pytest.raises(SandboxUsageError, match=says):
            await run(sandbox, "true", key="k", env=env)
    assert await sandbox.lookup("k") is None


@pytest.mark.isolated
async def test_a_tool_that_kills_whatever_it_can_has_run_once(sandbox: Sandbox) -> None:
    for _ in range(25):
        result = await bash(sandbox, "echo x >>ran; kill -9 -1")
        assert (result.reason, result.code) == ("signal", 9)
    assert await sandbox.get("ran") == b"x\n" * 25
