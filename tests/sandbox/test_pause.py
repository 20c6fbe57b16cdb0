"""Pausing: everything stands still for everybody, and goes on as if no time had passed."""

from __future__ import annotations

import asyncio
import os
import signal

from sandbox import BlobStore, Driver
from tests.sandbox.conftest import Make, bash

COUNT = "i=0; while :; do i=$((i+1)); echo $i >count; sleep 0.005; done"


async def test_a_paused_call_stands_still_and_goes_on_where_it_was(make: Make) -> None:
    _, sandbox = await make()
    call = await sandbox.start("k", ["bash", "-c", COUNT])
    while not any(entry.name == "count" for entry in await sandbox.list()):
        await asyncio.sleep(0.01)
    assert await sandbox.pause() >= 1
    assert await sandbox.pause() == 0
    first = await sandbox.get("count")
    await asyncio.sleep(0.1)
    assert await sandbox.get("count") == first
    await sandbox.resume()
    await sandbox.resume()
    while await sandbox.get("count") in (first, b""):
        await asyncio.sleep(0.01)
    await call.kill()
    assert (await call.result()).reason == "signal"


async def test_no_deadline_passes_while_a_call_is_paused(make: Make) -> None:
    _, sandbox = await make()
    call = await sandbox.start("k", ["bash", "-c", "read line; echo $line"], timeout_s=0.6, stdin_open=True)
    await sandbox.pause()
    await asyncio.sleep(0.8)
    await sandbox.write("k", b"in time\n")
    await sandbox.resume()
    result = await call.result()
    assert (result.reason, result.code) == ("exit", 0)
    assert (await sandbox.read("k", 0)).data == b"in time\n"


async def test_a_call_that_starts_during_a_pause_begins_when_it_is_over(driver: Driver, make: Make) -> None:
    handle, sandbox = await make()
    await sandbox.pause()
    other = await driver.attach(handle)
    late = asyncio.create_task(bash(other, "echo late"))
    await asyncio.sleep(0.05)
    assert await sandbox.busy() == 0
    assert not late.done()
    await sandbox.resume()
    assert (await late).output == b"late\n"
    await other.close()


async def test_a_pause_outlives_its_connection_and_a_snapshot_leaves_it_as_it_is(
    driver: Driver, make: Make, store: BlobStore
) -> None:
    handle, sandbox = await make()
    call = await sandbox.start("k", ["bash", "-c", COUNT])
    while not any(entry.name == "count" for entry in await sandbox.list()):
        await asyncio.sleep(0.01)
    await sandbox.pause()
    other = await driver.attach(handle)
    await other.snapshot(store)
    first = await other.get("count")
    await asyncio.sleep(0.1)
    assert await other.get("count") == first
    await other.kill("k")
    assert (await call.result()).reason == "signal"
    await other.resume()
    await other.close()


async def test_a_connection_that_ends_while_its_start_waits_is_nobody_else_s_affair(driver: Driver, make: Make) -> None:
    handle, sandbox = await make()
    await sandbox.pause()
    first, second = await driver.attach(handle), await driver.attach(handle)
    waiting = [asyncio.create_task(bash(each, "echo begun", timeout_s=20)) for each in (first, second)]
    for each in (first, second):
        await each.busy()  # its start has come before
    os.kill(handle.pid, signal.SIGSTOP)
    resumed = asyncio.create_task(sandbox.resume())
    await asyncio.sleep(0.05)
    await first.close()  # after the word to go on, which the agent has not read yet
    os.kill(handle.pid, signal.SIGCONT)
    await resumed
    assert (await waiting[1]).output == b"begun\n"
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    await second.close()
