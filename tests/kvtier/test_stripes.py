"""Pages that arrive stripe by stripe."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier import CodecConfig, Compression, Stripes, Tier, TierStack
from tests.kvtier.support import (
    PAGE,
    SALT_ID,
    FaultyIo,
    config,
    flip_in_payload,
    key_of,
    keys_of,
    landed,
    open_stack,
    pages_of,
    payload_of,
    rooms_of,
    segments,
    smooth_of,
)

ENDS = [100, 350, PAGE]
NUMBERS = range(20)


def put(stack: TierStack, *numbers: int) -> None:
    assert stack.put(pages_of(*numbers), epoch=1, salt_id=SALT_ID, tier=Tier.NVME).status == "accepted"


@pytest.mark.parametrize("threads", [1, 3, 32])
def test_each_stripe_is_told_in_order_once_all_pages_have_it(tmp_path: Path, threads: int) -> None:
    with TierStack.open(replace(config(tmp_path, host=0), read_threads=threads)) as stack:
        put(stack, *NUMBERS[:7])
        put(stack, *NUMBERS[7:])
        rooms, told = rooms_of(*NUMBERS), []

        def look(count: int) -> None:
            end = ENDS[count - 1]
            assert all(room[:end] == payload_of(n)[:end] for n, (_, room) in zip(NUMBERS, rooms, strict=True))
            told.append(count)

        read = stack.stream_into(rooms, Stripes(ENDS, look, 30.0))
        assert told == [1, 2, 3]
        assert read is not None
        assert landed(rooms, read.tiers) == [payload_of(number) for number in NUMBERS]
        assert set(read.tiers.values()) == {Tier.NVME}
        assert stack.stats().nvme.hits == len(NUMBERS)


def test_a_page_that_does_not_verify_is_none_and_is_set_aside(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=0) as stack:
        put(stack, 1, 2, 3)
        flip_in_payload(segments(tmp_path)[0], 2)
        rooms, told = rooms_of(1, 2, 3), []
        read = stack.stream_into(rooms, Stripes(ENDS, told.append, 30.0))
        assert read is not None
        assert landed(rooms, read.tiers) == [payload_of(1), None, payload_of(3)]
        assert told == [1, 2, 3]  # what lies there is told before it is known to be good
        assert stack.stats().nvme.quarantined == 1


def test_a_read_that_fails_ends_the_telling_and_is_counted(tmp_path: Path) -> None:
    io = FaultyIo()
    with open_stack(tmp_path, io, host=0) as stack:
        put(stack, *NUMBERS)
        io.fail(OSError(errno.EIO, "Input/output error"), lambda operation, _: operation == "read")
        told: list[int] = []
        read = stack.stream_into(rooms_of(*NUMBERS), Stripes(ENDS, told.append, 30.0))
        assert read is not None
        assert (read.tiers, read.late, told) == ({}, {}, [])
        assert stack.stats().nvme.io_errors > 0
        io.heal()
        rooms = rooms_of(*NUMBERS)
        assert len(stack.read_into(rooms).tiers) == len(NUMBERS)


@pytest.mark.parametrize("why", ["one is elsewhere", "compressed", "no such tier"])
def test_what_cannot_come_in_stripes_is_not_read_at_all(tmp_path: Path, why: str) -> None:
    codec = CodecConfig(Compression.ZLIB if why == "compressed" else Compression.OFF)
    with TierStack.open(config(tmp_path, nvme_bytes=0 if why == "no such tier" else 2**20, codec=codec)) as stack:
        pages = [(key_of(number), smooth_of(number)) for number in (1, 2)]
        stack.put(pages, epoch=1, salt_id=SALT_ID, tier=Tier.HOST if why == "no such tier" else Tier.NVME)
        stack.put(pages_of(3), epoch=1, salt_id=SALT_ID, tier=Tier.HOST)
        rooms = rooms_of(1, 2, 3) if why == "one is elsewhere" else rooms_of(1, 2)
        told: list[int] = []
        assert stack.stream_into(rooms, Stripes(ENDS, told.append, 30.0)) is None
        assert told == []
        assert stack.stats().nvme.hits == 0
        assert len(stack.read_into(rooms).tiers) == len(rooms)


def test_a_page_that_is_nowhere_is_no_stream(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=0) as stack:
        put(stack, 1)
        assert stack.stream_into(rooms_of(1, 2), Stripes(ENDS, lambda _: None, 30.0)) is None
        assert stack.lookup(keys_of(1)) == [Tier.NVME]
