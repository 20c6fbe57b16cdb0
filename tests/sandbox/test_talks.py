"""The contract of calls with an open input, over every driver: servers that outlive whoever started them."""

from __future__ import annotations

import asyncio

import pytest

from sandbox import BlobStore, Driver, OperationFailed, Running, Sandbox, SandboxUsageError, StaleEpoch
from tests.sandbox.conftest import Make, bash, run

# Answers every line, counts its lines and keeps them in a file, and says goodbye at the end of its input.
SERVER = """
import sys
sys.stdout.write("ready\\n")
for count, line in enumerate(sys.stdin, 1):
    open("log", "a").write(line)
    sys.stdout.write(f"{count} {line.strip().upper()}\\n")
sys.stdout.write("bye\\n")
"""
ARGV = ["python3", "-c", SERVER]


async def heard(sandbox: Sandbox, key: str, until: bytes, offset: int = 0) -> bytes:
    """What the call says from `offset` on, until it has said `until`."""
    data = b""
    while until not in data:
        said = await sandbox.read(key, offset + len(data))
        assert said.data or said.result is None, said
        data += said.data
    return data


async def test_a_call_is_talked_with_line_by_line(sandbox: Sandbox) -> None:
    call = await sandbox.start("server", ARGV, stdin_open=True)
    assert await heard(sandbox, "server", b"\n") == b"ready\n"
    assert await sandbox.write("server", b"one\n")
    assert await heard(sandbox, "server", b"\n", 6) == b"1 ONE\n"
    assert await sandbox.write("server", b"two\n")
    assert await heard(sandbox, "server", b"\n", 12) == b"2 TWO\n"
    await sandbox.close_stdin("server")
    await sandbox.close_stdin("server")
    assert (await call.result()).ok
    last = await sandbox.read("server", 18)
    assert last.data == b"bye\n"
    assert last.result is not None
    assert last.result.ok
    with pytest.raises(OperationFailed, match="closed"):
        await sandbox.write("server", b"three\n")


async def test_a_reader_waits_for_what_is_not_said_yet_and_others_are_served_meanwhile(sandbox: Sandbox) -> None:
    await sandbox.start("server", ARGV, stdin_open=True)
    await heard(sandbox, "server", b"ready\n")
    waiting = asyncio.create_task(sandbox.read("server", 6))
    assert (await bash(sandbox, "echo beside")).output == b"beside\n"
    assert not waiting.done()
    await sandbox.write("server", b"now\n")
    assert (await waiting).data == b"1 NOW\n"


async def test_an_input_of_many_pipes_full_arrives_whole_and_in_order(sandbox: Sandbox) -> None:
    call = await sandbox.start("sum", ["sha256sum"], stdin_open=True)
    parts = [bytes([number]) * 300_000 for number in range(12)]
    for part in parts:
        await sandbox.write("sum", part)
    await sandbox.close_stdin("sum")
    await call.result()
    whole = await run(sandbox, "sha256sum", stdin=b"".join(parts))
    assert (await sandbox.read("sum", 0)).data == whole.output


async def test_a_server_outlives_its_node_and_is_found_again_at_a_higher_epoch(driver: Driver, make: Make) -> None:
    handle, first = await make(epoch=1)
    await first.start("server", ARGV, stdin_open=True)
    await first.write("server", b"one\n", once="a")
    await heard(first, "server", b"ONE\n")
    await first.close()
    second = await driver.attach(handle, epoch=2)
    assert isinstance(await second.lookup("server"), Running)
    await second.start("server", ARGV, stdin_open=True)
    assert await second.wrote("server", "a")
    assert not await second.write("server", b"one\n", once="a")
    assert await second.write("server", b"two\n", once="b")
    assert await heard(second, "server", b"TWO\n", 6) == b"1 ONE\n2 TWO\n"
    assert await second.get("log") == b"one\ntwo\n"
    await second.close()


async def test_an_older_epoch_can_neither_write_nor_read(driver: Driver, make: Make) -> None:
    handle, old = await make(epoch=1)
    await old.start("server", ARGV, stdin_open=True)
    new = await driver.attach(handle, epoch=2)
    for operation in (old.write("server", b"x\n"), old.read("server", 0), old.close_stdin("server")):
        with pytest.raises(StaleEpoch):
            await operation
    await new.close()


async def test_a_server_that_never_stops_talking_keeps_its_last_bytes_and_says_where_they_begin(
    sandbox: Sandbox,
) -> None:
    await sandbox.start("loud", ["bash", "-c", "seq 1 200000; read"], stdin_open=True, output_bytes=4096)
    end = 0
    while end < 1_288_895:  # what seq says in all
        end = (await sandbox.read("loud", end)).end
    said = await sandbox.read("loud", 0)
    assert said.offset == end - 4096
    assert said.data.endswith(b"199999\n200000\n")
    assert len(said.data) == 4096


async def test_a_snapshot_freezes_a_server_and_kills_nothing(sandbox: Sandbox, store: BlobStore) -> None:
    await sandbox.start("server", ARGV, stdin_open=True)
    await sandbox.write("server", b"one\n")
    await heard(sandbox, "server", b"ONE\n")
    first = await sandbox.snapshot(store)
    await sandbox.write("server", b"two\n")
    assert await heard(sandbox, "server", b"TWO\n", 6) == b"1 ONE\n2 TWO\n"
    assert await sandbox.snapshot(store) != first


async def test_a_restore_says_that_a_server_is_lost(sandbox: Sandbox, store: BlobStore) -> None:
    before = await sandbox.snapshot(store)
    call = await sandbox.start("server", ARGV, stdin_open=True)
    await heard(sandbox, "server", b"ready\n")
    lost = await sandbox.restore(before, store)
    assert any("python3" in name for name in lost)
    assert (await call.result()).reason == "signal"
    over = await sandbox.read("server", 6)
    assert over.result is not None
    assert over.result.reason == "signal"
    with pytest.raises(OperationFailed, match="closed"):
        await sandbox.write("server", b"x\n")


async def test_the_end_of_a_server_reaches_whoever_waits_for_its_next_word(sandbox: Sandbox) -> None:
    await sandbox.start("server", ARGV, stdin_open=True)
    await heard(sandbox, "server", b"ready\n")
    waiting = asyncio.create_task(sandbox.read("server", 6))
    await sandbox.kill("server")
    said = await waiting
    assert said.data == b""
    assert said.result is not None
    assert said.result.reason == "signal"


async def test_only_a_call_with_an_open_input_is_talked_with(sandbox: Sandbox) -> None:
    await bash(sandbox, "true", key="k")
    for operation in (sandbox.write("k", b""), sandbox.read("k", 0), sandbox.close_stdin("none")):
        with pytest.raises(SandboxUsageError, match="open input"):
            await operation


async def ended(sandbox: Sandbox, key: str) -> bytes:
    data = b""
    while True:
        said = await sandbox.read(key, len(data))
        data += said.data
        if said.result is not None:
            return data


async def test_a_secret_is_masked_in_what_a_talk_says(sandbox: Sandbox) -> None:
    code = "import os; print('it is', os.environ['TOKEN'], flush=True); input(); print(os.environ['TOKEN'][:6], end='')"
    await sandbox.start("t", ["python3", "-c", code], stdin_open=True, secrets={"TOKEN": "hunter22"})
    assert await heard(sandbox, "t", b"\n") == b"it is ***\n"
    await sandbox.write("t", b"\n")
    assert await ended(sandbox, "t") == b"it is ***\nhunter"  # a part is not the secret
    assert b"hunter22" not in repr(await sandbox.lookup("t")).encode()


async def test_a_terminal_has_a_size_echoes_and_takes_control_characters(sandbox: Sandbox) -> None:
    await sandbox.start("t", ["bash", "--norc", "-i"], terminal=(30, 100), env={"PS1": "$ ", "TERM": "dumb"})
    await heard(sandbox, "t", b"$ ")
    size = b"python3 -c 'import os; print(*os.get_terminal_size(), os.ctermid(), os.isatty(2))'"
    await sandbox.write("t", size + b"; echo $((6 * 7))\n")
    assert b"\n100 30 /dev/tty True\r\n" in await heard(sandbox, "t", b"\n42\r\n")
    await sandbox.resize("t", 50, 132)
    await sandbox.write("t", size + b"; echo $((70 + 7))\n")
    assert b"\n132 50 " in await heard(sandbox, "t", b"\n77\r\n")
    sleeper = b'python3 -c \'import time; print("rea" + "dy"); time.sleep(1000)\'\n'
    await sandbox.write("t", sleeper)
    await heard(sandbox, "t", b"\nready\r\n")
    await sandbox.write("t", b"\x03")
    await heard(sandbox, "t", b"\nKeyboardInterrupt\r\n")
    await sandbox.write("t", b"echo code $?\n")
    await heard(sandbox, "t", b"\ncode 130\r\n")
    await sandbox.write("t", b"exit 3\n")
    await ended(sandbox, "t")
    result = await sandbox.lookup("t")
    assert (result.reason, result.code) == ("exit", 3)  # type: ignore[union-attr]


async def test_a_terminal_keeps_its_state_for_whoever_attaches_next_and_ends_as_one_tree(
    driver: Driver, make: Make
) -> None:
    handle, first = await make()
    argv = ["python3", "-q", "-i", "-c", ""]
    await first.start("repl", argv, terminal=(24, 80))
    await heard(first, "repl", b">>> ")
    await first.write("repl", b"n = 40; import subprocess; p = subprocess.Popen(['setsid', 'sleep', '1000'])\n")
    await first.close()
    second = await driver.attach(handle, epoch=2)
    call = await second.start("repl", argv, terminal=(24, 80))
    await second.write("repl", b"n + 2\n")
    await heard(second, "repl", b"\n42\r\n")
    await second.kill("repl")
    assert (await call.result()).reason == "signal"
    assert await second.killall() == []
    await second.close()


async def test_the_end_of_input_reaches_what_reads_a_terminal(sandbox: Sandbox) -> None:
    await sandbox.start("cat", ["cat"], terminal=(24, 80))
    await sandbox.write("cat", b"line\n")
    await sandbox.close_stdin("cat")
    assert await ended(sandbox, "cat") == b"line\r\nline\r\n"
    with pytest.raises(OperationFailed, match="closed"):
        await sandbox.write("cat", b"x")


async def test_only_a_terminal_has_a_size(sandbox: Sandbox) -> None:
    await sandbox.start("server", ARGV, stdin_open=True)
    with pytest.raises(SandboxUsageError, match="no terminal"):
        await sandbox.resize("server", 1, 1)


async def test_what_was_begun_since_a_write_is_killed_and_nothing_older(sandbox: Sandbox) -> None:
    await sandbox.start("sh", ["bash"], stdin_open=True)
    await sandbox.write("sh", b"sleep 1001 & echo up; echo later\n", once="first")
    await heard(sandbox, "sh", b"later\n")
    await sandbox.write("sh", b"setsid sleep 1002 & (sleep 1003) & echo two; sleep 1004; echo $?\n", once="second")
    await heard(sandbox, "sh", b"two\n", 9)
    await sandbox.kill("sh", since="second")
    assert (await heard(sandbox, "sh", b"137\n", 13)).endswith(b"137\n")
    assert sorted(name.split()[1] for name in await sandbox.killall()) == ["bash", "sleep"]
    await sandbox.start("new", ["bash"], stdin_open=True)
    with pytest.raises(SandboxUsageError, match="never written"):
        await sandbox.kill("new", since="nothing")


async def test_a_terminal_whose_input_is_closed_in_the_middle_of_a_line_ends_all_the_same(sandbox: Sandbox) -> None:
    call = await sandbox.start("k", ["cat"], terminal=(24, 80))
    await sandbox.write("k", b"half")
    await sandbox.close_stdin("k")
    assert (await call.result()).code == 0


@pytest.mark.parametrize("size", [(0, 80), (-1, 80), (24, 70_000), ("a", 80)])
async def test_a_terminal_of_no_size_is_refused_and_costs_nobody_a_connection(
    sandbox: Sandbox, size: tuple[int, int]
) -> None:
    await sandbox.start("k", ["sleep", "1000"], terminal=(24, 80))
    for refused in (sandbox.resize("k", *size), sandbox.start("other", ["true"], terminal=size)):
        with pytest.raises(SandboxUsageError, match="rows and columns"):
            await refused
    assert await sandbox.busy() == 1


async def test_a_tool_that_closes_its_terminal_before_it_ends_says_how_it_ended(sandbox: Sandbox) -> None:
    code = "import os, time; [os.close(fd) for fd in (0, 1, 2)]; time.sleep(0.1); os._exit(7)"
    call = await sandbox.start("k", ["python3", "-c", code], terminal=(24, 80))
    result = await call.result()
    assert (result.reason, result.code) == ("exit", 7)
