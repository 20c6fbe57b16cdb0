"""Encrypted and compressed tiers below an engine: what lies there tells nothing, and who has the salt has it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.keyring import SaltKeys
from engine.store import salt_id
from kvtier import CodecConfig, Compression, SharedConfig, TierConfig
from tests.engine.fakes import FINGERPRINT, PAGE_BYTES, Harness, oracle
from tests.engine.test_core import PROMPT, turn
from tests.engine.tiered import Tiered

SALTS = (b"a" * 32, b"b" * 32)


class Sealed(Tiered):
    """A harness whose tiers below host memory are encrypted by salt."""

    def __init__(self, root: Path, compression: Compression = Compression.OFF, shared: bool = False) -> None:
        keys = SaltKeys()
        config = TierConfig(
            page_bytes=PAGE_BYTES,
            fingerprint=FINGERPRINT,
            host_path=None,
            host_bytes=0,
            nvme_dir=None if shared else root / "nvme",
            nvme_bytes=0 if shared else 1 << 22,
            shared=SharedConfig(root / "shared", 1 << 22) if shared else None,
            codec=CodecConfig(compression=compression, keys=keys),
        )
        super().__init__(config, keys=keys)


def transcripts(harness: Harness, place: str) -> list[list[int]]:
    """A session per salt with the same prompt, offloaded."""
    grown = []
    for index, salt in enumerate(SALTS):
        grown.append(turn(harness, f"s{index}", PROMPT, 20, salt=salt.hex()))
        receipt = harness.kv("offload", f"s{index}", tier=place, salt=salt.hex())
        assert receipt["status"] == "accepted", receipt
    return grown


def on_disk(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file())


@pytest.mark.parametrize("place", ["nvme", "shared"])
@pytest.mark.parametrize("compression", [Compression.OFF, Compression.ZSTD])
def test_pages_come_back_after_a_restart_to_who_has_the_salt(
    tmp_path: Path, place: str, compression: Compression
) -> None:
    with Sealed(tmp_path, compression, place == "shared") as harness:
        grown = transcripts(harness, place)
        plain = bytes(harness.backend.page(0))[:64]
        assert plain not in on_disk(tmp_path)
    with Sealed(tmp_path, compression, place == "shared") as harness:
        for index, (transcript, salt) in enumerate(zip(grown, SALTS, strict=True)):
            done = harness.generate(f"s{index}", [*transcript, 5], 5, salt=salt.hex(), known_tokens=len(transcript) - 1)
            assert done.tokens == oracle([*transcript, 5], 5)
            assert (done.prefill[place] > 0, done.prefill["recomputed"]) == (True, 0), done.prefill


def test_without_the_salt_nothing_is_found_and_nothing_is_lost(tmp_path: Path) -> None:
    with Sealed(tmp_path) as harness:
        grown = transcripts(harness, "nvme")
    with Sealed(tmp_path) as harness:
        assert harness.stack is not None
        assert harness.stack.stats().nvme.pages == 0
        assert harness.stack.stats().nvme.used_bytes > 0
        other = turn(harness, "other", PROMPT, 5, salt=(b"c" * 32).hex())
        assert other[: len(PROMPT)] == PROMPT
        done = harness.generate("s1", [*grown[1], 5], 5, salt=SALTS[1].hex(), known_tokens=len(grown[1]) - 1)
        assert done.prefill["recomputed"] == 0
        assert harness.stats()["integrity"] == "ok"


def test_no_salt_is_no_secret_and_nothing_is_written(tmp_path: Path) -> None:
    with Sealed(tmp_path) as harness:
        turn(harness, "s", PROMPT, 20)
        receipt = harness.kv("offload", "s", tier="nvme")
        assert receipt["status"] in ("missing", "rejected", "clipped")
        assert harness.state("s")["nvme_pages"] == 0


def test_a_key_belongs_to_its_salt() -> None:
    keys = SaltKeys()
    assert keys.learn(salt_id(SALTS[0]), SALTS[0])
    assert not keys.learn(salt_id(SALTS[0]), SALTS[0])
    assert not keys.learn(salt_id(b""), b"")
    first = keys.current(salt_id(SALTS[0]))
    assert first is not None
    assert keys.current(salt_id(SALTS[1])) is None
    assert keys.find(salt_id(SALTS[0]), b"another") is None
    assert keys.find(salt_id(SALTS[0]), first.key_id) == first
    keys.learn(salt_id(SALTS[1]), SALTS[1])
    second: Any = keys.current(salt_id(SALTS[1]))
    assert second.secret != first.secret
