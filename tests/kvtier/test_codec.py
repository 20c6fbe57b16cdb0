from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import CodecConfig, Compression, DomainKey, Tier, TierConfigError, TierStack
from kvtier.codec import SEAL_BYTES, Codec, join_planes, split_planes
from kvtier.errors import NoKeyError, UndecodableError
from kvtier.segment import Form
from tests.kvtier.media import Ring
from tests.kvtier.support import (
    PAGE,
    SALT_ID,
    config,
    key_of,
    keys_of,
    numbers_in,
    nvme_budget,
    pages_of,
    payload_of,
    payloads,
    segments,
    smooth_of,
)

SQUEEZE = [Compression.ZLIB, Compression.ZSTD]


def smooth(*numbers: int) -> list[tuple[bytes, bytes]]:
    return [(key_of(number), smooth_of(number)) for number in numbers]


@pytest.fixture
def ring() -> Ring:
    return Ring(b"key-1")


# --- planes and compression ------------------------------------------------------------------------------


@given(st.binary(max_size=200), st.integers(1, 8))
def test_planes_join_to_what_was_split(page: bytes, planes: int) -> None:
    page = page[: len(page) // planes * planes]
    assert bytes(join_planes(split_planes(page, planes), planes)) == page


@pytest.mark.parametrize("kind", SQUEEZE)
def test_numbers_with_a_calm_high_byte_compress_by_planes_and_come_back(kind: Compression) -> None:
    codec = Codec(CodecConfig(kind), PAGE)
    form, stored = codec.encode(smooth(1, 2), SALT_ID)
    assert (form.compression, form.planes) == (kind, 2)
    assert max(len(one) for one in stored) < 0.6 * PAGE
    for (key, page), one in zip(smooth(1, 2), stored, strict=True):
        assert codec.decode(form, key, SALT_ID, one) == page


@pytest.mark.parametrize("kind", SQUEEZE)
def test_pages_that_do_not_compress_are_stored_as_they_came(kind: Compression) -> None:
    form, stored = Codec(CodecConfig(kind), PAGE).encode(pages_of(1, 2), SALT_ID)
    assert form == Form()
    assert [bytes(one) for one in stored] == [payload_of(1), payload_of(2)]


def test_a_segment_that_saves_less_than_the_least_share_is_stored_as_it_came() -> None:
    pages = [*smooth(1), *pages_of(*range(2, 12))]
    form, _ = Codec(CodecConfig(Compression.ZLIB, least_saving=0.3), PAGE).encode(pages, SALT_ID)
    assert form.compression == Compression.OFF
    form, _ = Codec(CodecConfig(Compression.ZLIB, least_saving=0.3), PAGE).encode(smooth(1, 2), SALT_ID)
    assert form.compression == Compression.ZLIB


@pytest.mark.parametrize("kind", SQUEEZE)
def test_bytes_that_decompress_to_anything_but_one_page_are_no_page(kind: Compression) -> None:
    small, large = Codec(CodecConfig(kind), 500), Codec(CodecConfig(kind), 2 * PAGE)
    form, (stored,) = Codec(CodecConfig(kind), PAGE).encode(smooth(1), SALT_ID)
    for codec, what in ((small, stored), (large, stored), (small, b"noise"), (small, b"")):
        with pytest.raises(UndecodableError):
            codec.decode(form, key_of(1), SALT_ID, what)


def test_a_stack_records_what_compression_saved_and_takes_less_room(tmp_path: Path) -> None:
    with TierStack.open(config(tmp_path, host=0, codec=CodecConfig(Compression.ZSTD))) as stack:
        stack.put(smooth(*range(20)), epoch=1, salt_id=SALT_ID, tier=Tier.NVME)
        counts = stack.stats().nvme
        assert counts.coded_bytes == 20 * PAGE
        assert counts.stored_bytes < 0.6 * counts.coded_bytes
        assert segments(tmp_path)[0].stat().st_size < 4096 + 0.6 * 20 * PAGE
    with TierStack.open(config(tmp_path, host=0)) as plain:  # what it was written with is in the header
        assert payloads(plain.get(keys_of(3, 19))) == [smooth_of(3), smooth_of(19)]


# --- encryption ------------------------------------------------------------------------------------------


def test_a_page_is_unreadable_on_disk_and_two_copies_of_it_differ(ring: Ring) -> None:
    codec = Codec(CodecConfig(keys=ring), PAGE)
    (form, (one,)), (_, (two,)) = codec.encode(pages_of(1), SALT_ID), codec.encode(pages_of(1), SALT_ID)
    assert form.key_id == b"key-1"
    assert len(one) == PAGE + SEAL_BYTES == codec.most_stored_bytes
    assert one != two
    assert payload_of(1)[:16] not in bytes(one)
    assert codec.decode(form, key_of(1), SALT_ID, one) == payload_of(1)


def test_a_ciphertext_is_bound_to_its_page_its_tenant_and_its_form(ring: Ring) -> None:
    codec = Codec(CodecConfig(keys=ring), PAGE)
    form, (stored,) = codec.encode(pages_of(1), SALT_ID)
    flipped = bytes(stored[:50]) + bytes([stored[50] ^ 1]) + bytes(stored[51:])
    for changed in (
        (form, key_of(2), SALT_ID, stored),
        (form, key_of(1), b"tenant-b", stored),
        (Form(form.compression, 2, form.key_id), key_of(1), SALT_ID, stored),
        (form, key_of(1), SALT_ID, flipped),
        (form, key_of(1), SALT_ID, b"short"),
    ):
        with pytest.raises(UndecodableError):
            codec.decode(*changed)


@pytest.fixture
def written(tmp_path: Path, ring: Ring) -> Path:
    with TierStack.open(config(tmp_path, host=0, codec=CodecConfig(keys=ring))) as stack:
        stack.put(pages_of(1, 2), epoch=1, salt_id=SALT_ID, tier=Tier.NVME)
    return tmp_path


def test_without_the_key_pages_are_misses_that_are_counted_and_whole_for_who_has_it(written: Path, ring: Ring) -> None:
    for strangers in (None, Ring(b"key-2")):
        with TierStack.open(config(written, host=0, codec=CodecConfig(keys=strangers))) as stranger:
            assert stranger.get(keys_of(1, 2)) == [None, None]
            assert stranger.stats().nvme.undecodable == 1
            assert stranger.stats().nvme.quarantined == 0
            stranger.check_integrity()
    with TierStack.open(config(written, host=0, codec=CodecConfig(keys=ring))) as owner:
        assert payloads(owner.get(keys_of(1, 2))) == [payload_of(1), payload_of(2)]


def test_another_secret_under_the_same_key_id_is_a_miss_and_new_pages_are_written(written: Path) -> None:
    impostor = Ring(b"key-1")
    impostor.keys[b"key-1"] = DomainKey(b"key-1", bytes(32))
    with TierStack.open(config(written, host=0, codec=CodecConfig(keys=impostor))) as stack:
        assert stack.get(keys_of(1, 2)) == [None, None]
        assert stack.stats().nvme.undecodable == 2
        assert stack.put(pages_of(1), epoch=1, salt_id=SALT_ID, tier=Tier.NVME).bytes == PAGE
        assert payloads(stack.get(keys_of(1))) == [payload_of(1)]
        stack.check_integrity()


def test_a_domain_that_ended_while_we_run_is_gone_at_once(tmp_path: Path, ring: Ring) -> None:
    with TierStack.open(config(tmp_path, host=0, codec=CodecConfig(keys=ring))) as stack:
        stack.put(pages_of(1, 2), epoch=1, salt_id=SALT_ID, tier=Tier.NVME)
        ring.keys.clear()
        assert stack.get(keys_of(1, 2)) == [None, None]
        assert stack.lookup(keys_of(1, 2)) == [None, None]
        receipt = stack.put(pages_of(3), epoch=1, salt_id=SALT_ID, tier=Tier.NVME)
        assert (receipt.status, receipt.detail) == ("rejected", "the key ring has no key for this sharing domain")
        stack.check_integrity()


def test_what_nobody_here_can_read_goes_first_when_room_is_needed(written: Path) -> None:
    settings = config(written, host=0, nvme_bytes=nvme_budget(3), codec=CodecConfig(keys=Ring(b"key-2")))
    with TierStack.open(settings) as stack:
        for number in (3, 4):
            assert stack.put(pages_of(number), epoch=1, salt_id=SALT_ID, tier=Tier.NVME).status == "accepted"
        assert numbers_in(stack.keys(Tier.NVME)) == {3, 4}
        stack.check_integrity()


def test_pages_of_an_older_key_are_read_while_new_ones_are_written_with_the_current(written: Path) -> None:
    rotated = Ring(b"key-1", b"key-2")
    with TierStack.open(config(written, host=0, codec=CodecConfig(keys=rotated))) as stack:
        stack.put(pages_of(3), epoch=1, salt_id=SALT_ID, tier=Tier.NVME)
        assert payloads(stack.get(keys_of(1, 3))) == [payload_of(1), payload_of(3)]
    with TierStack.open(config(written, host=0, codec=CodecConfig(keys=Ring(b"key-2")))) as later:
        assert payloads(later.get(keys_of(1, 3))) == [None, payload_of(3)]


def test_a_deletion_does_not_need_the_key_and_rewrites_what_stays(tmp_path: Path) -> None:
    ring = Ring(b"key-1")
    both = CodecConfig(Compression.ZSTD, keys=ring)
    with TierStack.open(config(tmp_path, host=0, codec=both)) as stack:
        stack.put(smooth(*range(10)), epoch=1, salt_id=SALT_ID, tier=Tier.NVME)
        stack.delete(keys_of(*range(6)))
        assert payloads(stack.get(keys_of(*range(6, 10)))) == [smooth_of(number) for number in range(6, 10)]
        stack.check_integrity()


# --- configuration ---------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_in_a_sentence() -> None:
    with pytest.raises(TierConfigError, match="least_saving is 1"):
        CodecConfig(least_saving=1)
    with pytest.raises(TierConfigError, match="element_bytes is 0"):
        CodecConfig(element_bytes=0)
    ring = Ring(b"key-1")
    for key, sentence in (
        (DomainKey(b"", bytes(32)), "a key id has 1 to 16 bytes"),
        (DomainKey(b"x" * 17, bytes(32)), "this one has 17"),
        (DomainKey(b"key-1", b"short"), "a secret has 16, 24 or 32 bytes"),
    ):
        ring.keys = {key.key_id: key}
        with pytest.raises(TierConfigError, match=sentence):
            Codec(CodecConfig(keys=ring), PAGE).encode(pages_of(1), SALT_ID)
    ring.keys = {}
    with pytest.raises(NoKeyError):
        Codec(CodecConfig(keys=ring), PAGE).encode(pages_of(1), SALT_ID)


@pytest.mark.parametrize(
    ("module", "settings", "wanted"),
    [
        ("zstandard", CodecConfig(Compression.ZSTD), r"tenuto-server\[zstd\]"),
        ("cryptography.hazmat.primitives.ciphers.aead", CodecConfig(keys=Ring(b"k")), "the package `cryptography`"),
    ],
)
def test_a_missing_library_is_refused_at_the_start_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, settings: CodecConfig, wanted: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(TierConfigError, match=wanted):
        Codec(settings, PAGE)


def test_no_input_makes_the_decoder_return_another_page(ring: Ring) -> None:
    noise = random.Random(4)
    codec = Codec(CodecConfig(Compression.ZSTD, keys=ring), PAGE)
    form, (stored,) = codec.encode(smooth(1), SALT_ID)
    for _ in range(300):
        raw = bytearray(stored)
        raw[noise.randrange(len(raw))] ^= 1 << noise.randrange(8)
        with pytest.raises(UndecodableError):
            codec.decode(form, key_of(1), SALT_ID, raw)
