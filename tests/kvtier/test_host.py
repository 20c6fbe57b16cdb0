from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier import Tier, TierBusyError, TierConfigError, TierIntegrityError, TierStack
from kvtier.slots import FILE_HEADER_BYTES, SLOT_HEADER_BYTES, VERSION
from tests.kvtier.support import (
    PAGE,
    SALT_ID,
    FaultyIo,
    config,
    flip_bit,
    flip_in_payload,
    key_of,
    keys_of,
    numbers_in,
    open_stack,
    pages_of,
    payload_of,
    payloads,
)


def put(stack: TierStack, *numbers: int, epoch: int = 1) -> str:
    return stack.put(pages_of(*numbers), epoch=epoch, salt_id=SALT_ID, tier=Tier.HOST).status


def test_a_page_that_comes_back_is_byte_equal_to_the_one_that_left(tmp_path: Path) -> None:
    with open_stack(tmp_path) as stack:
        assert put(stack, 1, 2, 3) == "accepted"
        assert stack.lookup(keys_of(3, 9)) == [Tier.HOST, None]
        assert payloads(stack.get(keys_of(3, 9, 1))) == [payload_of(3), None, payload_of(1)]
        stack.check_integrity()


def test_a_key_that_is_there_keeps_its_bytes(tmp_path: Path) -> None:
    with open_stack(tmp_path) as stack:
        put(stack, 1)
        receipt = stack.put([(key_of(1), payload_of(2))], epoch=2, salt_id=SALT_ID, tier=Tier.HOST)
        assert (receipt.status, receipt.pages, receipt.bytes) == ("accepted", 1, 0)
        assert payloads(stack.get(keys_of(1))) == [payload_of(1)]


def test_over_budget_the_least_recently_used_page_goes_first(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=3) as stack:
        put(stack, 1, 2, 3)
        stack.get(keys_of(1))
        put(stack, 4)
        assert numbers_in(stack.keys(Tier.HOST)) == {1, 3, 4}
        assert stack.stats().host.evicted == 1
        stack.check_integrity()


def test_a_batch_larger_than_the_tier_is_clipped_and_keeps_its_beginning(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=3) as stack:
        put(stack, 9)
        receipt = stack.put(pages_of(1, 2, 3, 4, 5), epoch=1, salt_id=SALT_ID, tier=Tier.HOST)
        assert (receipt.status, receipt.pages, receipt.bytes) == ("clipped", 3, 3 * PAGE)
        assert numbers_in(stack.keys(Tier.HOST)) == {1, 2, 3}


def test_the_file_never_exceeds_its_budget_also_when_the_budget_shrinks(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=8) as stack:
        put(stack, *range(8))
    with open_stack(tmp_path, host=3) as stack:
        assert (tmp_path / "arena").stat().st_size <= stack.stats().host.budget_bytes
        assert stack.stats().host.pages <= 3
        stack.check_integrity()
    with open_stack(tmp_path, host=20) as stack:
        assert put(stack, *range(10, 30)) == "accepted"
        stack.check_integrity()


def test_an_arena_is_adopted_with_its_order_of_use(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=3) as stack:
        put(stack, 1)
        put(stack, 2)
        put(stack, 3)
    with open_stack(tmp_path, host=3) as stack:
        assert stack.stats().host.adopted == 3
        put(stack, 4)
        assert payloads(stack.get(keys_of(1, 2, 3))) == [None, payload_of(2), payload_of(3)]


@pytest.mark.parametrize("change", [{"fingerprint": b"model-2"}, {"page_bytes": PAGE - 1}])
def test_pages_of_another_model_or_layout_are_missing(tmp_path: Path, change: dict[str, object]) -> None:
    with open_stack(tmp_path) as stack:
        put(stack, 1)
    with TierStack.open(config(tmp_path, **change)) as stack:  # type: ignore[arg-type]
        assert stack.lookup(keys_of(1)) == [None]
        assert stack.stats().host.foreign == 1
        stack.check_integrity()


def test_the_room_that_is_left_is_told_without_evicting_anything(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=3) as stack:
        assert stack.host_room() == 3
        put(stack, 1, 2)
        assert stack.host_room() == 1
        stack.delete(keys_of(1))
        assert stack.host_room() == 2
    with open_stack(tmp_path, host=0) as stack:
        assert stack.host_room() == 0


def test_pages_of_an_older_format_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for module in ("slots", "arena"):
            patch.setattr(f"kvtier.{module}.VERSION", VERSION - 1)
        with open_stack(tmp_path) as stack:
            put(stack, 1)
    with open_stack(tmp_path) as stack:
        assert stack.lookup(keys_of(1)) == [None]
        assert stack.stats().host.foreign == 1
        stack.check_integrity()


def test_a_flipped_bit_in_a_payload_is_quarantined_and_the_slot_serves_again(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=2) as stack:
        put(stack, 1, 2)
        flip_in_payload(tmp_path / "arena", 1)
        assert payloads(stack.get(keys_of(1, 2))) == [None, payload_of(2)]
        assert stack.stats().host.quarantined == 1
        assert put(stack, 1) == "accepted"
        assert payloads(stack.get(keys_of(1, 2))) == [payload_of(1), payload_of(2)]
        stack.check_integrity()


def test_a_flipped_bit_in_a_header_is_quarantined_at_adoption(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=2) as stack:
        put(stack, 1, 2)
    flip_bit(tmp_path / "arena", FILE_HEADER_BYTES + SLOT_HEADER_BYTES // 8)
    with open_stack(tmp_path, host=2) as stack:
        counts = stack.stats().host
        assert (counts.quarantined, counts.adopted) == (1, 1)
        stack.check_integrity()


def test_a_page_copied_over_another_pages_slot_does_not_verify(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=2) as stack:
        put(stack, 1, 2)
        arena = tmp_path / "arena"
        raw = bytearray(arena.read_bytes())
        at = raw.index(payload_of(1))
        raw[at : at + PAGE] = payload_of(2)
        arena.write_bytes(raw)
        assert payloads(stack.get(keys_of(1))) == [None]


def test_integrity_notices_a_header_that_changed_under_it(tmp_path: Path) -> None:
    with open_stack(tmp_path) as stack:
        put(stack, 1)
        arena = tmp_path / "arena"
        with arena.open("r+b") as file:
            file.seek(arena.read_bytes().index(key_of(1)))
            file.write(key_of(2))
        with pytest.raises(TierIntegrityError, match="slot"):
            stack.check_integrity()


def test_a_second_engine_on_the_same_arena_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with open_stack(tmp_path):
        with pytest.raises(TierBusyError, match=r"another engine holds the host arena .*arena; stop it"):
            open_stack(tmp_path)
    open_stack(tmp_path).close()


def test_one_failed_write_loses_that_page_and_nothing_else(tmp_path: Path) -> None:
    io = FaultyIo()
    with open_stack(tmp_path, io, host=4) as stack:
        failures = iter([True])
        io.fail(
            OSError(errno.EIO, "I/O error"),
            lambda operation, _: operation == "write" and next(failures, False),
        )
        receipt = stack.put(pages_of(1, 2, 3), epoch=1, salt_id=SALT_ID, tier=Tier.HOST)
        assert (receipt.status, receipt.pages) == ("clipped", 2)
        assert stack.stats().host.io_errors == 1
        stack.check_integrity()
        assert put(stack, 1, 2, 3, 4) == "accepted"


def test_a_full_shared_memory_is_a_receipt(tmp_path: Path) -> None:
    io = FaultyIo()
    with open_stack(tmp_path, io) as stack:
        io.fail(OSError(errno.ENOSPC, "no space"), lambda operation, _: operation == "write")
        receipt = stack.put(pages_of(1), epoch=1, salt_id=SALT_ID, tier=Tier.HOST)
        assert receipt.status == "rejected"
        assert stack.lookup(keys_of(1)) == [None]
        io.heal()
        stack.check_integrity()


def test_an_unreadable_page_is_a_miss_and_can_be_stored_again(tmp_path: Path) -> None:
    io = FaultyIo()
    with open_stack(tmp_path, io) as stack:
        put(stack, 1)
        io.fail(OSError(errno.EIO, "I/O error"), lambda operation, _: operation == "read")
        assert stack.get(keys_of(1)) == [None]
        io.heal()
        assert put(stack, 1) == "accepted"
        assert payloads(stack.get(keys_of(1))) == [payload_of(1)]


def test_deleted_pages_stay_deleted_after_a_restart(tmp_path: Path) -> None:
    with open_stack(tmp_path) as stack:
        put(stack, 1, 2, 3)
        assert stack.delete(keys_of(2, 9)).pages == 1
    with open_stack(tmp_path) as stack:
        assert numbers_in(stack.keys(Tier.HOST)) == {1, 3}


def test_readers_and_writers_at_once_see_whole_pages_or_misses(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=4) as stack:
        wrong: list[int] = []
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                for number, loaded in zip(range(12), stack.get(keys_of(*range(12))), strict=True):
                    if loaded is not None and bytes(loaded.payload) != payload_of(number):
                        wrong.append(number)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for turn in range(150):
            put(stack, turn % 12, (turn + 5) % 12)
        done.set()
        for reader in readers:
            reader.join()
        assert not wrong
        assert stack.stats().host.quarantined == 0
        stack.check_integrity()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"host_bytes": 100}, "host_bytes is 100; one page needs"),
        ({"nvme_bytes": 100}, "nvme_bytes is 100; one page needs"),
        ({"host_bytes": -1}, "negative"),
        ({"page_bytes": 0}, "page_bytes is 0"),
        ({"fingerprint": b""}, "fingerprint is empty"),
        ({"io_threads": 0}, "io_threads is 0"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_in_a_sentence(
    tmp_path: Path, change: dict[str, object], sentence: str
) -> None:
    from dataclasses import replace

    with pytest.raises(TierConfigError, match=sentence):
        TierStack.open(replace(config(tmp_path), **change))  # type: ignore[arg-type]


def test_a_directory_that_is_a_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "nvme").write_text("")
    with pytest.raises(TierConfigError, match="cannot be written"):
        open_stack(tmp_path)


WRITER = """
import sys
from pathlib import Path
from kvtier import Tier
from tests.kvtier.support import open_stack, keys_of, pages_of, SALT_ID
stack = open_stack(Path(sys.argv[1]), host=8)
stack.put(pages_of(1, 2, 3), epoch=1, salt_id=SALT_ID, tier=Tier.HOST)
stack.put(pages_of(4, 5), epoch=1, salt_id=SALT_ID, tier=Tier.NVME)
print("stored", flush=True)
number = 0
while True:
    number += 1
    stack.put(pages_of(10 + number % 7), epoch=1, salt_id=SALT_ID, tier=Tier.HOST)
    stack.get(keys_of(1, 2, 3))
    stack.move_to_nvme(keys_of(10 + number % 7), epoch=1, salt_id=SALT_ID)
    stack.put(pages_of(20, 21, 22, 23), epoch=1, salt_id=SALT_ID, tier=Tier.NVME)
    stack.delete(keys_of(10 + (number + 3) % 7, 20, 21, 22))
"""


def test_pages_survive_a_sigkill_while_others_are_being_written(tmp_path: Path) -> None:
    for _ in range(6):
        root = Path(__file__).parents[2]
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            cwd=root,
            env=dict(os.environ),
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"stored\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
        with open_stack(tmp_path, host=8) as stack:
            assert payloads(stack.get(keys_of(1, 2, 3, 4, 5))) == [payload_of(n) for n in (1, 2, 3, 4, 5)]
            for number, loaded in zip(range(10, 24), stack.get(keys_of(*range(10, 24))), strict=True):
                assert loaded is None or bytes(loaded.payload) == payload_of(number)
            assert stack.stats().host.quarantined == stack.stats().nvme.quarantined == 0
            assert not list(tmp_path.rglob("*.tmp"))
            stack.check_integrity()
