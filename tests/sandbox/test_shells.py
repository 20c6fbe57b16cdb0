"""The contract of the shell that stays, over every driver."""

from __future__ import annotations

import asyncio
import uuid

from sandbox import BlobStore, Driver, Ran, Sandbox, Shell
from tests.sandbox.conftest import Make, bash


async def ran(
    sandbox: Sandbox, command: str, call: str | None = None, timeout_s: float = 20, cap: int = 100_000
) -> Ran:
    return await Shell(sandbox).run(call or uuid.uuid4().hex, command, timeout_s=timeout_s, output_bytes=cap)


async def said(sandbox: Sandbox, command: str) -> bytes:
    return (await ran(sandbox, command)).result.output


async def test_what_one_command_changes_in_the_shell_the_next_one_finds(sandbox: Sandbox) -> None:
    first = await ran(sandbox, "mkdir -p a/b; cd a/b; export X=1; y=2; f() { echo f $1; }; sleep 1000 & echo began")
    assert (first.result.output, first.result.code, first.fresh, first.over) == (b"began\n", 0, True, False)
    second = await ran(sandbox, 'pwd | tail -c 5; echo $y; bash -c "echo \\$X"; f 3; jobs | grep -c sleep')
    assert second.result.output == b"/a/b\n2\n1\nf 3\n1\n"
    assert not second.fresh


async def test_a_command_s_exit_status_streams_and_missing_newline_are_told_exactly(sandbox: Sandbox) -> None:
    assert (await ran(sandbox, "echo out; echo err >&2; (exit 7)")).result.code == 7
    result = (await ran(sandbox, "printf 'no newline'; printf x >&2; false")).result
    assert (result.output, result.code, result.reason, result.ok) == (b"no newlinex", 1, "exit", False)
    assert (await ran(sandbox, "echo 'unfinished")).result.code != 0
    assert (await ran(sandbox, "true")).result.ok
    assert await said(sandbox, 'cat; read x; echo "$?"') == b"1\n"


async def test_binary_output_comes_back_byte_for_byte(sandbox: Sandbox) -> None:
    assert await said(sandbox, "printf '\\0\\0001 \\0%s\\0\\xff' abc") == b"\0\0001 \0abc\0\xff"


async def test_output_that_imitates_the_end_of_a_command_is_output(sandbox: Sandbox) -> None:
    imitation = "set; declare -p; cat /proc/$$/environ; printf '\\0000 %s\\0' \"$REPLY\"; echo; echo last; false"
    result = (await ran(sandbox, imitation)).result
    assert result.output.endswith(b"last\n")
    assert result.code == 1
    assert await said(sandbox, "echo next") == b"next\n"


async def test_a_call_runs_once_whoever_asks_and_is_found_again_by_the_next_holder(driver: Driver, make: Make) -> None:
    handle, first = await make(epoch=1)
    command = "echo x >>log; echo begun; until [ -e go ]; do sleep 0.01; done; cat log"
    waiting = asyncio.create_task(ran(first, command, "call"))
    while b"begun" not in (await first.read("shell/1", 0)).data if await first.lookup("shell/1") else True:
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await first.close()
    second = await driver.attach(handle, epoch=2)
    again = asyncio.create_task(ran(second, command, "call"))
    await second.put("go", b"")
    assert (await again).result.output == b"begun\nx\n"
    assert (await ran(second, command, "call")).result.output == b"begun\nx\n"
    assert await second.get("log") == b"x\n"
    await second.close()


async def test_a_deadline_ends_the_command_and_not_the_shell_nor_its_jobs(sandbox: Sandbox) -> None:
    await ran(sandbox, "x=kept; sleep 1001 & true")
    late = await ran(sandbox, "echo begun; setsid sleep 1002 & sleep 1003", timeout_s=0.5)
    assert (late.result.reason, late.result.output.splitlines()[0], late.over) == ("timeout", b"begun", False)
    assert (await said(sandbox, "echo $x")).endswith(b"kept\n")  # after what bash says of the dead
    assert sorted(name.split()[1] for name in await sandbox.killall()) == ["bash", "sleep"]


async def test_a_deadline_that_only_the_end_of_the_shell_can_keep_says_so(sandbox: Sandbox) -> None:
    await ran(sandbox, "x=lost")
    late = await ran(sandbox, "echo begun; while :; do :; done", timeout_s=0.5)
    assert (late.result.reason, late.result.output, late.over) == ("timeout", b"begun\n", True)
    after = await ran(sandbox, "echo [$x]")
    assert (after.result.output, after.fresh) == (b"[]\n", True)


async def test_a_command_that_ends_its_shell_says_so_and_the_next_one_begins_anew(sandbox: Sandbox) -> None:
    ended = await ran(sandbox, "echo bye; exit 3")
    assert (ended.result.output, ended.result.reason, ended.result.code, ended.over) == (b"bye\n", "exit", 3, True)
    assert (await ran(sandbox, "true")).fresh


async def test_a_shell_is_fresh_after_a_restore(sandbox: Sandbox, store: BlobStore) -> None:
    root = await sandbox.snapshot(store)
    await ran(sandbox, "x=1")
    await sandbox.restore(root, store)
    after = await ran(sandbox, "echo [$x]")
    assert (after.result.output, after.fresh) == (b"[]\n", True)


async def test_a_stopped_command_ends_and_the_shell_stays(sandbox: Sandbox) -> None:
    waiting = asyncio.create_task(ran(sandbox, "x=1; touch begun; sleep 1000", "call"))
    while not [entry for entry in await sandbox.list() if entry.name == "begun"]:
        await asyncio.sleep(0)
    await Shell(sandbox).stop("call")
    await Shell(sandbox).stop("call")
    await Shell(sandbox).stop("never begun")
    assert (await waiting).result.code == 137
    assert await said(sandbox, "echo $x") == b"1\n"


async def test_a_hundred_megabytes_are_cut_with_their_end_kept(sandbox: Sandbox) -> None:
    result = (await ran(sandbox, "head -c 30000000 /dev/zero | tr '\\0' x; echo the end", cap=64 << 10)).result
    assert result.ok
    assert result.truncated
    assert result.stdout_bytes == 30_000_008
    assert len(result.output) <= (64 << 10) + 100
    assert result.output.endswith(b"the end\n")


async def test_a_command_has_the_name_of_its_call_and_no_descriptor_of_the_shell_s_own(sandbox: Sandbox) -> None:
    assert (await ran(sandbox, "echo $TENUTO_CALL_KEY", "a/call")).result.output == b"a/call\n"
    assert (await said(sandbox, "ls /proc/self/fd")).split() == [b"0", b"1", b"2", b"3"]
    assert (await bash(sandbox, "ls /proc/self/fd")).output.split() == [b"0", b"1", b"2", b"3"]


async def test_a_word_for_a_loop_that_is_not_there_ends_the_command_and_not_the_shell(sandbox: Sandbox) -> None:
    for word in ("continue", "break", "for i in 1 2; do continue 2; done", "while :; do break 2; done"):
        one = await ran(sandbox, f"kept=yes; echo one; {word}; echo two")
        assert (one.result.output, one.result.reason, one.over) == (b"one\n", "exit", False)
        assert await said(sandbox, "echo $kept") == b"yes\n"


async def test_files_that_a_command_opens_for_the_shell_stay_open_for_the_next_one(sandbox: Sandbox) -> None:
    assert await said(sandbox, "exec 8<>eight 9>nine; echo opened >&9") == b""
    assert await said(sandbox, "echo again >&9; echo 8 >&8; cat nine eight") == b"opened\nagain\n8\n"
