from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier import RealIo, Receipt, Tier, TierConfigError, TierIntegrityError, TierStack
from kvtier.fileops import Room
from kvtier.segment import payload_offset
from tests.kvtier.support import (
    PAGE,
    SALT_ID,
    FaultyIo,
    config,
    flip_bit,
    flip_in_payload,
    key_of,
    keys_of,
    landed,
    manifests,
    numbers_in,
    nvme_budget,
    open_stack,
    pages_of,
    payload_of,
    payloads,
    quarantined,
    rooms_of,
    segments,
)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[TierStack]:
    with open_stack(tmp_path, host=0) as opened:
        yield opened


def put(stack: TierStack, *numbers: int) -> Receipt:
    return stack.put(pages_of(*numbers), epoch=1, salt_id=SALT_ID, tier=Tier.NVME)


def strays(base: Path) -> list[Path]:
    """Half files: temporary ones, and segments that no manifest names."""
    lone = [path for path in segments(base) if not path.with_suffix(".json").exists()]
    return [*(base / "nvme").rglob("*.tmp"), *lone]


def on_disk(base: Path) -> int:
    return sum(path.stat().st_size for path in (base / "nvme").rglob("*") if path.is_file())


def test_a_page_that_comes_back_is_byte_equal_after_a_restart(tmp_path: Path, stack: TierStack) -> None:
    assert put(stack, 1, 2, 3) == Receipt("accepted", 3, 3 * PAGE)
    stack.close()
    with open_stack(tmp_path, host=0) as again:
        assert again.lookup(keys_of(2, 9)) == [Tier.NVME, None]
        assert payloads(again.get(keys_of(3, 9, 1))) == [payload_of(3), None, payload_of(1)]
        again.check_integrity()


def test_a_put_in_several_segments_reads_as_one(tmp_path: Path, stack: TierStack) -> None:
    numbers = range(1100)
    assert put(stack, *numbers).status == "clipped"  # 1 MiB is less than that
    stack.close()
    shutil.rmtree(tmp_path / "nvme")
    with open_stack(tmp_path, host=0, nvme_bytes=4 * 2**20) as large:
        assert put(large, *numbers).pages == 1100
        assert len(segments(tmp_path)) == 2
        assert payloads(large.get(keys_of(*numbers))) == [payload_of(n) for n in numbers]
        large.check_integrity()


def test_the_same_key_twice_is_one_page(tmp_path: Path, stack: TierStack) -> None:
    put(stack, 1, 2)
    assert put(stack, 2, 3) == Receipt("accepted", 2, PAGE)
    assert stack.stats().nvme.pages == 3


def test_files_are_spread_over_folders(tmp_path: Path, stack: TierStack) -> None:
    for number in range(20):
        put(stack, number)
    assert len({path.parent for path in segments(tmp_path)}) > 5


# --- torn, truncated, flipped, foreign -------------------------------------------------------------------


def test_a_flipped_bit_costs_that_page_and_is_kept_in_quarantine(tmp_path: Path, stack: TierStack) -> None:
    put(stack, 1, 2, 3)
    flip_in_payload(segments(tmp_path)[0], 2)
    assert payloads(stack.get(keys_of(1, 2, 3))) == [payload_of(1), None, payload_of(3)]
    assert stack.stats().nvme.quarantined == 1
    assert len(quarantined(tmp_path)) == 1
    assert put(stack, 2).status == "accepted"
    assert payloads(stack.get(keys_of(2))) == [payload_of(2)]
    stack.check_integrity()


def test_a_quarantined_page_stays_out_after_a_restart(tmp_path: Path, stack: TierStack) -> None:
    put(stack, 1, 2, 3)
    flip_in_payload(segments(tmp_path)[0], 2)
    stack.get(keys_of(2))
    stack.close()
    with open_stack(tmp_path, host=0) as again:
        assert numbers_in(again.keys(Tier.NVME)) == {1, 3}


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def flip_in_table(path: Path) -> None:
    flip_bit(path, 200)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_with_noise(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


@pytest.mark.parametrize("harm", [cut_short, grow, flip_in_table, empty, replace_with_noise])
@pytest.mark.parametrize("which", [segments, manifests])
def test_a_damaged_file_is_set_aside_and_counted(tmp_path: Path, stack: TierStack, which: object, harm: object) -> None:
    assert callable(which)
    assert callable(harm)
    put(stack, 1)
    put(stack, 2, 3)
    stack.close()
    harm(which(tmp_path)[0])
    with open_stack(tmp_path, host=0) as again:
        left = numbers_in(again.keys(Tier.NVME))
        assert left in ({1}, {2, 3})
        assert again.stats().nvme.quarantined == 1
        assert payloads(again.get(keys_of(*sorted(left)))) == [payload_of(n) for n in sorted(left)]
        assert put(again, 1, 2, 3).status == "accepted"
        again.check_integrity()
    assert len(quarantined(tmp_path)) >= 1


def test_a_file_cut_short_while_it_is_indexed_is_a_miss(tmp_path: Path, stack: TierStack) -> None:
    put(stack, 1, 2)
    os.truncate(segments(tmp_path)[0], payload_offset(2) + PAGE)
    assert payloads(stack.get(keys_of(1, 2))) == [payload_of(1), None]


def test_a_segment_under_another_ones_name_is_not_believed(tmp_path: Path, stack: TierStack) -> None:
    put(stack, 1)
    put(stack, 2)
    stack.close()
    one, two = segments(tmp_path)
    shutil.copy(one, two)
    with open_stack(tmp_path, host=0) as again:
        assert len(again.keys(Tier.NVME)) == 1
        assert again.stats().nvme.quarantined == 1


def test_another_tenants_payload_in_the_right_place_does_not_verify(tmp_path: Path, stack: TierStack) -> None:
    put(stack, 1)
    stack.put(pages_of(2), epoch=1, salt_id=b"tenant-b", tier=Tier.NVME)
    path = next(path for path in segments(tmp_path) if payload_of(1) in path.read_bytes())
    path.write_bytes(path.read_bytes().replace(payload_of(1), payload_of(2)))
    assert stack.get(keys_of(1)) == [None]


def test_segments_of_another_model_are_missing_but_count_and_go_first(tmp_path: Path) -> None:
    budget = nvme_budget(3)
    with TierStack.open(config(tmp_path, host=0, nvme_bytes=budget, fingerprint=b"old")) as old:
        put(old, 1)
        put(old, 2)
    with open_stack(tmp_path, host=0, nvme_bytes=budget) as new:
        counts = new.stats().nvme
        assert (counts.foreign, counts.pages, counts.quarantined) == (2, 0, 0)
        assert counts.used_bytes > 0
        for number in (3, 4, 5):
            assert put(new, number).status == "accepted"
        assert numbers_in(new.keys(Tier.NVME)) == {3, 4, 5}
        assert on_disk(tmp_path) <= budget


def test_the_quarantine_is_bounded(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=0, nvme_bytes=20 * 2**10) as stack:
        for number in range(6):
            put(stack, number)
            flip_in_payload(segments(tmp_path)[0], number)
            assert stack.get(keys_of(number)) == [None]
        assert stack.stats().nvme.quarantined == 6
        assert sum(path.stat().st_size for path in quarantined(tmp_path)) <= 20 * 2**10 // 16
        stack.check_integrity()


# --- disk full, errors, restarts -------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["open", "write", "fsync", "rename"])
@pytest.mark.parametrize("suffix", [".seg", ".json"])
def test_a_disk_that_fills_up_is_a_miss_and_leaves_no_half_file(tmp_path: Path, operation: str, suffix: str) -> None:
    io = FaultyIo()
    with open_stack(tmp_path, io, host=0) as stack:
        put(stack, 1)
        full = OSError(errno.ENOSPC, "No space left on device")
        io.fail(full, lambda seen, path: seen == operation and suffix in path.name)
        receipt = put(stack, 2, 3)
        assert receipt.status == "rejected"
        assert "No space left" in receipt.detail
        assert stack.lookup(keys_of(2)) == [None]
        assert stack.stats().nvme.io_errors == 1
        io.heal()
        assert not strays(tmp_path)
        assert payloads(stack.get(keys_of(1))) == [payload_of(1)]
        assert put(stack, 2, 3).status == "accepted"
        stack.check_integrity()


def test_what_a_dead_writer_left_is_swept_at_start(tmp_path: Path, stack: TierStack) -> None:
    put(stack, 1)
    put(stack, 2)
    stack.close()
    manifests(tmp_path)[0].unlink()
    (segments(tmp_path)[0].parent / "0000.seg.tmp").write_bytes(b"half")
    with open_stack(tmp_path, host=0) as again:
        assert again.stats().nvme.swept == 2
        assert len(again.keys(Tier.NVME)) == 1
        assert not strays(tmp_path)


def test_the_budget_counts_what_a_restart_finds(tmp_path: Path) -> None:
    budget = nvme_budget(4)
    for start in range(0, 12, 3):
        with open_stack(tmp_path, host=0, nvme_bytes=budget) as stack:
            for number in range(start, start + 3):
                assert put(stack, number).status == "accepted"
            assert on_disk(tmp_path) <= budget
            assert stack.stats().nvme.used_bytes == on_disk(tmp_path)
            stack.check_integrity()


def test_a_smaller_budget_is_met_before_the_first_write(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=0) as stack:
        for number in range(6):
            put(stack, number)
    with open_stack(tmp_path, host=0, nvme_bytes=nvme_budget(2)) as stack:
        assert on_disk(tmp_path) <= nvme_budget(2)
        assert numbers_in(stack.keys(Tier.NVME)) == {4, 5}


def test_the_least_recently_used_segment_goes_first(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=0, nvme_bytes=nvme_budget(3)) as stack:
        for number in (1, 2, 3):
            put(stack, number)
        stack.get(keys_of(1))
        put(stack, 4)
        assert numbers_in(stack.keys(Tier.NVME)) == {1, 3, 4}


def test_copies_of_a_key_do_not_pile_up(tmp_path: Path, stack: TierStack) -> None:
    put(stack, 1, 2)
    stack.close()
    shutil.move(tmp_path / "nvme", tmp_path / "kept")
    with open_stack(tmp_path, host=0) as other:
        put(other, 2, 3)
    for path in (tmp_path / "kept").glob("??/*"):
        target = tmp_path / "nvme" / path.parent.name
        target.mkdir(exist_ok=True)
        shutil.move(path, target / path.name)
    with open_stack(tmp_path, host=0) as again:
        assert again.stats().nvme.swept == 1
        again.check_integrity()
        again.delete(keys_of(2))
    with open_stack(tmp_path, host=0) as again:
        assert numbers_in(again.keys(Tier.NVME)) == {1, 3}


# --- deleting --------------------------------------------------------------------------------------------


def test_exactly_the_deleted_pages_are_gone_also_after_a_restart(tmp_path: Path, stack: TierStack) -> None:
    put(stack, 1, 2, 3, 4)
    assert stack.delete(keys_of(2, 77)) == Receipt("accepted", 1, PAGE)
    assert stack.delete(keys_of(77)).status == "missing"
    stack.close()
    with open_stack(tmp_path, host=0) as again:
        assert numbers_in(again.keys(Tier.NVME)) == {1, 3, 4}
        again.check_integrity()


def test_a_segment_that_is_more_than_half_dead_is_rewritten(tmp_path: Path, stack: TierStack) -> None:
    put(stack, *range(10))
    before = on_disk(tmp_path)
    stack.delete(keys_of(*range(6)))
    assert on_disk(tmp_path) < before
    assert all(payload_of(0) not in path.read_bytes() for path in segments(tmp_path))
    assert payloads(stack.get(keys_of(*range(6, 10)))) == [payload_of(n) for n in range(6, 10)]
    stack.check_integrity()


def test_a_segment_without_live_pages_is_removed(tmp_path: Path, stack: TierStack) -> None:
    put(stack, 1, 2)
    stack.delete(keys_of(1, 2))
    assert not segments(tmp_path)
    assert not manifests(tmp_path)
    assert stack.stats().nvme.used_bytes == 0


def test_a_disk_full_of_data_does_not_stop_a_deletion(tmp_path: Path) -> None:
    io = FaultyIo()
    with open_stack(tmp_path, io, host=0) as stack:
        put(stack, 1, 2, 3)
        io.fail(OSError(errno.ENOSPC, "full"), lambda seen, _: seen == "write")
        assert stack.delete(keys_of(1)).status == "accepted"
        assert stack.lookup(keys_of(1)) == [None]
        io.heal()
        stack.check_integrity()
    with open_stack(tmp_path, host=0) as again:
        assert again.lookup(keys_of(1)) == [None]


def test_a_deletion_that_the_disk_refuses_is_not_reported_as_done(tmp_path: Path) -> None:
    io = FaultyIo()
    with open_stack(tmp_path, io, host=0) as stack:
        put(stack, 1)
        io.fail(OSError(errno.EROFS, "read-only"), lambda seen, _: seen == "unlink")
        receipt = stack.delete(keys_of(1))
        assert (receipt.status, receipt.pages) == ("clipped", 0)


def test_integrity_notices_a_file_that_vanished(tmp_path: Path, stack: TierStack) -> None:
    put(stack, 1)
    segments(tmp_path)[0].unlink()
    with pytest.raises(TierIntegrityError, match="other sizes"):
        stack.check_integrity()


def test_an_unreadable_directory_is_a_sentence(tmp_path: Path) -> None:
    io = FaultyIo()
    io.fail(OSError(errno.EACCES, "Permission denied"), lambda seen, path: "nvme" in str(path))
    with pytest.raises(TierConfigError, match="cannot be written: Permission denied"):
        open_stack(tmp_path, io, host=0)


# --- a directory that vanishes, a disk that is slow or read-only, a clock that is wrong -------------------


def test_a_directory_removed_under_a_running_process_is_made_anew_and_used(tmp_path: Path, stack: TierStack) -> None:
    put(stack, 1, 2)
    shutil.rmtree(tmp_path / "nvme")
    assert stack.get(keys_of(1, 2)) == [None, None]
    assert put(stack, 1, 3) == Receipt("accepted", 2, 2 * PAGE)
    assert payloads(stack.get(keys_of(1, 2, 3))) == [payload_of(1), None, payload_of(3)]
    assert stack.stats().nvme.recreated == 1
    assert stack.stats().nvme.used_bytes == on_disk(tmp_path)
    stack.check_integrity()
    assert stack.delete(keys_of(1)).pages == 1


@pytest.mark.parametrize("use", ["put", "delete", "get", "integrity"])
def test_whatever_is_done_first_after_it_vanished_notices(tmp_path: Path, stack: TierStack, use: str) -> None:
    put(stack, 1)
    shutil.rmtree(tmp_path / "nvme")
    if use == "put":
        assert put(stack, 1).bytes == PAGE
    elif use == "delete":
        stack.delete(keys_of(1))
    elif use == "get":
        assert stack.get(keys_of(1)) == [None]
    stack.check_integrity()
    assert numbers_in(stack.keys(Tier.NVME)) == ({1} if use == "put" else set())


def test_a_folder_or_a_file_removed_under_it_costs_only_its_pages(tmp_path: Path, stack: TierStack) -> None:
    put(stack, 1)
    put(stack, 2)
    gone, kept = segments(tmp_path)
    left = 1 if payload_of(1) in kept.read_bytes() else 2
    shutil.rmtree(gone.parent)
    assert put(stack, 3).status == "accepted"
    assert numbers_in(stack.keys(Tier.NVME)) == {left, 3}
    kept.unlink()
    assert stack.get(keys_of(left)) == [None]
    assert put(stack, left).bytes == PAGE
    assert payloads(stack.get(keys_of(left, 3))) == [payload_of(left), payload_of(3)]


def test_a_directory_that_was_replaced_is_read_as_it_is(tmp_path: Path, stack: TierStack) -> None:
    put(stack, 1)
    (tmp_path / "nvme").rename(tmp_path / "old")
    with open_stack(tmp_path, host=0) as other:
        put(other, 2)
    assert put(stack, 3).status == "accepted"
    assert numbers_in(stack.keys(Tier.NVME)) == {2, 3}
    assert payloads(stack.get(keys_of(2, 3))) == [payload_of(2), payload_of(3)]
    stack.check_integrity()


def test_a_disk_that_turns_read_only_serves_what_it_has_and_refuses_the_rest(tmp_path: Path) -> None:
    io = FaultyIo()
    with open_stack(tmp_path, io, host=0) as stack:
        put(stack, 1)
        frozen = ("write", "rename", "unlink", "truncate", "fsync")
        io.fail(OSError(errno.EROFS, "Read-only file system"), lambda seen, _: seen in frozen)
        receipt = put(stack, 2)
        assert (receipt.status, receipt.pages) == ("rejected", 0)
        assert "Read-only" in receipt.detail
        assert payloads(stack.get(keys_of(1, 2))) == [payload_of(1), None]
        io.heal()
        assert put(stack, 2).status == "accepted"
        assert len(strays(tmp_path)) <= 1  # the half file that could not be removed then
    with open_stack(tmp_path, host=0) as again:
        assert not strays(tmp_path)
        assert numbers_in(again.keys(Tier.NVME)) == {1, 2}


def test_a_read_that_takes_too_long_is_a_miss_that_is_counted_and_the_page_stays(tmp_path: Path) -> None:
    io, gate = FaultyIo(), threading.Event()
    with TierStack.open(replace(config(tmp_path, host=0), read_deadline_s=0.05), io=io) as stack:
        put(stack, 1)
        put(stack, 2)
        slow = next(path for path in segments(tmp_path) if payload_of(1) in path.read_bytes())
        io.rule = lambda operation, path: gate.wait() and None if (operation, path) == ("read", slow) else None
        assert payloads(stack.get(keys_of(1, 2))) == [None, payload_of(2)]
        assert stack.stats().nvme.timeouts == 1
        assert put(stack, 3).status == "accepted"
        io.heal()
        gate.set()
        assert payloads(stack.get(keys_of(1))) == [payload_of(1)]
        assert stack.stats().nvme.quarantined == 0


def test_memory_that_a_late_read_may_still_write_into_is_told_until_it_has_ended(tmp_path: Path) -> None:
    io, gate = FaultyIo(), threading.Event()
    with TierStack.open(replace(config(tmp_path, host=0, shared_bytes=2**20), read_deadline_s=0.05), io=io) as stack:
        put(stack, 1)
        put(stack, 2)
        stack.copy(keys_of(1), Tier.SHARED, epoch=1, salt_id=SALT_ID)
        slow = next(path for path in segments(tmp_path) if payload_of(1) in path.read_bytes())
        io.rule = lambda operation, path: gate.wait() and None if (operation, path) == ("read", slow) else None
        rooms = rooms_of(1, 2)
        read = stack.read_into(rooms)
        assert landed(rooms, read.tiers) == [None, payload_of(2)]
        assert set(read.late) == {key_of(1)}  # not looked for below: two would write into its memory
        assert stack.stats().nvme.timeouts == 1
        late = read.late[key_of(1)]
        assert not late.done()
        gate.set()
        late.result(60)
        assert stack.read_into(rooms).tiers == dict.fromkeys(keys_of(1, 2), Tier.NVME)


def test_while_every_reader_hangs_a_read_is_a_miss_and_its_memory_is_free(tmp_path: Path) -> None:
    io, gate = FaultyIo(), threading.Event()
    with TierStack.open(replace(config(tmp_path, host=0), read_deadline_s=0.05), io=io) as stack:
        for number in range(3):
            put(stack, number)
        io.rule = lambda operation, path: gate.wait() and None if operation == "read" else None
        assert len(stack.read_into(rooms_of(0, 1, 2)).late) == 2  # as many as there are threads
        after = stack.read_into(rooms_of(2))
        assert (after.tiers, after.late) == ({}, {})
        io.heal()
        gate.set()


@pytest.mark.parametrize("shift", [0, 512 * 3 + 1])
def test_whole_blocks_go_straight_to_where_they_are_wanted(tmp_path: Path, shift: int) -> None:
    size = 4096

    class Spy(RealIo):
        def read_at(self, fd: int, buffers: list[Room], offset: int) -> int:
            reads.append([one for one in buffers if isinstance(one, memoryview) and one.obj is memory])
            return super().read_at(fd, buffers, offset)

    reads: list[list[Room]] = []
    memory = mmap.mmap(-1, 4 * size)
    rooms = [
        (key_of(number), memoryview(memory)[shift + place * size : shift + place * size + size])
        for place, number in enumerate((3, 1, 2))
    ]
    with TierStack.open(config(tmp_path, host=0, page_bytes=size), io=Spy()) as stack:
        pages = [(key_of(number), payload_of(number, size)) for number in (1, 2, 3)]
        stack.put(pages, epoch=1, salt_id=SALT_ID, tier=Tier.NVME)
        reads.clear()
        read = stack.read_into(rooms)
        assert landed(rooms, read.tiers) == [payload_of(number, size) for number in (3, 1, 2)]
        direct = shift == 0 or not stack._parts.nvme.runs.direct  # type: ignore[union-attr]
        assert [len(buffers) for buffers in reads] == ([3] if direct else [0])  # neighbours in one read


def test_the_order_of_use_survives_a_clock_that_runs_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10**9, 0, -(10**6)))
    for name in ("time", "time_ns", "monotonic_ns"):
        monkeypatch.setattr(f"time.{name}", lambda: next(now))
    for number in (1, 2, 3):
        with open_stack(tmp_path, host=0) as stack:
            put(stack, number)
        for path in (tmp_path / "nvme").rglob("*"):
            os.utime(path, ns=(0, 10**18 - number * 10**15))
    with open_stack(tmp_path, host=0, nvme_bytes=nvme_budget(2)) as stack:
        assert numbers_in(stack.keys(Tier.NVME)) == {2, 3}
        assert put(stack, 4).status == "accepted"
        assert numbers_in(stack.keys(Tier.NVME)) == {3, 4}


def test_segments_of_an_older_format_are_missing_but_count_and_go_first(tmp_path: Path, stack: TierStack) -> None:
    import hashlib

    put(stack, 1)
    stack.close()
    (path,) = manifests(tmp_path)
    line = path.read_bytes().splitlines()[0].replace(b'"version":3', b'"version":2')
    path.write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")
    with open_stack(tmp_path, host=0, nvme_bytes=nvme_budget(2)) as again:
        counts = again.stats().nvme
        assert (counts.pages, counts.foreign, counts.quarantined) == (0, 1, 0)
        assert counts.used_bytes == on_disk(tmp_path)
        put(again, 2)
        put(again, 3)
        assert numbers_in(again.keys(Tier.NVME)) == {2, 3}


# --- speed -----------------------------------------------------------------------------------------------


def test_an_empty_tier_measures_itself_with_a_file_that_it_removes(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=0, nvme_bytes=8 * 2**20) as stack:
        speed = stack.measure(4 * 2**20)
        assert speed is not None
        assert speed.size_bytes == 4 * 2**20
        assert speed.bytes_per_s == pytest.approx(speed.size_bytes / speed.elapsed_s)
        assert on_disk(tmp_path) == 0
        assert stack.stats().nvme.misses == stack.stats().nvme.hits == 0


def test_a_tier_that_has_pages_measures_itself_with_them(tmp_path: Path, stack: TierStack) -> None:
    put(stack, *range(50))
    speed = stack.measure(20 * PAGE)
    assert speed is not None
    assert speed.size_bytes >= 20 * PAGE
    assert stack.stats().nvme.hits == 0


def test_a_measurement_stays_within_the_budget_or_is_none(tmp_path: Path, stack: TierStack) -> None:
    put(stack, 1)
    assert stack.measure() is None  # 1 MiB has no room for a chunk
    io = FaultyIo()
    with open_stack(tmp_path / "other", io, host=0, nvme_bytes=8 * 2**20) as other:
        written: list[int] = []
        io.rule = lambda operation, path: written.append(on_disk(tmp_path / "other")) if operation == "fsync" else None
        speed = other.measure(2**30)
        assert speed is not None
        assert speed.size_bytes <= 8 * 2**20
        assert max(written) <= 8 * 2**20
        io.fail(OSError(errno.EIO, "I/O error"), lambda seen, path: seen == "read")
        assert other.measure(4 * 2**20) is None
    with open_stack(tmp_path, host=0, nvme_bytes=0) as none:
        assert none.measure() is None


# --- two processes ---------------------------------------------------------------------------------------


def test_two_stores_on_one_directory_share_pages_and_only_one_deletes(tmp_path: Path, stack: TierStack) -> None:
    with open_stack(tmp_path, host=0) as second:
        put(stack, 1, 2)
        assert put(second, 2, 3) == Receipt("accepted", 2, PAGE)  # create-only by key, across processes
        assert payloads(second.get(keys_of(1, 2, 3))) == [payload_of(n) for n in (1, 2, 3)]
        assert second.delete(keys_of(1)).status == "deferred"
        assert stack.delete(keys_of(1, 3)).pages == 2
        assert payloads(second.get(keys_of(2))) == [payload_of(2)]
        stack.close()
        assert second.delete(keys_of(2)).status == "accepted"  # the right to delete passes on


def test_a_segment_that_another_process_deleted_is_a_miss_and_no_damage(tmp_path: Path, stack: TierStack) -> None:
    with open_stack(tmp_path, host=0) as second:
        put(second, 1)
        put(stack, 2)  # takes notice of 1
        assert stack.delete(keys_of(1)).status == "accepted"
        assert second.get(keys_of(1)) == [None]
        assert second.stats().nvme.quarantined == 0
        assert put(second, 1).status == "accepted"


def test_two_processes_never_add_at_once_so_their_sum_keeps_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.locks.TURN_S", 0.05)
    io, budget = FaultyIo(), nvme_budget(1)
    entered, go_on = threading.Event(), threading.Event()

    def pause(operation: str, path: Path) -> None:
        if operation == "rename" and path.suffix == ".json":
            entered.set()
            go_on.wait(30)

    with open_stack(tmp_path, io, host=0, nvme_bytes=budget) as one:
        with open_stack(tmp_path, host=0, nvme_bytes=budget) as two:
            io.rule = pause
            thread = threading.Thread(target=put, args=(one, 1))
            thread.start()
            assert entered.wait(30)
            refused = put(two, 2)
            assert (refused.status, refused.detail) == (
                "rejected",
                "another process is writing into the NVMe directory",
            )
            go_on.set()
            thread.join()
            assert put(two, 2).status == "rejected"  # full, and only the other one may remove
            assert "budget" in put(two, 2).detail
            assert on_disk(tmp_path) <= budget
            assert put(one, 2).status == "accepted"
            assert numbers_in(one.keys(Tier.NVME)) == {2}


def test_a_disk_that_hangs_does_not_hold_up_a_deletion(tmp_path: Path) -> None:
    io, gate = FaultyIo(), threading.Event()
    with TierStack.open(replace(config(tmp_path, host=0), read_deadline_s=0.05), io=io) as stack:
        put(stack, *range(10))
        io.rule = lambda operation, path: (
            gate.wait() and None if operation == "read" and path.suffix == ".seg" else None
        )
        assert stack.delete(keys_of(*range(6))).pages == 6  # the rest stays where it is instead of being rewritten
        gate.set()
        io.heal()
        while not all(left := payloads(stack.get(keys_of(*range(6, 10))))):
            pass  # until the reads that hung have come back
        assert left == [payload_of(number) for number in range(6, 10)]
        stack.check_integrity()


def test_a_sweep_spares_a_writer_at_work(tmp_path: Path) -> None:
    io = FaultyIo()
    entered, go_on = threading.Event(), threading.Event()

    def pause(operation: str, path: Path) -> None:
        if operation == "rename" and path.suffix == ".json":
            entered.set()
            go_on.wait(30)

    writer = open_stack(tmp_path, io, host=0)
    # The lease passes to the sweeper: the writer is a second process without it.
    fcntl.flock(writer._parts.nvme.files.locks._fd, fcntl.LOCK_UN)  # type: ignore[union-attr,arg-type]
    io.rule = pause
    thread = threading.Thread(target=put, args=(writer, 1))
    thread.start()
    assert entered.wait(30)
    with open_stack(tmp_path, host=0) as sweeper:
        assert sweeper.stats().nvme.swept == 0
        go_on.set()
        thread.join()
        put(sweeper, 2)
        assert payloads(sweeper.get(keys_of(1))) == [payload_of(1)]
    io.heal()


WRITER = """
import sys
from pathlib import Path
from kvtier import Tier
from tests.kvtier.support import open_stack, pages_of, SALT_ID
stack = open_stack(Path(sys.argv[1]), host=0)
for start in range(0, 60, 3):
    stack.put(pages_of(start, start + 1, start + 2), epoch=1, salt_id=SALT_ID, tier=Tier.NVME)
"""


def test_two_processes_that_write_the_same_pages_leave_whole_pages(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    children = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=root) for _ in range(2)]
    assert [child.wait(120) for child in children] == [0, 0]
    with open_stack(tmp_path, host=0) as stack:
        assert payloads(stack.get(keys_of(*range(60)))) == [payload_of(n) for n in range(60)]
        assert stack.stats().nvme.quarantined == 0
        stack.check_integrity()
        assert not strays(tmp_path)
    live = sum(len(json.loads(path.read_text().splitlines()[0])["live"]) for path in manifests(tmp_path))
    assert live == 60
