"""Sandboxes kept ready: how many, for whom, and that none of them is ever lost or shared."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox import (
    BadSpec,
    BlobStore,
    Budget,
    CreateFailed,
    Driver,
    Handle,
    Limits,
    Pool,
    SandboxSpec,
    StaleEpoch,
    Volume,
    snapshots,
)
from sandbox.budget import spares
from tests.sandbox.conftest import LIMITS, bash

ALWAYS = Budget(cold_start_s=0.0, most=3)  # no start is fast enough, so spares are kept
PATTERN = SandboxSpec("pattern", "pattern", "pattern", 0, LIMITS)


def spec(name: str, epoch: int = 1, limits: Limits = LIMITS) -> SandboxSpec:
    return SandboxSpec(name, f"session-{name}", f"tenant-{name}", epoch, limits)


class Book:
    def __init__(self) -> None:
        self.names: set[str] = set()

    async def announce(self, sandbox_id: str) -> None:
        self.names.add(sandbox_id)

    async def withdraw(self, sandbox_id: str) -> None:
        self.names.discard(sandbox_id)


@contextlib.asynccontextmanager
async def filled(pool: Pool, ready: int) -> AsyncIterator[Pool]:
    async with pool:
        await until(pool, ready)
        yield pool


async def until(pool: Pool, ready: int) -> None:
    async with asyncio.timeout(60):
        while pool.figures().ready < ready:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("rate_hz", "start_s", "count"),
    [(0.5, 0.4, 4), (1, 0.4, 4), (2, 0.4, 6), (4, 0.4, 8), (0.5, 1, 5), (1, 1, 6), (2, 1, 9), (4, 1, 12)],
)
def test_the_number_of_spares_is_the_poisson_tail_s(rate_hz: float, start_s: float, count: int) -> None:
    assert spares(rate_hz, start_s, 0.001) == count


def test_one_spare_meets_the_first_claim() -> None:
    assert spares(0, 1, 0.001) == 1


@pytest.mark.parametrize("wrong", [{"miss": 0.0}, {"miss": 1.0}, {"cold_start_s": -1.0}, {"most": -1}])
def test_a_budget_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadSpec):
        Budget(**wrong)  # type: ignore[arg-type]


async def test_a_claim_takes_a_spare_that_is_empty_answers_to_its_new_owner_and_to_nobody_else(
    driver: Driver, store: BlobStore
) -> None:
    book = Book()
    async with filled(Pool(driver, PATTERN, ALWAYS, book), 1) as pool:
        (spare,) = pool.spares()
        handle, sandbox, ready = await pool.claim(spec("a", epoch=7))
        assert ready
        assert (handle.sandbox_id, handle.session_id, handle.epoch) == (spare, "session-a", 7)
        assert (await bash(sandbox, "echo mine; ls -A")).output == b"mine\n"
        assert await sandbox.snapshot(store) == snapshots.pack([])[0]
        with pytest.raises(StaleEpoch):
            await driver.attach(replace(handle, epoch=0))
        again = await driver.attach(Handle.from_json(handle.to_json()))
        await again.close()
        assert spare in book.names  # until its owner has written it down
        assert (pool.figures().claims, pool.figures().misses) == (1, 0)
        await sandbox.close()
        await driver.release(handle)


async def test_a_claimed_spare_is_replaced_and_closing_leaves_no_spare(driver: Driver) -> None:
    book = Book()
    async with filled(Pool(driver, PATTERN, ALWAYS, book), 1) as pool:
        handle, sandbox, _ = await pool.claim(spec("a"))
        await until(pool, 1)
        await sandbox.close()
    assert await driver.found() == [handle.sandbox_id]
    assert book.names == {handle.sandbox_id}
    assert pool.figures().ready == 0


async def test_an_empty_pool_starts_the_sandbox_that_was_asked_for_and_counts_a_miss(driver: Driver) -> None:
    async with Pool(driver, PATTERN, Budget(most=0)) as pool:
        handle, sandbox, ready = await pool.claim(spec("asked"))
        assert (ready, handle.sandbox_id) == (False, "asked")
        assert (pool.figures().claims, pool.figures().misses) == (1, 1)
        await sandbox.close()


async def test_a_spare_that_died_is_passed_over_and_nothing_of_it_stays(driver: Driver) -> None:
    async with filled(Pool(driver, PATTERN, ALWAYS), 1) as pool:
        (spare,) = pool.spares()
        shelf = next(iter(pool._shelves.values()))
        os.kill(shelf.ready[0][0].pid, signal.SIGKILL)
        handle, sandbox, _ = await pool.claim(spec("a"))
        assert handle.sandbox_id != spare
        assert (await bash(sandbox, "echo alive")).output == b"alive\n"
        await sandbox.close()
    assert await driver.found() == [handle.sandbox_id]


async def test_other_limits_are_not_met_by_a_spare_of_these_and_are_kept_ready_from_then_on(driver: Driver) -> None:
    wide = replace(LIMITS, workspace_bytes=64 << 20)
    async with filled(Pool(driver, PATTERN, ALWAYS), 1) as pool:
        _, first, ready = await pool.claim(spec("wide", limits=wide))
        assert not ready
        await until(pool, 2)
        _, second, ready = await pool.claim(spec("wide-2", limits=replace(wide, call_timeout_s=7, output_bytes=999)))
        assert ready
        assert second.handle.limits.call_timeout_s == 7
        for sandbox in (first, second):
            await sandbox.close()


async def test_a_writable_volume_is_never_met_by_a_spare(driver: Driver, home: Path) -> None:
    volume = Volume(home, "/mnt/x", read_only=False)
    async with filled(Pool(driver, PATTERN, ALWAYS), 1) as pool:
        handle, sandbox, ready = await pool.claim(replace(spec("own"), volumes=(volume,)))
        assert (ready, handle.sandbox_id) == (False, "own")
        await sandbox.close()


async def test_a_start_that_fits_the_budget_needs_no_spares(driver: Driver) -> None:
    async with Pool(driver, PATTERN, Budget(cold_start_s=3600)) as pool:
        while pool.figures().start_s is None or pool.figures().ready:  # the first one shows how long a start takes
            pool._changed.set()
            await asyncio.sleep(0.01)
        assert pool.figures().wanted == 0
    assert await driver.found() == []


async def test_claims_at_the_same_time_never_get_the_same_sandbox(driver: Driver) -> None:
    async with filled(Pool(driver, PATTERN, ALWAYS), 1) as pool:
        claimed = await asyncio.gather(*(pool.claim(spec(f"c{i}")) for i in range(5)))
        for i, (handle, sandbox, _) in enumerate(claimed):
            assert handle.session_id == f"session-c{i}"
            assert (await bash(sandbox, "ls -A; touch taken")).output == b""
            await sandbox.close()
        assert len({handle.sandbox_id for handle, _, _ in claimed}) == 5
        assert pool.figures().misses == sum(not ready for *_, ready in claimed) >= 1
        for handle, _, _ in claimed:
            await driver.release(handle)


class Unwilling:
    """Starts nothing while `broken`."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.broken = True

    def __getattr__(self, name: str) -> object:
        return getattr(self.driver, name)

    async def create(self, wanted: SandboxSpec) -> Handle:
        if self.broken:
            raise CreateFailed("the disk is full")
        return await self.driver.create(wanted)


async def test_a_driver_that_starts_nothing_is_said_is_not_asked_without_end_and_may_recover(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.pool.RETRY_S", 0.05)
    unwilling, book = Unwilling(driver), Book()
    async with Pool(unwilling, PATTERN, ALWAYS, book) as pool:  # type: ignore[arg-type]
        while pool.figures().failure is None:
            await asyncio.sleep(0.01)
        assert "the disk is full" in str(pool.figures().as_json()["failure"])
        with pytest.raises(CreateFailed, match="the disk is full"):
            await pool.claim(spec("a"))
        assert not book.names
        unwilling.broken = False
        await until(pool, 1)
        assert pool.figures().failure is None


async def test_whatever_is_claimed_and_released_in_whatever_order_nothing_is_left(driver: Driver) -> None:
    chance = random.Random(6)
    book = Book()
    async with Pool(driver, PATTERN, ALWAYS, book) as pool:
        held: list[Handle] = []
        for i in range(12):
            if held and chance.random() < 0.4:
                await driver.release(held.pop(chance.randrange(len(held))))
            handle, sandbox, _ = await pool.claim(spec(f"s{i}"))
            await sandbox.close()
            await book.withdraw(handle.sandbox_id)
            held.append(handle)
        await asyncio.gather(*(driver.release(handle) for handle in held))
    assert await driver.found() == []
    assert not book.names


class Picky(Unwilling):
    """Starts nothing of one shape."""

    async def create(self, wanted: SandboxSpec) -> Handle:
        if wanted.limits.pids == 9:
            raise CreateFailed("that image is nowhere")
        return await self.driver.create(wanted)


async def test_a_shape_that_cannot_be_started_takes_no_spare_from_the_others(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.pool.RETRY_S", 0.01)
    hopeless = replace(LIMITS, pids=9)
    async with filled(Pool(Picky(driver), PATTERN, ALWAYS), 1) as pool:  # type: ignore[arg-type]
        for i in range(3):
            with pytest.raises(CreateFailed, match="nowhere"):
                await pool.claim(spec(f"none{i}", limits=hopeless))
            handle, sandbox, ready = await pool.claim(spec(f"good{i}"))
            assert ready
            await sandbox.close()
            await driver.release(handle)
            with pytest.raises(CreateFailed, match="nowhere"):
                await pool.claim(spec(f"last{i}", limits=hopeless))
            await until(pool, 1)


class LostBook(Book):
    lost = True

    async def announce(self, sandbox_id: str) -> None:
        if self.lost:
            raise ConnectionError("the database does not answer")
        await super().announce(sandbox_id)

    withdraw = announce


async def test_a_book_that_is_away_stops_the_pool_only_as_long_as_it_is(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.pool.RETRY_S", 0.01)
    book = LostBook()
    async with Pool(driver, PATTERN, ALWAYS, book) as pool:
        while pool.figures().failure is None:
            await asyncio.sleep(0.01)
        assert "does not answer" in str(pool.figures().failure)
        book.lost = False
        await until(pool, 1)
        book.lost = True
    assert await driver.found() == []
