from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import Audit, Flaw, Tier, TierStack
from kvtier.collect import page_name
from tests.kvtier.support import (
    PAGE,
    SALT_ID,
    FaultyIo,
    flip_in_payload,
    key_of,
    keys_of,
    manifests,
    open_stack,
    pages_of,
    payload_of,
    payloads,
    segments,
)


@pytest.fixture
def io() -> FaultyIo:
    return FaultyIo()


@pytest.fixture
def stack(tmp_path: Path, io: FaultyIo) -> Iterator[TierStack]:
    with open_stack(tmp_path, io, shared_bytes=2**20) as opened:
        for number, tier in enumerate(Tier):
            opened.put(pages_of(number, 10 + number), epoch=1, salt_id=SALT_ID, tier=tier)
        yield opened
        io.heal()


def flaws(audit: Audit) -> list[tuple[Tier, Flaw]]:
    return [(one.tier, one.flaw) for one in audit.findings]


def test_tiers_in_order_have_no_findings_and_every_page_was_read(stack: TierStack) -> None:
    audit = stack.audit()
    assert audit.findings == ()
    assert audit.clean
    assert (audit.pages, audit.size_bytes) == (6, 6 * PAGE)


def repaired(stack: TierStack, expected: list[tuple[Tier, Flaw]]) -> None:
    """The audit tells, changes nothing, repairs when asked, and then has nothing more to tell."""
    assert flaws(stack.audit()) == expected
    assert flaws(stack.audit()) == expected
    mended = stack.audit(repair=True)
    assert flaws(mended) == expected
    again = stack.audit()
    assert again.clean, again.findings
    stack.check_integrity()


def test_nvme_files_that_nothing_stands_for(tmp_path: Path, stack: TierStack) -> None:
    nvme = tmp_path / "nvme"
    folder = segments(tmp_path)[0].parent
    (folder / "0000.seg.tmp").write_bytes(b"half")
    (nvme / "speed-1.tmp").write_bytes(b"half")
    (folder / "00000000000000ff-00000000000000.seg").write_bytes(b"no manifest")
    (nvme / "stranger").write_bytes(b"?")
    repaired(stack, [(Tier.NVME, flaw) for flaw in (Flaw.HALF, Flaw.ORPHAN, Flaw.HALF, Flaw.ORPHAN)])
    assert payloads(stack.get(keys_of(1, 11))) == [payload_of(1), payload_of(11)]
    assert {path.name for path in nvme.rglob("*") if path.is_file()} == {
        "lease",
        "turn",
        segments(tmp_path)[0].name,
        manifests(tmp_path)[0].name,
    }


def test_nvme_entries_without_bytes(tmp_path: Path, stack: TierStack) -> None:
    segments(tmp_path)[0].unlink()
    assert flaws(stack.audit()) == [(Tier.NVME, Flaw.EMPTY)]
    stack.audit(repair=True)
    assert stack.lookup(keys_of(1, 11)) == [None, None]
    assert stack.audit().clean
    assert not manifests(tmp_path)


def test_nvme_pages_that_do_not_verify_and_the_quarantine(tmp_path: Path, stack: TierStack) -> None:
    flip_in_payload(segments(tmp_path)[0], 11)
    audit = stack.audit()
    assert flaws(audit) == [(Tier.NVME, Flaw.DAMAGED)]
    assert audit.findings[0].name.endswith("page 1")
    assert not audit.clean
    assert stack.get(keys_of(11)) == [None]  # found by a reader: set aside
    quarantined = stack.audit()
    assert quarantined.count(Flaw.QUARANTINED) == 1
    assert quarantined.clean
    stack.audit(repair=True)
    assert stack.audit().findings == ()
    assert payloads(stack.get(keys_of(1))) == [payload_of(1)]
    assert stack.stats().nvme.used_bytes == sum(
        path.stat().st_size for path in (tmp_path / "nvme").rglob("*") if path.is_file()
    )


def test_a_damaged_page_found_by_the_audit_is_dropped_alone(tmp_path: Path, stack: TierStack) -> None:
    flip_in_payload(segments(tmp_path)[0], 11)
    repaired(stack, [(Tier.NVME, Flaw.DAMAGED)])
    assert stack.lookup(keys_of(1, 11)) == [Tier.NVME, None]
    (manifest,) = manifests(tmp_path)
    assert json.loads(manifest.read_text().splitlines()[0])["live"] == [0]


def test_host_slots_that_differ_from_the_index(tmp_path: Path, stack: TierStack) -> None:
    arena = tmp_path / "arena"
    raw = bytearray(arena.read_bytes())
    stack.delete(keys_of(10))
    now = bytearray(arena.read_bytes())
    at = raw.index(key_of(10)) // 256 * 256  # a slot's header begins at a multiple of its alignment
    now[at : at + 256] = raw[at : at + 256]
    arena.write_bytes(now)
    flip_in_payload(arena, 0)
    repaired(stack, [(Tier.HOST, Flaw.ORPHAN), (Tier.HOST, Flaw.DAMAGED)])
    assert stack.lookup(keys_of(0, 10)) == [None, None]
    assert stack.put(pages_of(0, 10), epoch=1, salt_id=SALT_ID, tier=Tier.HOST).status == "accepted"


def test_a_host_header_that_was_overwritten(tmp_path: Path, stack: TierStack) -> None:
    arena = tmp_path / "arena"
    raw = arena.read_bytes()
    arena.write_bytes(raw.replace(key_of(0), key_of(3)))
    repaired(stack, [(Tier.HOST, Flaw.EMPTY)])
    assert payloads(stack.get(keys_of(10))) == [payload_of(10)]


def test_a_shared_store_with_half_blobs_strangers_and_gaps(tmp_path: Path, stack: TierStack) -> None:
    shared = tmp_path / "shared"
    (shared / "incoming" / "half").write_bytes(b"x")
    (shared / "pages" / "README").write_bytes(b"x")
    (shared / page_name(key_of(2))).unlink()
    found = stack.audit(repair=True)
    assert sorted(flaws(found)) == sorted((Tier.SHARED, flaw) for flaw in (Flaw.HALF, Flaw.ORPHAN, Flaw.EMPTY))
    assert stack.audit().findings == ()
    assert stack.lookup(keys_of(2, 12)) == [None, Tier.SHARED]


def test_a_shared_page_that_does_not_verify_goes_after_the_grace(tmp_path: Path, stack: TierStack) -> None:
    path = tmp_path / "shared" / page_name(key_of(2))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert flaws(stack.audit(repair=True)) == [(Tier.SHARED, Flaw.DAMAGED)]
    assert not path.exists()
    assert stack.audit().findings == ()


def test_what_another_machine_shared_or_is_writing_is_no_flaw(tmp_path: Path, stack: TierStack) -> None:
    with open_stack(tmp_path / "other", host=0, nvme_bytes=0, shared_bytes=2**20) as other:
        other.put(pages_of(30), epoch=1, salt_id=SALT_ID, tier=Tier.SHARED)
    source = tmp_path / "other" / "shared" / page_name(key_of(30))
    target = tmp_path / "shared" / page_name(key_of(30))
    target.parent.mkdir(exist_ok=True)
    shutil.copy(source, target)
    folder = segments(tmp_path)[0].parent
    import fcntl

    with (folder / "00000000000000aa-00000000000000.seg.tmp").open("wb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        assert stack.audit().findings == ()


def test_only_the_holder_of_the_lease_repairs_nvme(tmp_path: Path, stack: TierStack) -> None:
    (tmp_path / "nvme" / "stranger").write_bytes(b"?")
    with open_stack(tmp_path, host=0) as second:
        told = second.audit(repair=True)
        assert flaws(told) == [(Tier.NVME, Flaw.ORPHAN)]
        assert not told.clean
    assert (tmp_path / "nvme" / "stranger").exists()
    assert stack.audit(repair=True).clean


def test_a_medium_that_cannot_be_read_is_a_finding_and_no_crash(stack: TierStack, io: FaultyIo) -> None:
    io.fail(OSError(errno.EIO, "I/O error"), lambda seen, _: seen == "read")
    audit = stack.audit(repair=True)
    assert {(one.tier, one.flaw) for one in audit.findings} >= {
        (Tier.HOST, Flaw.UNREADABLE),
        (Tier.NVME, Flaw.UNREADABLE),
    }
    assert not audit.clean
    io.heal()
    assert payloads(stack.get(keys_of(1, 2))) == [payload_of(1), payload_of(2)]


def test_an_audit_leaves_no_descriptor_open(stack: TierStack, tmp_path: Path) -> None:
    (tmp_path / "nvme" / "stranger").write_bytes(b"?")
    before = len(os.listdir("/proc/self/fd"))
    stack.audit()
    assert len(os.listdir("/proc/self/fd")) == before
